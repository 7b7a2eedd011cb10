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

    def compiled(self, graph: torch.fx.GraphModule) -> None:
        compile_id = torch._guards.CompileContext.current_compile_id()
        with self._lock:
            self.graphs += 1
            self.recompilations += bool(compile_id is not None and compile_id.frame_compile_id)
            self.operators += sum(node.op == "call_function" for node in graph.graph.nodes)

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
        graphs; ``forward_runs`` and ``backward_runs``: runs of compiled graphs.
    """
    from torch._dynamo.utils import counters

    return {
        "graphs": _metrics.graphs,
        "recompilations": _metrics.recompilations,
        "graph_breaks": sum(counters["graph_break"].values()),
        "operators": _metrics.operators,
        "forward_runs": _metrics.forward_runs,
        "backward_runs": _metrics.backward_runs,
    }


def reset_dynamo_metrics() -> None:
    """Sets the counts of :func:`get_dynamo_metrics` to zero, ``graph_breaks`` apart."""
    _metrics.reset()


def _run_graph(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
    """The compiled region: the graph, by eager kernels."""
    from torch._functorch.aot_autograd import make_boxed_func

    def region(*inputs: Any) -> Any:
        _metrics.ran(backward)
        return graph.forward(*inputs)

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


def _instead_of_inductor(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor for graphs on other devices; ours, with a notice, for those on neuron, which it has no code for."""
    global _notice_given
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    tensors += [*graph.parameters(), *graph.buffers()]
    devices = {tensor.device.type for tensor in tensors}
    devices |= {torch.device(d).type for node in graph.graph.nodes if (d := node.kwargs.get("device")) is not None}
    if "neuron" not in devices:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, example_inputs, **options)
    if not _notice_given:
        _notice_given = True
        warnings.warn(
            'torch.compile(backend="inductor"): Inductor makes no code for neuron; backend "neuron" takes its place',
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
        if options.get("mode") not in _MODES or options.get("options"):
            return original(model, backend=backend, dynamic=dynamic, **options)
        return original(model, backend=_instead_of_inductor, dynamic=dynamic, **options)

    torch.compile = compile
