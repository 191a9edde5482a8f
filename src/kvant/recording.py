"""A forward on a CPU that was recorded, and is done again without Python: to the bit.

What a forward does for one token is the same for the next one: native requests and operators of
PyTorch, on memory that stays where it is. They are recorded in their order. Requests are done again
as they are; an operator becomes a request as well, where that gives its bits, and is else called.

Python that is not an operator is not recorded: as in a CUDA graph, a number that it computed stays
what it was, and a forward that asks for the value of a tensor is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvant.errors import UnsupportedView
from kvant.modes import no_inference_mode
from kvant.native import ALL, DTYPES, Program, heard, mapped

aten = torch.ops.aten
Forward = Callable[..., Tensor]
Step = Callable[[], object]

ALLOCATING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
ALLOCATING |= {aten.new_empty_strided}
COPYING = {aten.clone, aten._to_copy, aten.copy_}
OF_TWO = {aten.add: "add", aten.mul: "multiply"}
OF_ONE = {aten.silu, aten.gelu, aten.sigmoid, aten.tanh, aten.relu, aten.exp, aten.rsqrt}
INDEXING = {aten.index, aten.index_put, aten.index_put_}
INTO = {aten.mm, aten.addmm, aten.bmm}  # those that write where they are told, at no other cost
UNIT = 64  # bytes
MAX_NDIM = 4  # of a request
Asked = tuple[str, bytes]  # a native function, and a request


def recorded(forward: Forward, *given: Tensor) -> Forward:
    """Do a forward, and give what does it again: it reads the same tensors, and writes over its
    output, whatever it is called with."""
    recording = Recording(given)
    with torch.no_grad(), recording, heard(recording.hear):
        out = forward(*given)
    return recording.replay(out)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and gives its results memory that is used again once they are gone."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Asked | Step] = []
        self._memory = Memory()
        self._kept: dict[int, Tensor] = {_storage(x): _alias(x) for x in given}

    def hear(self, name: str, request: bytes) -> None:
        self._steps.append((name, request))

    def replay(self, out: Tensor) -> Forward:
        """All steps, with as many of them as can be in one call."""
        runs: list[Step] = []
        requests: list[Asked] = []
        for step in self._steps:
            if isinstance(step, tuple):
                requests.append(step)
                continue
            if requests:
                runs.append(Program(requests))
                requests = []
            runs.append(step)
        if requests:
            runs.append(Program(requests))
        held = self._memory, self._kept, out

        def replay(*same: Tensor) -> Tensor:
            for run in runs:
                run()
            return held[2]

        return replay

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = [x for x in tree_leaves((args, named)) if isinstance(x, Tensor)]
        _check(func, given)
        out = func(*args, **named)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not made and given and func._schema.returns:
            raise UnsupportedView(f"{func} asks for the value of a tensor")
        old = {_storage(x) for x in given}
        for x in given:
            self._keep(x)
        if all(_storage(x) in old for x in made):
            if func._schema.is_mutable:
                self._note(func, args, named, args[0])
            return self._memory.follow(out)
        if any(_storage(x) in old for x in made):
            raise UnsupportedView(f"{func} gives both new and old memory")
        placed = tree_map_only(Tensor, self._placed, out)
        if func.overloadpacket not in ALLOCATING:
            self._note(func, args, named, placed)
        return self._memory.follow(placed)

    def _placed(self, x: Tensor) -> Tensor:
        """A result, in memory of ours."""
        if x.layout is not torch.strided or type(x) is not Tensor:
            raise UnsupportedView(f"a {type(x).__name__} of {x.layout} is not recorded")
        return self._memory.like(x).copy_(x)

    def _keep(self, x: Tensor) -> None:
        """What lies elsewhere is to stay."""
        if x.layout is torch.strided and _storage(x) not in self._memory:
            self._kept.setdefault(_storage(x), _alias(x))

    def _note(self, func: Any, args: Any, named: dict[str, Any], out: Any) -> None:
        """A step that gives this result again."""
        if type(out) is Tensor and (requests := _requests(func, args, named, out)):
            self._steps += requests
            return
        args, named, out = tree_map_only(Tensor, _alias, (args, named, out))
        if func._schema.is_mutable:
            self._steps.append(partial(func, *args, **named))
        elif func.overloadpacket in INTO:
            self._steps.append(partial(func.overloadpacket.out, *args, **named, out=out))
        else:
            self._steps.append(partial(_again, func, args, named, out))


class Memory:
    """Blocks of memory, each of which is free again once nobody looks at it."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}  # by storage
        self._free: dict[int, list[int]] = {}  # by bytes
        self._lookers: dict[int, set[int]] = {}  # by storage: the tensors there

    def __contains__(self, storage: int) -> bool:
        return storage in self._blocks

    def like(self, x: Tensor) -> Tensor:
        """A tensor with the shape and the strides of another one."""
        reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        nbytes = -(-max(reach, 1) * x.itemsize // UNIT) * UNIT
        free = self._free.setdefault(nbytes, [])
        if not free:
            with no_inference_mode():
                block = torch.empty(nbytes, dtype=torch.uint8)
            self._blocks[_storage(block)] = block
            free.append(_storage(block))
        block = self._blocks[free.pop()]
        with no_inference_mode():
            return block.view(x.dtype).as_strided(x.shape, x.stride())

    def follow(self, out: Any) -> Any:
        """Note who looks at our memory, until they are gone."""
        for x in tree_leaves(out):
            if not isinstance(x, Tensor) or x.layout is not torch.strided:
                continue
            if (storage := _storage(x)) not in self._blocks:
                continue
            lookers = self._lookers.setdefault(storage, set())
            if id(x) not in lookers:
                lookers.add(id(x))
                weakref.finalize(x, self._gone, storage, id(x)).atexit = False
        return out

    def _gone(self, storage: int, looker: int) -> None:
        lookers = self._lookers[storage]
        lookers.discard(looker)
        if not lookers:
            self._free[self._blocks[storage].nbytes].append(storage)


def _again(func: Any, args: Any, named: dict[str, Any], out: Any) -> None:
    made = func(*args, **named)
    for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)


