"""Virtual time: what a Trainium cluster would take for this program, and where the time would go.

The clocks are in C++ (``csrc/timing``) and run beside every operator and collective. Here: the figures they run on,
taken from the cluster's files, and what a program asks them.

>>> from trn_dist import timing
>>> timing.mark_step()                    # from here on
>>> train_one_step()
>>> step = timing.mark_step()
>>> print(step.table())
"""

from trn_dist.timing.cluster import cluster, cluster_topology
from trn_dist.timing.steps import (
    GroupTimes,
    OperatorTimes,
    StepTimes,
    host_time_us,
    irreproducible_reason,
    mark_step,
)
from trn_dist.timing.trace import flush_trace, join_traces, start_trace, trace_file

__all__ = [
    "GroupTimes",
    "OperatorTimes",
    "StepTimes",
    "cluster",
    "cluster_topology",
    "flush_trace",
    "host_time_us",
    "irreproducible_reason",
    "join_traces",
    "mark_step",
    "start_trace",
    "trace_file",
]
