"""Capture a forward, and replay it without Python: on a CPU to the same bits, on a GPU as a graph.

On a CPU, a forward of one token runs the same native requests and PyTorch operators for every
token, on memory at fixed addresses. `capture_forward` records them in order. A replay repeats
requests as they are. An operator is converted to a request if that gives the same bits; otherwise
it is called.

On a GPU the forward is captured as a CUDA graph, after torch.compile if it is configured.

Other Python code is not captured. As in a CUDA graph, numbers that it computed stay constant, and
a forward that reads the value of a tensor raises UnsupportedView.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import CompileConfig

from kvant.errors import UnsupportedView
from kvant.native import (
    DTYPE_CODES,
    NUM_16_BIT_VALUES,
    NativeRequest,
    capture_requests,
    check_refusal,
    compile_requests,
    map_elements,
)
from kvant.platform.torch_runtime import no_inference_mode

aten = torch.ops.aten
ForwardFunction = Callable[..., Tensor]
ReplayStep = Callable[[], object]

ALLOCATING_OPS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
ALLOCATING_OPS |= {aten.new_empty_strided}
COPYING_OPS = {aten.clone, aten._to_copy}
BINARY_OPERATIONS = {aten.add: "add", aten.mul: "multiply"}
# Their bits do not depend on strides; those of gelu and rsqrt do.
UNARY_OPS = {aten.silu, aten.sigmoid, aten.tanh, aten.relu, aten.exp}
CONSTANT_OPS = {aten.lift_fresh, aten.lift_fresh_copy}
VALUE_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}  # dispatch no operator
INDEXING_OPS = {aten.index, aten.index_put, aten.index_put_}
MIN_BLOCK_BITS = 6  # blocks have a power of two of bytes, at least 2**6
MAX_REQUEST_NDIM = 4
ALIGNMENT = 64  # bytes of the longest vectors


def capture_forward(
    forward: ForwardFunction, *inputs: Tensor, buffers: ReplayBuffers | None = None
) -> Replay:
    """Run a forward and return its replay.

    Replays that never run at the same time may share `buffers`.
    """
    capture = Capture(inputs, ReplayBuffers() if buffers is None else buffers)
    with torch.no_grad(), capture, ValueReadGuard(), capture_requests(capture.add_request):
        out = forward(*inputs)
    return capture.make_replay(out)


class Replay:
    """A captured forward: a call reads the captured tensors and overwrites `out`.

    The arguments of a call are ignored.
    """

    def __init__(self, steps: Sequence[ReplayStep], out: Tensor, keepalive: object) -> None:
        self.out = out  # of the captured forward, until the first replay
        self._steps = steps
        self._keepalive = keepalive

    def __call__(self, *inputs: Tensor) -> Tensor:
        for run in self._steps:
            if type(refusal := run()) is bytes:
                check_refusal(refusal)
        return self.out


class ValueReadGuard(TorchFunctionMode):
    """Raises UnsupportedView for functions that read values without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in VALUE_READERS:
            raise UnsupportedView(f"{func.__name__} reads the value of a tensor")
        return func(*args, **(kwargs or {}))


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator, and allocates results in buffers that are reused when freed."""

    def __init__(self, inputs: Sequence[Tensor], buffers: ReplayBuffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[NativeRequest | ReplayStep] = []
        self._buffers = buffers
        self._out_variants: dict[object, Any] = {}  # by operator and arguments; None: other bits
        self._keepalive: dict[int, Tensor] = {_get_storage_key(x): _make_alias(x) for x in inputs}

    def add_request(self, request: NativeRequest) -> None:
        self._steps.append(request)

    def make_replay(self, out: Tensor) -> Replay:
        """Return the replay of all steps; neighbouring requests become one call."""
        runs = list[ReplayStep]()
        for is_request, steps in groupby(self._steps, lambda step: isinstance(step, tuple)):
            if is_request:
                runs.append(compile_requests(cast(list[NativeRequest], list(steps))))
            else:
                runs += cast(list[ReplayStep], list(steps))
        return Replay(runs, _make_alias(out), (self._buffers, self._keepalive))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        inputs = _collect_tensors((*args, *options.values()))
        _check_static_output(func, inputs)
        out = func(*args, **options)
        results = _collect_tensors(out)
        if not results and inputs and func._schema.returns:
            raise UnsupportedView(f"{func} reads the value of a tensor")
        old = {self._keep_alive(x) for x in inputs}
        new = [x for x in results if _get_storage_key(x) not in old]
        if func.overloadpacket in CONSTANT_OPS:  # the forward may write to the constant
            results = [self._copy_to_buffer(out)]
            self._steps.append(_make_call(Tensor.copy_, results[0], out.clone()))
            out = results[0]
        elif not new:
            if func._schema.is_mutable:
                self._record_mutation(func, args, options)
        elif len(new) < len(results):
            raise UnsupportedView(f"{func} returns both new and existing memory")
        elif type(out) is Tensor:
            results = [self._record_result(func, args, options, out)]
            out = results[0]
        else:
            out = tree_map_only(Tensor, self._copy_to_buffer, out)
            results = _collect_tensors(out)
            self._steps.append(_make_call(_rerun_into, func, args, options, out))
        for x in results:
            self._buffers.track(x)
        return out

    def _keep_alive(self, x: Tensor) -> int:
        """Keep the memory of an input alive unless it is in a buffer; return its storage key."""
        storage = _get_storage_key(x)
        if x.layout is torch.strided and storage not in self._buffers:
            self._keepalive.setdefault(storage, _make_alias(x))
        return storage

    def _record_mutation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Record an operator that writes to its inputs."""
        if func.overloadpacket is aten.copy_ and _is_mappable(args[0]):
            requests = _make_requests(aten.clone, (args[1].expand(args[0].shape),), {}, args[0])
            if requests:
                self._steps += requests
                return
        self._steps.append(_make_call(func, *args, **kwargs))

    def _record_result(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor
    ) -> Tensor:
        """Copy a result to a buffer, and record requests or a call that recompute it there."""
        packet, out = func.overloadpacket, self._buffers.allocate_like(result)
        if packet in ALLOCATING_OPS:
            return out
        requests = _make_requests(packet, args, kwargs, out) if _is_mappable(out) else []
        if requests and torch.equal(_view_bytes(out), _view_bytes(result)):
            self._steps += requests
            return out
        if packet is aten._to_copy:
            step: ReplayStep = _make_call(Tensor.copy_, out.copy_(result), args[0])
        elif (variant := self._find_out_variant(func, args, kwargs, out, result)) is not None:
            step = _make_call(variant, *args, **kwargs, out=out.copy_(result))
        else:
            step = _make_call(_rerun_into, func, args, kwargs, out.copy_(result))
        self._steps.append(step)
        return out

    def _find_out_variant(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor, result: Tensor
    ) -> Any:
        """Return the variant of an operator that writes the same bits into `out`, or None.

        It is run once for arguments of each shape and alignment: its bits depend only on these.
        """
        key = func, _describe_arguments((args, kwargs))
        if key not in self._out_variants:
            variant = _run_out_variant(func, args, kwargs, out)
            is_same = variant is not None and torch.equal(_view_bytes(out), _view_bytes(result))
            self._out_variants[key] = variant if is_same else None
        return self._out_variants[key]

    def _copy_to_buffer(self, x: Tensor) -> Tensor:
        return self._buffers.allocate_like(x).copy_(x)