def _check(func: Any, given: Sequence[Tensor]) -> None:
    """Refuse what comes out in another shape for other values."""
    depends = torch.Tag.dynamic_output_shape in func.tags
    if func.overloadpacket in INDEXING:  # only by booleans
        depends = any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
    if depends or torch.Tag.data_dependent_output in func.tags:
        raise UnsupportedView(f"{func} asks for the value of a tensor")


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def _alias(x: Tensor) -> Tensor:
    """The same memory, in a tensor that nobody counts."""
    return x.as_strided(x.shape, x.stride()) if x.layout is torch.strided else x


def _requests(func: Any, args: Any, named: dict[str, Any], out: Tensor) -> list[Asked]:
    """Requests that give this result, to the bit; none where nobody knows any."""
    if out.dtype not in DTYPES or out.ndim > MAX_NDIM or not out.is_cpu:
        return []
    wanted, requests = out.clone(), list[Asked]()
    with heard(lambda name, request: requests.append((name, request))):
        for mapping in _mappings(func.overloadpacket, args, named, out):
            mapped(*mapping)
    if requests and torch.equal(_bits(out), _bits(wanted)):
        return requests
    out.copy_(wanted)
    return []


def _mappings(
    packet: Any, args: Any, named: dict[str, Any], out: Tensor
) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """How numbers follow one by one, where they do."""
    if packet in COPYING:
        source = args[1] if packet is aten.copy_ else args[0]
        if source.dtype == out.dtype:
            yield "copy", out, source.expand(out.shape), None
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
        parts, dim = args[0], (args[1] if len(args) > 1 else 0)
        at = 0
        for part in parts:
            if part.dtype != out.dtype or part.ndim != out.ndim:
                return
            yield "copy", out.narrow(dim, at, part.shape[dim]), part, None
            at += part.shape[dim]


@lru_cache(maxsize=32)
def _results(
    packet: Any, rest: tuple[Any, ...], how: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """What a function gives for each number of 16 bits."""
    with no_inference_mode():
        every = torch.arange(ALL, dtype=torch.int32).to(torch.int16).view(dtype)
        found: Tensor = packet(every, *rest, **dict(how))
        return found


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.itemsize == 2 else torch.int32)
