"""A forward on a CPU that was recorded, and is done again without Python: to the bit.

What a forward does for one token is the same for the next one: native requests and operators of
PyTorch, on memory that stays where it is. They are recorded in their order. Requests are done again
as they are; an operator becomes a request as well, where that gives its bits, and is else called.

Python that is not an operator is not recorded: as in a CUDA graph, a number that it computed stays
what it was, and a forward that asks for the value of a tensor is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

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
from kvant.torch_modes import no_inference_mode

aten = torch.ops.aten
ForwardFunction = Callable[..., Tensor]
ReplayStep = Callable[[], object]

ALLOCATING_OPS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
ALLOCATING_OPS |= {aten.new_empty_strided}
COPYING_OPS = {aten.clone, aten._to_copy}
BINARY_OPERATIONS = {aten.add: "add", aten.mul: "multiply"}
# Those whose bits do not depend on how numbers lie: those of gelu and rsqrt do.
UNARY_OPS = {aten.silu, aten.sigmoid, aten.tanh, aten.relu, aten.exp}
CONSTANT_OPS = {aten.lift_fresh, aten.lift_fresh_copy}
VALUE_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}  # which no operator gives
INDEXING_OPS = {aten.index, aten.index_put, aten.index_put_}
MIN_BLOCK_BITS = 6  # of the power of two that the bytes of a block are
MAX_REQUEST_NDIM = 4  # of a request


def capture_forward(
    forward: ForwardFunction, *inputs: Tensor, buffers: ReplayBuffers | None = None
) -> Replay:
    """Do a forward, and give what does it again.

    Recordings that are never done at one time may share their memory.
    """
    recording = Capture(inputs, ReplayBuffers() if buffers is None else buffers)
    with torch.no_grad(), recording, ValueReadGuard(), capture_requests(recording.add_request):
        out = forward(*inputs)
    return recording.make_replay(out)


class Replay:
    """Reads the same tensors again, and writes over its output, whatever it is called with."""

    def __init__(self, steps: Sequence[ReplayStep], out: Tensor, keepalive: object) -> None:
        self.out = out  # of the recording itself, until it is done again
        self._steps = steps
        self._keepalive = keepalive

    def __call__(self, *inputs: Tensor) -> Tensor:
        for run in self._steps:
            if type(said := run()) is bytes:
                check_refusal(said)
        return self.out


class ValueReadGuard(TorchFunctionMode):
    """Refuses what asks for values beside all operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in VALUE_READERS:
            raise UnsupportedView(f"{func.__name__} asks for the value of a tensor")
        return func(*args, **(kwargs or {}))


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and gives its results memory that is used again once they are gone."""

    def __init__(self, inputs: Sequence[Tensor], buffers: ReplayBuffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[NativeRequest | ReplayStep] = []
        self._buffers = buffers
        self._keepalive: dict[int, Tensor] = {_get_storage_key(x): _make_alias(x) for x in inputs}

    def add_request(self, request: NativeRequest) -> None:
        self._steps.append(request)

    def make_replay(self, out: Tensor) -> Replay:
        """All steps, with as many of them as can be in one call."""
        runs = list[ReplayStep]()
        for asked, steps in groupby(self._steps, lambda step: isinstance(step, tuple)):
            if asked:
                runs.append(compile_requests(cast(list[NativeRequest], list(steps))))
            else:
                runs += cast(list[ReplayStep], list(steps))
        return Replay(runs, _make_alias(out), (self._buffers, self._keepalive))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = _collect_tensors((*args, *named.values()))
        _check_static_output(func, given)
        out = func(*args, **named)
        made = _collect_tensors((out,))
        if not made and given and func._schema.returns:
            raise UnsupportedView(f"{func} asks for the value of a tensor")
        old = {self._keep_alive(x) for x in given}
        new = [x for x in made if _get_storage_key(x) not in old]
        if func.overloadpacket in CONSTANT_OPS:  # who made it may write to it
            made = [self._copy_to_buffer(out)]
            self._steps.append(_make_call(Tensor.copy_, made[0], out.clone()))
            out = made[0]
        elif not new:
            if func._schema.is_mutable:
                self._record_mutation(func, args, named)
        elif len(new) < len(made):
            raise UnsupportedView(f"{func} gives both new and old memory")
        elif type(out) is Tensor:
            made = [self._record_result(func, args, named, out)]
            out = made[0]
        else:
            out = tree_map_only(Tensor, self._copy_to_buffer, out)
            made = _collect_tensors((out,))
            self._steps.append(_make_call(_rerun_into, func, args, named, out))
        for x in made:
            self._buffers.track(x)
        return out

    def _keep_alive(self, x: Tensor) -> int:
        """What lies elsewhere is to stay; where it lies."""
        storage = _get_storage_key(x)
        if x.layout is torch.strided and storage not in self._buffers:
            self._keepalive.setdefault(storage, _make_alias(x))
        return storage

    def _record_mutation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note an operator that writes to what it was given."""
        if func.overloadpacket is aten.copy_ and _is_mappable(args[0]):
            requests = _make_requests(aten.clone, (args[1].expand(args[0].shape),), {}, args[0])
            if requests:
                self._steps += requests
                return
        self._steps.append(_make_call(func, *args, **kwargs))

    def _record_result(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor
    ) -> Tensor:
        """A result in memory of ours, and what gives it again: requests, to the bit, or a call."""
        packet, out = func.overloadpacket, self._buffers.allocate_like(result)
        if packet in ALLOCATING_OPS:
            return out
        requests = _make_requests(packet, args, kwargs, out) if _is_mappable(out) else []
        if requests and torch.equal(_view_bytes(out), _view_bytes(result)):
            self._steps += requests
            return out
        if packet is aten._to_copy:
            step: ReplayStep | None = _make_call(Tensor.copy_, out.copy_(result), args[0])
        else:
            step = _call_out_variant(func, args, kwargs, out)
        if step is None or not torch.equal(_view_bytes(out), _view_bytes(result)):
            step = _make_call(_rerun_into, func, args, kwargs, out.copy_(result))
        self._steps.append(step)
        return out

    def _copy_to_buffer(self, x: Tensor) -> Tensor:
        return self._buffers.allocate_like(x).copy_(x)


