"""The compiled library, as Python sees it: found, loaded, checked once; and some of its functions.

It is built by the package build where there is a C++ compiler, and lies on this package's path:
beside this file, or where an editable install puts what it has compiled. What it runs on is chosen
when it is loaded, from the processor; KVANT_ISA (amx, avx512, avx2, plain) forces one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor

from kvant.modes import passing

ABI = 16
NAME = "libkvant.so" if os.name == "posix" else "kvant.dll"
# Those that take a request, by kvant_function.
FUNCTIONS = ("attend", "store", "rotate", "norm", "choose", "multiply", "map")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kvant_dtype
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """The loaded functions, or the reason why there are none."""

    functions: ctypes.CDLL | None
    isa: str = ""
    reason: str = ""


@lru_cache(maxsize=1)
def library() -> Library:
    """What this process runs; what is missing is said once, in the log."""
    found = _loaded()
    if found.functions is None:
        logger.warning("kvant runs its reference backend: %s", found.reason)
    return found


def _loaded() -> Library:
    path = next((path for place in __path__ if (path := Path(place, NAME)).exists()), None)
    if path is None:
        return Library(None, reason="the native library was not built (is there a C++ compiler?)")
    return load(path)


def load(path: Path) -> Library:
    """One file; a copy of it is a library apart, with an instruction set of its own."""
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(None, reason=f"{path} cannot be loaded: {error}")
    if functions.kvant_abi() != ABI:
        return Library(None, reason=f"{path} is of another version: reinstall kvant")
    for name in ("isa", "run", *FUNCTIONS):
        getattr(functions, f"kvant_{name}").restype = ctypes.c_char_p
    isa = functions.kvant_isa()
    if isa is None:
        wish = os.environ.get("KVANT_ISA")
        return Library(None, reason=f"KVANT_ISA={wish} is nothing that this processor has")
    _share_team(functions)
    return Library(functions, isa.decode())


def behind(x: Tensor, size: int) -> int:
    """Bytes of memory from the first number of a tensor on, each number of so many bytes."""
    return x.untyped_storage().nbytes() - x.storage_offset() * size  # type: ignore[return-value]


def rows_record(x: Tensor) -> tuple[int, ...]:
    """Where dense rows [B, H, T, D] lie, as kvant_rows says it."""
    size, (batch, head, row, _) = x.itemsize, x.stride()
    there = x.nbytes if x.is_contiguous() else behind(x, size)
    return (x.data_ptr(), there, batch * size, head * size, row * size)


Asked = tuple[str, bytes, tuple[object, ...]]  # a function, a request, and what that points to
Hearing = Callable[[Asked], None]
_hearing: dict[int, Hearing] = {}  # by the thread whose calls are heard


def perform(name: str, request: bytes, *held: object) -> None:
    """Let a function do what a request asks; what it refuses is an error.

    Whoever hears of it keeps what is `held`: memory that lives no longer than the caller likes.
    """
    functions = library().functions
    assert functions is not None
    done(getattr(functions, f"kvant_{name}")(request))
    if _hearing and (hear := _hearing.get(get_ident())) is not None:
        hear((name, request, held))


@contextmanager
def heard(hear: Hearing) -> Iterator[None]:
    """Tell of every request that this thread makes within, and nobody else."""
    thread = get_ident()
    before = _hearing.get(thread)
    _hearing[thread] = hear
    try:
        yield
    finally:
        if before is None:
            del _hearing[thread]
        else:
            _hearing[thread] = before


def done(refusal: bytes | None) -> None:
    """Nothing where a function did what it was asked for; else what it refused as an error."""
    if refusal is not None:
        raise RuntimeError(f"the native library refuses what it was asked: {refusal.decode()}")


STEP = struct.Struct("@3q")  # kvant_step


def program(requests: Sequence[Asked]) -> Callable[[], bytes | None]:
    """What does requests one after the other, in one call; it gives what is refused, for `done`."""
    buffers = [ctypes.create_string_buffer(asked, len(asked)) for _, asked, _ in requests]
    steps = b"".join(
        STEP.pack(FUNCTIONS.index(name), ctypes.addressof(buffer), len(asked))
        for (name, asked, _), buffer in zip(requests, buffers, strict=True)
    )
    buffers.append(ctypes.create_string_buffer(steps, len(steps)))
    functions = library().functions
    assert functions is not None
    every = STEP.pack(ctypes.addressof(buffers[-1]), len(steps), len(requests))
    run: Any = partial(functions.kvant_run, every)
    run.held = buffers, [held for _, _, held in requests]  # what it points to lives as long
    return cast(Callable[[], "bytes | None"], run)


def part_teams() -> None:
    """Run on threads of its own from now on, beside those of torch."""
    if (functions := library().functions) is not None:
        functions.kvant_share_team(None)


def _share_team(functions: ctypes.CDLL) -> None:
    """Let it run on the threads that torch has anyway: two teams would compete for the cores."""
    try:
        team = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # torch was built with another OpenMP, or none
        return
    functions.kvant_share_team(ctypes.cast(team, ctypes.c_void_p))


ROTATION = struct.Struct("@16q")  # kvant_rotate_request
ROTATED_DIMS = range(16, 256 + 1, 16)
Signs = ctypes.Array[ctypes.c_float]  # one a channel: +-1 over the square root of its block


def rotatable(x: Tensor) -> bool:
    """Whether `rotated` serves this."""
    return x.is_cpu and present(x) and library().functions is not None


def present(x: Tensor) -> bool:
    """Rows that lie in memory as a kernel reads them: not only traced, and no gradient wanted."""
    return (
        type(x) is Tensor
        and not passing()
        and x.dtype in DTYPES
        and x.ndim == 4
        and x.shape[3] in ROTATED_DIMS
        and x.stride(3) == 1
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def rotated(x: Tensor, signs: Signs, *, last: bool) -> Tensor:
    """Rows [B, H, T, D] turned, multiplied by the D signs before that, or last.

    The rotation of codecs/frames/hadamard.py in one call: the same rows, to the bit. A token's rows
    take less time than a few torch operators, so what a call asks is kept cheap.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
    given = ROTATION.pack(
        *rows_record(x),
        *(DTYPES[x.dtype], *x.shape, ctypes.addressof(signs), ctypes.sizeof(signs), last),
        *(out.data_ptr(), out.nbytes, torch.get_num_threads()),
    )
    perform("rotate", given, signs)
    return out


