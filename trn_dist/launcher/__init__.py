"""Start, watch and stop the ranks of a run on this machine, under torchrun's environment contract.

The road of a run, each step in the file of its name: ``plan`` (what to start, checked before anything starts) →
``supervisor`` (the process that the user started: owns pipes, signals and deadlines, imports no torch) → ``zygote``
(one warm process that has imported torch and forks on request) → ``rank`` (what a forked process does to become a
rank). ``environment`` holds the contract, ``output`` what becomes of the ranks' output, ``processes`` what Linux
offers to leave nothing behind. Called by ``trn_dist.cli`` and ``trn_dist.titan``; no module here imports torch at the
top.
"""

from trn_dist.launcher.plan import LaunchError, LaunchPlan, Program
from trn_dist.launcher.supervisor import launch

__all__ = ["LaunchError", "LaunchPlan", "Program", "launch"]
