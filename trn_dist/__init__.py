"""Distributed PyTorch training on a simulated Trainium cluster.

This module imports no torch: ``import torch`` loads the device through the entry point ``trn_dist.neuron.autoload``,
and an import of torch from here would then run in a circle.
"""

__version__ = "0.1.0"
