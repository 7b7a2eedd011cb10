"""What a collective costs on a topology: algorithms, choice by size, and the rules of the real stack.

Imports no torch. ``Communicator(topology, ranks).table("all_reduce")`` is the way in.
"""

from trn_dist.collectives.communicator import OPERATIONS, Communicator
from trn_dist.collectives.cost_table import CostPiece, CostTable
from trn_dist.collectives.group import mesh_groups, sibling_groups
from trn_dist.collectives.legality import (
    Finding,
    IllegalGroupError,
    check_collective,
    check_communicators,
    check_group,
    refuse,
)

__all__ = [
    "OPERATIONS",
    "Communicator",
    "CostPiece",
    "CostTable",
    "Finding",
    "IllegalGroupError",
    "check_collective",
    "check_communicators",
    "check_group",
    "mesh_groups",
    "refuse",
    "sibling_groups",
]