NORM = struct.Struct("@7qd3q")  # kvant_norm_request
NORMED_DIMS = range(32, 32768 + 1, 32)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [..., D] over the root of `eps` plus the mean of their squares, times D weights.

    Computed in single precision, and rounded before the weight and after it. Rows and weights lie
    in memory without gaps, in one dtype.
    """
    out = torch.empty_like(x)
    dim = weight.shape[0]
    given = NORM.pack(
        *(x.data_ptr(), x.nbytes, weight.data_ptr(), weight.nbytes),
        *(DTYPES[x.dtype], x.numel() // dim, dim, eps, out.data_ptr(), out.nbytes),
        torch.get_num_threads(),
    )
    perform("norm", given)
    return out


PRODUCT = struct.Struct("@13q")  # kvant_multiply_request
PACKED_OUTS, PACKED_WIDTH = 64, 16  # a packed weight has blocks of outputs, and columns, of so many


def multiplied(
    x: Tensor, weight: tuple[int, int], bias: Tensor | None, *, outs: int, part: int
) -> Tensor:
    """Rows [..., width] times a packed weight, of which are given address and bytes, plus a bias.

    The sums of `part` columns are added to those of the parts before. Rows and bias are bfloat16
    and lie in memory without gaps.
    """
    width = x.shape[-1]
    out = x.new_empty((*x.shape[:-1], outs))
    given = PRODUCT.pack(
        *(x.data_ptr(), x.nbytes, *weight),
        *((0, 0) if bias is None else (bias.data_ptr(), bias.nbytes)),
        *(x.numel() // width, width, outs, part, out.data_ptr(), out.nbytes),
        torch.get_num_threads(),
    )
    perform("multiply", given)
    return out


MAP = struct.Struct("@25q")  # kvant_map_request
OPERATIONS = ("copy", "negate", "add", "multiply", "look_up")
ALL = 1 << 16  # numbers of 16 bits


def mapped(operation: str, out: Tensor, a: Tensor, b: Tensor | None = None) -> None:
    """Write to `out`, of up to four dimensions, what follows from the numbers of `a` and `b`.

    They have its shape and its dtype; to look up, `b` has what follows from each number of 16 bits.
    """
    shape = (1,) * (4 - out.ndim) + tuple(out.shape)
    perform(
        "map",
        MAP.pack(
            *(OPERATIONS.index(operation), DTYPES[out.dtype], *shape),
            *_numbers_record(a),
            *((0,) * 6 if b is None else _numbers_record(b)),
            *_numbers_record(out),
            torch.get_num_threads(),
        ),
        b,
    )


def _numbers_record(x: Tensor) -> tuple[int, ...]:
    size = x.itemsize
    strides = (0,) * (4 - x.ndim) + tuple(n * size for n in x.stride())
    return (x.data_ptr(), behind(x, size), *strides)