class ReplayBuffers:
    """Blocks of memory, each of which is free again once nobody looks at it."""

    def __init__(self) -> None:
        self._by_storage: dict[int, Tensor] = {}  # by storage
        self._free_by_nbytes: dict[int, list[int]] = {}  # by bytes
        self._users: dict[int, set[int]] = {}  # by storage: the tensors there

    def __contains__(self, storage: int) -> bool:
        return storage in self._by_storage

    def allocate_like(self, x: Tensor) -> Tensor:
        """A tensor with the shape and the strides of another one."""
        if x.layout is not torch.strided or type(x) is not Tensor:
            raise UnsupportedView(f"a {type(x).__name__} of {x.layout} is not recorded")
        reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        nbytes = 1 << max(MIN_BLOCK_BITS, (reach * x.itemsize - 1).bit_length())
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
        """Note who looks at our memory, until it is gone."""
        if (storage := _get_storage_key(x)) not in self._by_storage:
            return
        lookers = self._users.setdefault(storage, set())
        if id(x) not in lookers:
            lookers.add(id(x))
            weakref.finalize(x, self._release_user, storage, id(x)).atexit = False

    def _release_user(self, storage: int, user: int) -> None:
        lookers = self._users[storage]
        lookers.discard(user)
        if not lookers:
            self._free_by_nbytes[self._by_storage[storage].nbytes].append(storage)


def _make_call(func: Any, *args: Any, **kwargs: Any) -> ReplayStep:
    """A call, of tensors that nobody counts."""
    args, kwargs = tree_map_only(Tensor, _make_alias, (args, kwargs))
    return partial(func, *args, **kwargs)


def _call_out_variant(
    func: Any, args: Any, kwargs: dict[str, Any], out: Tensor
) -> ReplayStep | None:
    """A call of an operator that writes where it is told, once done; None: there is none."""
    for name in (f"{func._overloadname}_out", "out"):
        if (other := getattr(func.overloadpacket, name, None)) is not None:
            step = _make_call(other, *args, **kwargs, out=out)
            try:
                step()
            except (RuntimeError, TypeError):  # it takes something else
                continue
            return step
    return None


def _rerun_into(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    made = func(*args, **kwargs)
    for old, new in zip(_collect_tensors((out,)), _collect_tensors((made,)), strict=True):
        old.copy_(new)


def _check_static_output(func: Any, inputs: Sequence[Tensor]) -> None:
    """Refuse what comes out in another shape for other values."""
    depends = torch.Tag.dynamic_output_shape in func.tags
    if func.overloadpacket in INDEXING_OPS:  # only by booleans
        depends = any(x.dtype in (torch.bool, torch.uint8) for x in inputs[1:])
    if depends or torch.Tag.data_dependent_output in func.tags:
        raise UnsupportedView(f"{func} asks for the value of a tensor")


def _collect_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those of arguments, or of a result, also in lists."""
    found = list[Tensor]()
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _collect_tensors(one)
    return found


def _get_storage_key(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def _make_alias(x: Tensor) -> Tensor:
    """The same memory, in a tensor that nobody counts."""
    return x.as_strided(x.shape, x.stride()) if x.layout is torch.strided else x


def _is_mappable(out: Tensor) -> bool:
    return out.dtype in DTYPE_CODES and out.ndim <= MAX_REQUEST_NDIM and out.is_cpu


def _make_requests(
    packet: Any, args: Any, kwargs: dict[str, Any], out: Tensor
) -> list[NativeRequest]:
    """Requests that may give a result, and were done; none where nobody knows any."""
    requests = list[NativeRequest]()
    with capture_requests(requests.append):
        for mapping in _list_mappings(packet, args, kwargs, out):
            map_elements(*mapping)
    return requests


def _list_mappings(
    packet: Any, args: Any, kwargs: dict[str, Any], out: Tensor
) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """How numbers follow one by one, where they do."""
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
            how = tuple(sorted(kwargs.items()))
            yield (
                "look_up",
                out,
                args[0],
                _tabulate_results(packet, tuple(args[1:]), how, out.dtype),
            )
    elif packet is aten.cat:
        parts, dim, at = args[0], (args[1] if len(args) > 1 else 0), 0
        alike = all(part.dtype == out.dtype and part.ndim == out.ndim for part in parts)
        for part in parts if alike else ():
            yield "copy", out.narrow(dim, at, part.shape[dim]), part, None
            at += part.shape[dim]


@lru_cache(maxsize=32)
def _tabulate_results(
    packet: Any, extra_args: tuple[Any, ...], options: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """What a function gives for each number of 16 bits."""
    with no_inference_mode():
        every = (
            torch.arange(NUM_16_BIT_VALUES, dtype=torch.int32, device="cpu")
            .to(torch.int16)
            .view(dtype)
        )
        found: Tensor = packet(every, *extra_args, **dict(options))
        return found


def _view_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)
