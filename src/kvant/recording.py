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
from kvant.modes import no_inference_mode
from kvant.native import ALL, DTYPES, Asked, done, heard, mapped, program

aten = torch.ops.aten
Forward = Callable[..., Tensor]
Step = Callable[[], object]

ALLOCATING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
ALLOCATING |= {aten.new_empty_strided}
COPYING = {aten.clone, aten._to_copy}
OF_TWO = {aten.add: "add", aten.mul: "multiply"}
# Those whose bits do not depend on how numbers lie: those of gelu and rsqrt do.
OF_ONE = {aten.silu, aten.sigmoid, aten.tanh, aten.relu, aten.exp}
CONSTANT = {aten.lift_fresh, aten.lift_fresh_copy}
VALUES = {Tensor.tolist, Tensor.numpy, Tensor.__array__}  # which no operator gives
INDEXING = {aten.index, aten.index_put, aten.index_put_}
LEAST = 6  # of the power of two that the bytes of a block are
MAX_NDIM = 4  # of a request


def recorded(forward: Forward, *given: Tensor, blocks: Blocks | None = None) -> Replay:
    """Do a forward, and give what does it again.

    Recordings that are never done at one time may share their memory.
    """
    recording = Recording(given, Blocks() if blocks is None else blocks)
    with torch.no_grad(), recording, Refusing(), heard(recording.hear):
        out = forward(*given)
    return recording.replay(out)


class Replay:
    """Reads the same tensors again, and writes over its output, whatever it is called with."""

    def __init__(self, runs: Sequence[Step], out: Tensor, held: object) -> None:
        self.out = out  # of the recording itself, until it is done again
        self._runs = runs
        self._held = held

    def __call__(self, *same: Tensor) -> Tensor:
        for run in self._runs:
            if type(said := run()) is bytes:
                done(said)
        return self.out


