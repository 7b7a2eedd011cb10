"""A Llama 3 of two layers of width 64, for comparisons that are made by the hundred. Named as
``experimental.custom_import``, it adds the flavor "tiny" to TorchTitan's llama3.
"""

import dataclasses

from torchtitan.models.llama3 import llama3_args

llama3_args["tiny"] = dataclasses.replace(llama3_args["debugmodel"], dim=64, n_layers=2, n_heads=4, n_kv_heads=2)
