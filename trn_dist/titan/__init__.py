"""The bridge to TorchTitan: recipe TOML, data, train spec, metrics, and ``trn train``.

Nothing else in trn_dist imports torchtitan. This module itself imports neither torch nor torchtitan, because the
device's autoload hook reaches :mod:`trn_dist.titan.upstream_patches` through it while ``import torch`` is still
running.
"""