class Refusing(TorchFunctionMode):
    """Refuses what asks for values beside all operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in VALUES:
            raise UnsupportedView(f"{func.__name__} asks for the value of a tensor")
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and gives its results memory that is used again once they are gone."""

    def __init__(self, given: Sequence[Tensor], blocks: Blocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Asked | Step] = []
        self._blocks = blocks
        self._kept: dict[int, Tensor] = {_storage(x): _alias(x) for x in given}

    def hear(self, asked: Asked) -> None:
        self._steps.append(asked)

    def replay(self, out: Tensor) -> Replay:
        """All steps, with as many of them as can be in one call."""
        runs = list[Step]()
        for asked, steps in groupby(self._steps, lambda step: isinstance(step, tuple)):
            if asked:
                runs.append(program(cast(list[Asked], list(steps))))
            else:
                runs += cast(list[Step], list(steps))
        return Replay(runs, _alias(out), (self._blocks, self._kept))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = _tensors((*args, *named.values()))
        _check(func, given)
        out = func(*args, **named)
        made = _tensors((out,))
        if not made and given and func._schema.returns:
            raise UnsupportedView(f"{func} asks for the value of a tensor")
        old = {self._keep(x) for x in given}
        new = [x for x in made if _storage(x) not in old]
        if func.overloadpacket in CONSTANT:  # who made it may write to it
            made = [self._copied(out)]
            self._steps.append(_called(Tensor.copy_, made[0], out.clone()))
            out = made[0]
        elif not new:
            if func._schema.is_mutable:
                self._changed(func, args, named)
        elif len(new) < len(made):
            raise UnsupportedView(f"{func} gives both new and old memory")
        elif type(out) is Tensor:
            made = [self._placed(func, args, named, out)]
            out = made[0]
        else:
            out = tree_map_only(Tensor, self._copied, out)
            made = _tensors((out,))
            self._steps.append(_called(_again, func, args, named, out))
        for x in made:
            self._blocks.follow(x)
        return out

    def _keep(self, x: Tensor) -> int:
        """What lies elsewhere is to stay; where it lies."""
        storage = _storage(x)
        if x.layout is torch.strided and storage not in self._blocks:
            self._kept.setdefault(storage, _alias(x))
        return storage

    def _changed(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Note an operator that writes to what it was given."""
        if func.overloadpacket is aten.copy_ and _fits(args[0]):
            requests = _requests(aten.clone, (args[1].expand(args[0].shape),), {}, args[0])
            if requests:
                self._steps += requests
                return
        self._steps.append(_called(func, *args, **named))

    def _placed(self, func: Any, args: Any, named: dict[str, Any], found: Tensor) -> Tensor:
        """A result in memory of ours, and what gives it again: requests, to the bit, or a call."""
        packet, out = func.overloadpacket, self._blocks.like(found)
        if packet in ALLOCATING:
            return out
        requests = _requests(packet, args, named, out) if _fits(out) else []
        if requests and torch.equal(_bits(out), _bits(found)):
            self._steps += requests
            return out
        if packet is aten._to_copy:
            step: Step | None = _called(Tensor.copy_, out.copy_(found), args[0])
        else:
            step = _into(func, args, named, out)
        if step is None or not torch.equal(_bits(out), _bits(found)):
            step = _called(_again, func, args, named, out.copy_(found))
        self._steps.append(step)
        return out

    def _copied(self, x: Tensor) -> Tensor:
        return self._blocks.like(x).copy_(x)


class Blocks:
    """Blocks of memory, each of which is free again once nobody looks at it."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}  # by storage
        self._free: dict[int, list[int]] = {}  # by bytes
        self._lookers: dict[int, set[int]] = {}  # by storage: the tensors there

    def __contains__(self, storage: int) -> bool:
        return storage in self._blocks

    def like(self, x: Tensor) -> Tensor:
        """A tensor with the shape and the strides of another one."""
        if x.layout is not torch.strided or type(x) is not Tensor:
            raise UnsupportedView(f"a {type(x).__name__} of {x.layout} is not recorded")
        reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        nbytes = 1 << max(LEAST, (reach * x.itemsize - 1).bit_length())
        free = self._free.setdefault(nbytes, [])
        if not free:
            with no_inference_mode():
                block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._blocks[_storage(block)] = block
            free.append(_storage(block))
        block = self._blocks[free.pop()]
        with no_inference_mode():
            return block.view(x.dtype).as_strided(x.shape, x.stride())

    def follow(self, x: Tensor) -> None:
        """Note who looks at our memory, until it is gone."""
        if (storage := _storage(x)) not in self._blocks:
            return
        lookers = self._lookers.setdefault(storage, set())
        if id(x) not in lookers:
            lookers.add(id(x))
            weakref.finalize(x, self._gone, storage, id(x)).atexit = False

    def _gone(self, storage: int, looker: int) -> None:
        lookers = self._lookers[storage]
        lookers.discard(looker)
        if not lookers:
            self._free[self._blocks[storage].nbytes].append(storage)


def _called(func: Any, *args: Any, **named: Any) -> Step:
    """A call, of tensors that nobody counts."""
    args, named = tree_map_only(Tensor, _alias, (args, named))
    return partial(func, *args, **named)


def _into(func: Any, args: Any, named: dict[str, Any], out: Tensor) -> Step | None:
    """A call of an operator that writes where it is told, once done; None: there is none."""
    for name in (f"{func._overloadname}_out", "out"):
        if (other := getattr(func.overloadpacket, name, None)) is not None:
            step = _called(other, *args, **named, out=out)
            try:
                step()
            except (RuntimeError, TypeError):  # it takes something else
                continue
            return step
    return None


def _again(func: Any, args: Any, named: dict[str, Any], out: Any) -> None:
    made = func(*args, **named)
    for old, new in zip(_tensors((out,)), _tensors((made,)), strict=True):
        old.copy_(new)


def _check(func: Any, given: Sequence[Tensor]) -> None:
    """Refuse what comes out in another shape for other values."""
    depends = torch.Tag.dynamic_output_shape in func.tags
    if func.overloadpacket in INDEXING:  # only by booleans
        depends = any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
    if depends or torch.Tag.data_dependent_output in func.tags:
        raise UnsupportedView(f"{func} asks for the value of a tensor")


def _tensors(every: Iterable[Any]) -> list[Tensor]:
    """Those of arguments, or of a result, also in lists."""
    found = list[Tensor]()
    for one in every:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _tensors(one)
    return found


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def _alias(x: Tensor) -> Tensor:
    """The same memory, in a tensor that nobody counts."""
    return x.as_strided(x.shape, x.stride()) if x.layout is torch.strided else x


def _fits(out: Tensor) -> bool:
    return out.dtype in DTYPES and out.ndim <= MAX_NDIM and out.is_cpu


def _requests(packet: Any, args: Any, named: dict[str, Any], out: Tensor) -> list[Asked]:
    """Requests that may give a result, and were done; none where nobody knows any."""
    requests = list[Asked]()
    with heard(requests.append):
        for mapping in _mappings(packet, args, named, out):
            mapped(*mapping)
    return requests


def _mappings(
    packet: Any, args: Any, named: dict[str, Any], out: Tensor
) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """How numbers follow one by one, where they do."""
    if packet in COPYING:
        if args[0].dtype == out.dtype:
            yield "copy", out, args[0], None
    elif packet is aten.neg:
        yield "negate", out, args[0], None
    elif packet in OF_TWO and not named:
        if all(isinstance(x, Tensor) and x.dtype == out.dtype for x in args):
            a, b = (x.expand(out.shape) for x in args)
            yield OF_TWO[packet], out, a, b
    elif packet in OF_ONE:
        if out.itemsize == 2 and args[0].dtype == out.dtype:
            how = tuple(sorted(named.items()))
            yield "look_up", out, args[0], _results(packet, tuple(args[1:]), how, out.dtype)
    elif packet is aten.cat:
        parts, dim, at = args[0], (args[1] if len(args) > 1 else 0), 0
        alike = all(part.dtype == out.dtype and part.ndim == out.ndim for part in parts)
        for part in parts if alike else ():
            yield "copy", out.narrow(dim, at, part.shape[dim]), part, None
            at += part.shape[dim]


@lru_cache(maxsize=32)
def _results(
    packet: Any, rest: tuple[Any, ...], how: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """What a function gives for each number of 16 bits."""
    with no_inference_mode():
        every = torch.arange(ALL, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
        found: Tensor = packet(every, *rest, **dict(how))
        return found


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)
