"""The hardware as data: chips and clusters from TOML files, and the graph of links between them.

Imports no torch. ``load_cluster`` is the way in; ``Topology`` answers what lies between two ranks.
"""

from trn_dist.hardware.chip import AllocatorPolicy, Chip, load_chip
from trn_dist.hardware.cluster import Cluster, LinkFault, Placement, load_cluster
from trn_dist.hardware.config_file import ConfigError, configs_directory, list_configs
from trn_dist.hardware.topology import Link, Route, RouteError, Topology

__all__ = [
    "AllocatorPolicy",
    "Chip",
    "Cluster",
    "ConfigError",
    "Link",
    "LinkFault",
    "Placement",
    "Route",
    "RouteError",
    "Topology",
    "configs_directory",
    "list_configs",
    "load_chip",
    "load_cluster",
]