class ReplayBuffers:
    """Blocks of memory for results; a block is free when no tracked tensor uses it."""

    def __init__(self) -> None:
        self._by_storage: dict[int, Tensor] = {}
        self._free_by_nbytes: dict[int, list[int]] = {}  # storage keys
        self._users: dict[int, set[int]] = {}  # by storage: ids of its tensors

    def __contains__(self, storage: int) -> bool:
        return storage in self._by_storage

    def allocate_like(self, x: Tensor) -> Tensor:
        """Allocate a tensor with the shape and the strides of x."""
        if x.layout is not torch.strided or type(x) is not Tensor:
            raise UnsupportedView(f"a {type(x).__name__} of {x.layout} cannot be captured")
        num_values = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        nbytes = 1 << max(MIN_BLOCK_BITS, (num_values * x.itemsize - 1).bit_length())
        free = self._free_by_nbytes.setdefault(nbytes, [])
        if not free:
            with no_inference_mode():
                block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._by_storage[_get_storage_key(block)] = block
            free.append(_get_storage_key(block))
        block = self._by_storage[free.pop()]
        with no_inference_mode():
            return block.view(x.dtype).as_strided(x.shape, x.stride())

    def track(self, x: Tensor) -> None:
        """Mark the block of x as used until x is freed."""
        if (storage := _get_storage_key(x)) not in self._by_storage:
            return
        users = self._users.setdefault(storage, set())
        if id(x) not in users:
            users.add(id(x))
            weakref.finalize(x, self._release_user, storage, id(x)).atexit = False

    def _release_user(self, storage: int, user: int) -> None:
        users = self._users[storage]
        users.discard(user)
        if not users:
            self._free_by_nbytes[self._by_storage[storage].nbytes].append(storage)


