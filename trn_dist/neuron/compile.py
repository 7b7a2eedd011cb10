"""``torch.compile(backend="neuron")``: Dynamo and AOTAutograd as with the real backend, graphs run by eager kernels.

The numbers are therefore those of eager mode, bit for bit. What the real backend demands holds here too: static
shapes, so each new shape is a new compilation (``dynamic=True`` is refused), one mode, and no limit to the number of
recompilations. Dynamo finds it through the entry point ``torch_dynamo_backends``; :func:`install` is called when the
device is loaded.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trn_dist import _C
from trn_dist.neuron.random import get_rng_state, set_rng_state

_MODES = (None, "default")
_OPTIONS = {"fallback_execution"}
DYNAMIC_REFUSED = (
    'torch.compile(backend="neuron", dynamic=True): the neuron compiler takes static shapes only; each new shape is a '
    "new compilation. Leave dynamic out."
)


class _Metrics:
    """What was compiled in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self.graphs = 0
            self.recompilations = 0
            self.operators = 0
            self.forward_runs = 0
            self.backward_runs = 0
            self.fused_collectives = 0

    def compiled(self, graph: torch.fx.GraphModule) -> None:
        compile_id = torch._guards.CompileContext.current_compile_id()
        with self._lock:
            self.graphs += 1
            self.recompilations += bool(compile_id is not None and compile_id.frame_compile_id)
            self.operators += sum(node.op == "call_function" for node in graph.graph.nodes)

    def fused(self, collectives: int) -> None:
        with self._lock:
            self.fused_collectives += collectives

    def ran(self, backward: bool) -> None:
        with self._lock:
            self.backward_runs += backward
            self.forward_runs += not backward


_metrics = _Metrics()


def get_dynamo_metrics() -> dict[str, int]:
    """What ``torch.compile`` did with this backend in this process.

    Returns:
        ``graphs``: graphs that Dynamo handed over; ``recompilations``: those of them made again for new shapes or other
        broken guards; ``graph_breaks``: breaks that Dynamo counted, of all backends; ``operators``: calls in those
        graphs; ``forward_runs`` and ``backward_runs``: runs of compiled graphs; ``fused_collectives``: operators in
        them that asynchronous tensor parallelism put in the place of a collective and its matrix products.
    """
    from torch._dynamo.utils import counters

    return {
        "graphs": _metrics.graphs,
        "recompilations": _metrics.recompilations,
        "graph_breaks": sum(counters["graph_break"].values()),
        "operators": _metrics.operators,
        "forward_runs": _metrics.forward_runs,
        "backward_runs": _metrics.backward_runs,
        "fused_collectives": _metrics.fused_collectives,
    }


def reset_dynamo_metrics() -> None:
    """Sets the counts of :func:`get_dynamo_metrics` to zero, ``graph_breaks`` apart."""
    _metrics.reset()


def _fuse_collectives(graph: torch.fx.GraphModule) -> None:
    """Inductor's pass of asynchronous tensor parallelism, for groups whose symmetric memory is enabled.

    It puts ``symm_mem::fused_*`` (:mod:`trn_dist.neuron.symmetric_memory`) in the place of an all-gather before, or a
    reduce-scatter after, matrix products. TorchTitan switches it on by ``torch._inductor.config._micro_pipeline_tp``.
    """
    from torch._inductor import inductor_prims
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    nodes = graph.graph.nodes
    for node in nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default  # the pass knows no other form
    # The pass does nothing where NCCL is not built in.
    is_nccl_available = torch.distributed.is_nccl_available
    torch.distributed.is_nccl_available = lambda: True
    try:
        micro_pipeline_tp_pass(graph.graph)
    finally:
        torch.distributed.is_nccl_available = is_nccl_available
    for node in list(nodes):
        if node.target is inductor_prims.force_stride_order:  # our operators take any strides
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    _metrics.fused(sum(str(node.target).startswith("symm_mem.fused_") for node in nodes))


