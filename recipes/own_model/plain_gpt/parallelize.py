"""How the model is spread over ranks: the tensor-parallel plan, the pipeline split, and the order of the rest.

The order is TorchTitan's own and matters: tensor parallelism replaces parameters, checkpointing wraps blocks, compiling
takes the wrapped blocks, and data parallelism shards what all these have left.
"""

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.pipeline_parallel import pipeline_llm

# What selective activation checkpointing keeps: results that cost the most to make again.
SAVED_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def parallelize(model: Any, parallel_dims: Any, job_config: Any) -> nn.Module:
    """TorchTitan's ``parallelize_fn``: called with the whole model, or with one pipeline stage of it."""
    if parallel_dims.tp_enabled:
        apply_tensor_parallel(
            model, parallel_dims.get_mesh("tp"), loss_parallel=not job_config.parallelism.disable_loss_parallel
        )
    if parallel_dims.cp_enabled:
        apply_context_parallel(model, parallel_dims.get_mesh("cp"))
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=SAVED_OPERATORS,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        for number, block in model.layers.items():
            model.layers[number] = torch.compile(block, backend=job_config.compile.backend, fullgraph=True)
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        apply_fsdp(model, parallel_dims.get_mesh(names), job_config, reshard=not parallel_dims.pp_enabled)
    elif parallel_dims.dp_replicate_enabled:
        replicate(model, device_mesh=parallel_dims.get_mesh("dp_replicate"))
    return model


def apply_tensor_parallel(model: Any, mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Heads and hidden features in parts; between them activations are sharded along the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            # Positions are added to the whole sequence, which is cut afterwards.
            "embed.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def apply_context_parallel(model: Any, mesh: DeviceMesh) -> None:
    """TorchTitan 0.2.2 asks for this; 0.2.1 does it in its trainer."""
    try:
        from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
    except ImportError:
        return
    apply_cp_to_attention_module([block.attention.inner_attention for block in model.layers.values()], mesh, "sdpa")


def apply_fsdp(model: Any, mesh: DeviceMesh, job_config: Any, reshard: bool) -> None:
    training = job_config.training
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    if training.enable_cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    for module in (model.embed, *model.layers.values(), model.head):
        if module is not None:
            fully_shard(module, **settings)
    fully_shard(model, **settings)


def split_into_stages(stages: int, layers: int) -> list[list[str]]:
    """Names of the modules of each pipeline stage: blocks in equal parts, embedding first, norm and head last."""
    if stages > layers:
        raise ValueError(f"{stages} pipeline stages for {layers} blocks: expected a block or more a stage")
    bounds = [stage * layers // stages for stage in range(stages + 1)]
    names = [[f"layers.{block}" for block in range(a, b)] for a, b in itertools.pairwise(bounds)]
    names[0].insert(0, "embed")
    names[-1] += ["norm", "head"]
    return names


def pipeline(model: nn.Module, parallel_dims: Any, job_config: Any, device: Any, model_args: Any, *rest: Any) -> Any:
    """TorchTitan's ``pipelining_fn``: its own for language models, with the names of this one."""
    settings = job_config.parallelism
    if settings.module_fqns_per_model_part is None:
        single = issubclass(get_schedule_class(settings.pipeline_parallel_schedule), PipelineScheduleSingle)
        stages = parallel_dims.pp * (1 if single else 2)
        settings.module_fqns_per_model_part = split_into_stages(stages, model_args.n_layers)
    return pipeline_llm(model, parallel_dims, job_config, device, model_args, *rest)