def _make_call(func: Any, *args: Any, **kwargs: Any) -> ReplayStep:
    """Return a call on aliases of its tensors, which are not tracked."""
    named = {name: _alias_tensors(value) for name, value in kwargs.items()}
    return partial(func, *map(_alias_tensors, args), **named)


def _alias_tensors(value: Any) -> Any:
    """Return an argument with aliases of its tensors."""
    if isinstance(value, Tensor):
        return _make_alias(value)
    return type(value)(map(_alias_tensors, value)) if isinstance(value, list | tuple) else value


def _run_out_variant(func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> Any:
    """Run the operator's out variant into `out`, and return the variant; None if there is none."""
    for name in (f"{func._overloadname}_out", "out"):
        if (variant := getattr(func.overloadpacket, name, None)) is not None:
            try:
                _make_call(variant, *args, **kwargs, out=out)()
            except (RuntimeError, TypeError):  # its arguments differ
                continue
            return variant
    return None


def _describe_arguments(arguments: Any) -> tuple[object, ...]:
    """Return the layout of each tensor and the value of each other argument."""
    return tuple(
        (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
        if isinstance(x, Tensor) and x.layout is torch.strided
        else (type(x), x)
        for x in tree_leaves(arguments)
    )


def _rerun_into(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    results = func(*args, **kwargs)
    for old, new in zip(_collect_tensors(out), _collect_tensors(results), strict=True):
        old.copy_(new)


def _check_static_output(func: Any, inputs: Sequence[Tensor]) -> None:
    """Raise UnsupportedView for operators whose output shape depends on values."""
    is_dynamic = torch.Tag.dynamic_output_shape in func.tags
    if func.overloadpacket in INDEXING_OPS:  # only by booleans
        is_dynamic = any(x.dtype in (torch.bool, torch.uint8) for x in inputs[1:])
    if is_dynamic or torch.Tag.data_dependent_output in func.tags:
        raise UnsupportedView(f"{func} reads the value of a tensor")


def _collect_tensors(values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results, also those in lists and tuples.

    Much faster than `tree_leaves`, which looks up each value's type: a capture has 2,000 operators.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _collect_tensors(value)]
    return []


def _get_storage_key(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def _make_alias(x: Tensor) -> Tensor:
    """Return an untracked tensor on the same memory."""
    return x.as_strided(x.shape, x.stride()) if x.layout is torch.strided else x


def _is_mappable(out: Tensor) -> bool:
    return out.dtype in DTYPE_CODES and out.ndim <= MAX_REQUEST_NDIM and out.is_cpu


def _make_requests(
    packet: Any, args: Any, kwargs: dict[str, Any], out: Tensor
) -> list[NativeRequest]:
    """Run and return requests that should compute an operator into `out`; empty if unknown."""
    requests = list[NativeRequest]()
    with capture_requests(requests.append):
        for mapping in _list_mappings(packet, args, kwargs, out):
            map_elements(*mapping)
    return requests


def _list_mappings(
    packet: Any, args: Any, kwargs: dict[str, Any], out: Tensor
) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Yield the `map_elements` arguments that compute an elementwise operator into `out`."""
    if packet in COPYING_OPS:
        if args[0].dtype == out.dtype:
            yield "copy", out, args[0], None
    elif packet is aten.neg:
        yield "negate", out, args[0], None
    elif packet in BINARY_OPERATIONS and not kwargs:
        if all(isinstance(x, Tensor) and x.dtype == out.dtype for x in args):
            a, b = (x.expand(out.shape) for x in args)
            yield BINARY_OPERATIONS[packet], out, a, b
    elif packet in UNARY_OPS:
        if out.itemsize == 2 and args[0].dtype == out.dtype:
            options = tuple(sorted(kwargs.items()))
            table = _tabulate_results(packet, tuple(args[1:]), options, out.dtype)
            yield "look_up", out, args[0], table
    elif packet is aten.cat:
        parts, dim, start = args[0], (args[1] if len(args) > 1 else 0), 0
        same_type = all(part.dtype == out.dtype and part.ndim == out.ndim for part in parts)
        for part in parts if same_type else ():
            yield "copy", out.narrow(dim, start, part.shape[dim]), part, None
            start += part.shape[dim]


@lru_cache(maxsize=32)
def _tabulate_results(
    packet: Any, extra_args: tuple[Any, ...], options: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """Return an operator's result for each 16-bit value."""
    with no_inference_mode():
        integers = torch.arange(NUM_16_BIT_VALUES, dtype=torch.int32, device="cpu")
        values = integers.to(torch.int16).view(dtype)
        table: Tensor = packet(values, *extra_args, **dict(options))
        return table


def _view_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


StaticForward = Callable[[Tensor, Tensor], Tensor]  # (ids, positions), at fixed addresses
CaptureFunction = Callable[[StaticForward, Tensor, Tensor], StaticForward]


def capture_graph(forward: StaticForward, ids: Tensor, positions: Tensor) -> StaticForward:
    """Capture a forward as a CUDA graph; its replay ignores arguments and reuses its output.

    An operation that cannot be captured, such as a synchronization, raises an error.
    """
    _check_no_synchronization(forward, ids, positions)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(ids.device)
    with (
        torch.cuda.device(ids.device),
        torch.cuda.stream(stream),  # restored even if the capture fails
        torch.cuda.graph(
            graph,
            # The default is a stream of the device that captured first.
            stream=torch.cuda.Stream(ids.device),  # type: ignore[no-untyped-call]
            capture_error_mode="thread_local",  # do not restrict other threads
        ),
    ):
        out = forward(ids, positions)

    def replay(*inputs: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def _check_no_synchronization(forward: StaticForward, ids: Tensor, positions: Tensor) -> None:
    """Raise an error if the forward synchronizes: inside a capture it could not be undone."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        forward(ids, positions)
    finally:
        _set_sync_debug_mode(previous_mode)


def _set_sync_debug_mode(mode: int | str) -> None:
    """Set the mode without torch's warning: as an error, it would come after the change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


def make_capture_function(
    capture: CaptureFunction, config: CompileConfig | None
) -> CaptureFunction:
    """Return `capture`, preceded by torch.compile if there is a configuration for it."""
    return capture if config is None else partial(_compile_and_capture, capture, config)


def _compile_and_capture(
    capture: CaptureFunction,
    config: CompileConfig,
    forward: StaticForward,
    ids: Tensor,
    positions: Tensor,
) -> StaticForward:
    from torch.fx.experimental.proxy_tensor import make_fx

    # The compiler does not understand handles, but the operators that they call.
    graph = make_fx(forward, _error_on_data_dependent_ops=True)(ids, positions)
    options = {"backend": config.backend, "options": config.options}
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, **options)
    compiled(ids, positions)  # compile now: compilation cannot be captured
    return capture(compiled, ids, positions)