def _run_graph(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
    """The compiled region: the graph, by eager kernels; on the virtual clock one launch."""
    import torch._inductor.config
    from torch._functorch.aot_autograd import make_boxed_func

    if torch._inductor.config._micro_pipeline_tp:
        _fuse_collectives(graph)

    def region(*inputs: Any) -> Any:
        _metrics.ran(backward)
        program = _C._CompiledRegion()
        try:
            return graph.forward(*inputs)
        finally:
            del program

    return make_boxed_func(region)


def neuron(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend ``"neuron"``.

    Args:
        graph: what Dynamo traced.
        example_inputs: the inputs it was traced with; a symbolic size among them is refused.
        mode: only ``"default"``; any other warns and counts as it.
        options: ``fallback_execution`` alone is known, and accepted; others raise :class:`ValueError`.

    Raises:
        RuntimeError: the graph has dynamic shapes.
    """
    from torch._dynamo.backends.common import aot_autograd

    _check_mode(mode)
    if unknown := set(options or {}) - _OPTIONS:
        option = sorted(unknown)[0]
        raise ValueError(f'torch.compile(backend="neuron"): no option {option!r}; there is fallback_execution')
    for example in example_inputs:
        sizes = (example,) if not isinstance(example, torch.Tensor) else example.shape
        if any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes):
            raise RuntimeError(DYNAMIC_REFUSED)
    _metrics.compiled(graph)
    # Random numbers of a checkpointed region are replayed by the generator's state, as eager mode does; PyTorch's other
    # way, for graphs that a device captures, gives other numbers.
    with torch._functorch.config.patch(graphsafe_rng_functionalization=False):
        return aot_autograd(
            fw_compiler=functools.partial(_run_graph, backward=False),
            bw_compiler=functools.partial(_run_graph, backward=True),
            keep_inference_input_mutations=True,
        )(graph, example_inputs)


def _check_mode(mode: str | None) -> None:
    if mode not in _MODES:
        warnings.warn(
            f'torch.compile(backend="neuron"): there is only mode "default", which stands in for {mode!r}', stacklevel=3
        )


_notice_given = False


class _InsteadOfInductor:
    """Inductor for graphs on other devices; ours, with a notice, for those on neuron, which it has no code for.

    Equal for equal settings, as Inductor's own wrapper is, so that Dynamo's cache of compiled code is shared.
    """

    def __init__(self, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> None:
        self.inductor = torch._TorchCompileInductorWrapper(mode, options, dynamic)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InsteadOfInductor) and self.inductor == other.inductor

    def __hash__(self) -> int:
        return hash(_InsteadOfInductor)

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        global _notice_given
        tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        tensors += [*graph.parameters(), *graph.buffers()]
        devices = {tensor.device.type for tensor in tensors}
        devices |= {torch.device(d).type for node in graph.graph.nodes if (d := node.kwargs.get("device")) is not None}
        if "neuron" not in devices:
            return self.inductor(graph, example_inputs, **options)
        if not _notice_given:
            _notice_given = True
            warnings.warn(
                'torch.compile(backend="inductor"): Inductor makes no code for neuron; backend "neuron" takes its '
                "place, without Inductor's modes and options",
                stacklevel=2,
            )
        return neuron(graph, example_inputs)


def _prepare_dynamo() -> None:
    """Dynamo's settings for a device that compiles static shapes: every recompilation is made and counted."""
    import torch._dynamo.config as config

    config.automatic_dynamic_shapes = False
    config.recompile_limit = max(config.recompile_limit, 1 << 20)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1 << 20)
    from torch._functorch._aot_autograd.utils import register_graphsafe_rng_device_type, supports_graphsafe_rng

    if not supports_graphsafe_rng(torch.device("neuron")):
        register_graphsafe_rng_device_type("neuron")
    _support_replayed_draws()
    _keep_saved_meshes_last()


def _keep_saved_meshes_last() -> None:
    """The generator's states of checkpointed regions go between the tensors and the opaque values that are saved.

    AOTAutograd expects what a graph saves in the order tensors, opaque values (a DTensor's mesh), sizes. PyTorch 2.13
    puts these states, which are tensors, behind the opaque values of both graphs.
    """
    from torch._functorch import partitioners

    original: Any = partitioners.functionalize_rng_ops
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def functionalize(joint: Any, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, sizes: int) -> Any:
        before = backward.graph.find_nodes(op="placeholder")
        opaque = [node for node in before if "tangent" not in node.name and partitioners.is_opaque_node(node)]
        forward, backward = original(joint, forward, backward, sizes + len(opaque))
        if opaque:
            for state in backward.graph.find_nodes(op="placeholder"):
                if state not in before:
                    opaque[0].prepend(state)
            backward.recompile()
        return forward, backward

    partitioners.functionalize_rng_ops = functionalize  # type: ignore[assignment]


def _support_replayed_draws() -> None:
    """``torch._prims.rng_prims`` replays the draws of checkpointed regions on a closed list of devices."""
    from torch._C import DispatchKey
    from torch._prims.rng_prims import get_device, run_and_save_rng_state, run_with_rng_state

    def draw_and_save(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return get_rng_state(), op(*args, **kwargs)

    def draw_again(state: torch.Tensor, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        present = get_rng_state()
        set_rng_state(state.cpu())
        result = op(*args, **kwargs)
        set_rng_state(present)
        return result

    def select(kernel: Callable[..., Any], others: Callable[..., Any], before: int, *args: Any, **kwargs: Any) -> Any:
        return (kernel if get_device(args[before:], kwargs) == "neuron" else others)(*args, **kwargs)

    # By how many arguments come before those of the operator that draws.
    for operator, kernel, before in ((run_and_save_rng_state, draw_and_save, 1), (run_with_rng_state, draw_again, 2)):
        if DispatchKey.PrivateUse1 in operator.py_kernels:
            continue
        operator.py_impl(DispatchKey.PrivateUse1)(kernel)
        others = operator.py_kernels[DispatchKey.BackendSelect]

        operator.py_kernels[DispatchKey.BackendSelect] = functools.partial(select, kernel, others, before)


def install() -> None:
    """Puts the rules of the backend in front of ``torch.compile``, which decides on dynamic shapes before any backend.

    ``backend="neuron"`` refuses ``dynamic=True``. ``backend="inductor"``, PyTorch's default, stays Inductor for graphs
    on other devices and becomes ``"neuron"`` for graphs on this one.
    """
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, *, backend: Any = None, dynamic: bool | None = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, backend=backend, dynamic=dynamic, **options)
        name = "inductor" if backend is None else backend
        if name is neuron:
            name = "neuron"
        if name not in ("neuron", "inductor"):
            return original(model, backend=backend, dynamic=dynamic, **options)
        _prepare_dynamo()
        if name == "neuron":
            if dynamic:
                raise RuntimeError(DYNAMIC_REFUSED)
            _check_mode(options.get("mode"))
            return original(model, backend=neuron, dynamic=False, **{**options, "mode": None})
        mode, settings = options.pop("mode", None), dict(options.pop("options", None) or {})
        if settings.get("use_aoti") or (
            mode and settings
        ):  # compiled ahead of time; a contradiction that torch refuses
            return original(model, backend=backend, dynamic=dynamic, mode=mode, options=settings, **options)
        kept = {name: settings.pop(name) for name in ("guard_filter_fn", "use_aoti") if name in settings}
        backend = _InsteadOfInductor(mode, settings, dynamic)
        return original(model, backend=backend, dynamic=dynamic, options=kept or None, **options)

    torch.compile = compile
