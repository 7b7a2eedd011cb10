"""Runs a program in timing mode as rank 0 of a world that has no other process, or none but a pipeline's other stages.

    TRN_TIMING_ONLY=1 python -m trn_dist.timing.lone_rank 64 -m torchtitan.train --job.config_file ...

``trn run --timing-only`` and ``trn train --timing-only`` start it.
"""

from __future__ import annotations

import argparse
import runpy
import sys

from trn_dist.timing.virtual_world import TIMING_ONLY_VARIABLE, enter_world, timing_only


def main() -> None:
    """Runs a program, or with ``-m`` a module, as a rank of a virtual world."""
    parser = argparse.ArgumentParser(prog="python -m trn_dist.timing.lone_rank", description=main.__doc__)
    parser.add_argument("world_size", type=int, help="ranks of the job")
    parser.add_argument("--nodes", type=int, help="simulated nodes of the job")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages, each a process of its own: RANK")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.world_size < 1:
        parser.error(f"world_size {options.world_size}: must be at least 1")
    if not timing_only():
        parser.error(f"a world larger than its processes needs timing mode; set {TIMING_ONLY_VARIABLE}=1")
    try:
        enter_world(options.world_size, options.nodes, options.stages)
    except ValueError as error:
        parser.error(str(error))
    sys.argv = [options.program, *options.arguments]
    if options.is_module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
