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

from kvant.torch_modes import is_tracing

ABI_VERSION = 16
LIBRARY_NAME = "libkvant.so" if os.name == "posix" else "kvant.dll"
# Those that take a request, by kvant_function.
FUNCTION_NAMES = ("attend", "store", "rotate", "norm", "choose", "multiply", "map")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kvant_dtype
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded functions, or the reason why there are none."""

    functions: ctypes.CDLL | None
    isa: str = ""
    reason: str = ""


@lru_cache(maxsize=1)
def get_library() -> NativeLibrary:
    """What this process runs; what is missing is said once, in the log."""
    found = _find_library()
    if found.functions is None:
        logger.warning("kvant runs its reference backend: %s", found.reason)
    return found


def _find_library() -> NativeLibrary:
    path = next((path for place in __path__ if (path := Path(place, LIBRARY_NAME)).exists()), None)
    if path is None:
        return NativeLibrary(
            None, reason="the native library was not built (is there a C++ compiler?)"
        )
    return load_library(path)


def load_library(path: Path) -> NativeLibrary:
    """One file; a copy of it is a library apart, with an instruction set of its own."""
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return NativeLibrary(None, reason=f"{path} cannot be loaded: {error}")
    if functions.kvant_abi() != ABI_VERSION:
        return NativeLibrary(None, reason=f"{path} is of another version: reinstall kvant")
    for name in ("isa", "run", *FUNCTION_NAMES):
        getattr(functions, f"kvant_{name}").restype = ctypes.c_char_p
    isa = functions.kvant_isa()
    if isa is None:
        wish = os.environ.get("KVANT_ISA")
        return NativeLibrary(None, reason=f"KVANT_ISA={wish} is nothing that this processor has")
    _share_openmp_threads(functions)
    return NativeLibrary(functions, isa.decode())


def count_remaining_bytes(x: Tensor, itemsize: int) -> int:
    """Bytes of memory from the first number of a tensor on, each number of so many bytes."""
    return x.untyped_storage().nbytes() - x.storage_offset() * itemsize  # type: ignore[return-value]


def make_rows_record(x: Tensor) -> tuple[int, ...]:
    """Where dense rows [B, H, T, D] lie, as kvant_rows says it."""
    size, (batch, head, row, _) = x.itemsize, x.stride()
    there = x.nbytes if x.is_contiguous() else count_remaining_bytes(x, size)
    return (x.data_ptr(), there, batch * size, head * size, row * size)


NativeRequest = tuple[
    str, bytes, tuple[object, ...]
]  # a function, a request, and what that points to
RequestListener = Callable[[NativeRequest], None]
_listeners: dict[int, RequestListener] = {}  # by the thread whose calls are heard


def call_native(name: str, request: bytes, *keepalive: object) -> None:
    """Let a function do what a request asks; what it refuses is an error.

    Whoever hears of it keeps what is `held`: memory that lives no longer than the caller likes.
    """
    functions = get_library().functions
    assert functions is not None
    check_refusal(getattr(functions, f"kvant_{name}")(request))
    if _listeners and (hear := _listeners.get(get_ident())) is not None:
        hear((name, request, keepalive))


@contextmanager
def capture_requests(on_request: RequestListener) -> Iterator[None]:
    """Tell of every request that this thread makes within, and nobody else."""
    thread = get_ident()
    before = _listeners.get(thread)
    _listeners[thread] = on_request
    try:
        yield
    finally:
        if before is None:
            del _listeners[thread]
        else:
            _listeners[thread] = before


def check_refusal(refusal: bytes | None) -> None:
    """Nothing where a function did what it was asked for; else what it refused as an error."""
    if refusal is not None:
        raise RuntimeError(f"the native library refuses what it was asked: {refusal.decode()}")


STEP_STRUCT = struct.Struct("@3q")  # kvant_step


def compile_requests(requests: Sequence[NativeRequest]) -> Callable[[], bytes | None]:
    """What does requests one after the other, in one call; it gives what is refused, for `done`."""
    buffers = [ctypes.create_string_buffer(asked, len(asked)) for _, asked, _ in requests]
    steps = b"".join(
        STEP_STRUCT.pack(FUNCTION_NAMES.index(name), ctypes.addressof(buffer), len(asked))
        for (name, asked, _), buffer in zip(requests, buffers, strict=True)
    )
    buffers.append(ctypes.create_string_buffer(steps, len(steps)))
    functions = get_library().functions
    assert functions is not None
    every = STEP_STRUCT.pack(ctypes.addressof(buffers[-1]), len(steps), len(requests))
    run: Any = partial(functions.kvant_run, every)
    run.held = buffers, [held for _, _, held in requests]  # what it points to lives as long
    return cast(Callable[[], "bytes | None"], run)


def use_own_threads() -> None:
    """Run on threads of its own from now on, beside those of torch."""
    if (functions := get_library().functions) is not None:
        functions.kvant_share_team(None)


def _share_openmp_threads(functions: ctypes.CDLL) -> None:
    """Let it run on the threads that torch has anyway: two teams would compete for the cores."""
    try:
        team = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # torch was built with another OpenMP, or none
        return
    functions.kvant_share_team(ctypes.cast(team, ctypes.c_void_p))


ROTATE_STRUCT = struct.Struct("@16q")  # kvant_rotate_request
ROTATABLE_DIMS = range(16, 256 + 1, 16)
SignArray = ctypes.Array[ctypes.c_float]  # one a channel: +-1 over the square root of its block


def can_rotate(x: Tensor) -> bool:
    """Whether `rotated` serves this."""
    return x.is_cpu and is_kernel_readable(x) and get_library().functions is not None


def is_kernel_readable(x: Tensor) -> bool:
    """Rows that lie in memory as a kernel reads them: not only traced, and no gradient wanted."""
    return (
        type(x) is Tensor
        and not is_tracing()
        and x.dtype in DTYPE_CODES
        and x.ndim == 4
        and x.shape[3] in ROTATABLE_DIMS
        and x.stride(3) == 1
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def rotate_rows(x: Tensor, signs: SignArray, *, signs_last: bool) -> Tensor:
    """Rows [B, H, T, D] turned, multiplied by the D signs before that, or last.

    The rotation of codecs/frames/hadamard.py in one call: the same rows, to the bit. A token's rows
    take less time than a few torch operators, so what a call asks is kept cheap.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
    given = ROTATE_STRUCT.pack(
        *make_rows_record(x),
        *(
            DTYPE_CODES[x.dtype],
            *x.shape,
            ctypes.addressof(signs),
            ctypes.sizeof(signs),
            signs_last,
        ),
        *(out.data_ptr(), out.nbytes, torch.get_num_threads()),
    )
    call_native("rotate", given, signs)
    return out


NORM_STRUCT = struct.Struct("@7qd3q")  # kvant_norm_request
NORM_DIMS = range(32, 32768 + 1, 32)


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [..., D] over the root of `eps` plus the mean of their squares, times D weights.

    Computed in single precision, and rounded before the weight and after it. Rows and weights lie
    in memory without gaps, in one dtype.
    """
    out = torch.empty_like(x)
    dim = weight.shape[0]
    given = NORM_STRUCT.pack(
        *(x.data_ptr(), x.nbytes, weight.data_ptr(), weight.nbytes),
        *(DTYPE_CODES[x.dtype], x.numel() // dim, dim, eps, out.data_ptr(), out.nbytes),
        torch.get_num_threads(),
    )
    call_native("norm", given)
    return out


MULTIPLY_STRUCT = struct.Struct("@13q")  # kvant_multiply_request
PACKED_OUT_BLOCK, PACKED_IN_BLOCK = (
    64,
    16,
)  # a packed weight has blocks of outputs, and columns, of so many


def multiply_packed(
    x: Tensor, weight: tuple[int, int], bias: Tensor | None, *, out_features: int, k_block: int
) -> Tensor:
    """Rows [..., width] times a packed weight, of which are given address and bytes, plus a bias.

    The sums of `part` columns are added to those of the parts before. Rows and bias are bfloat16
    and lie in memory without gaps.
    """
    width = x.shape[-1]
    out = x.new_empty((*x.shape[:-1], out_features))
    given = MULTIPLY_STRUCT.pack(
        *(x.data_ptr(), x.nbytes, *weight),
        *((0, 0) if bias is None else (bias.data_ptr(), bias.nbytes)),
        *(x.numel() // width, width, out_features, k_block, out.data_ptr(), out.nbytes),
        torch.get_num_threads(),
    )
    call_native("multiply", given)
    return out


MAP_STRUCT = struct.Struct("@25q")  # kvant_map_request
MAP_OPERATIONS = ("copy", "negate", "add", "multiply", "look_up")
NUM_16_BIT_VALUES = 1 << 16  # numbers of 16 bits


def map_elements(operation: str, out: Tensor, a: Tensor, b: Tensor | None = None) -> None:
    """Write to `out`, of up to four dimensions, what follows from the numbers of `a` and `b`.

    They have its shape and its dtype; to look up, `b` has what follows from each number of 16 bits.
    """
    shape = (1,) * (4 - out.ndim) + tuple(out.shape)
    call_native(
        "map",
        MAP_STRUCT.pack(
            *(MAP_OPERATIONS.index(operation), DTYPE_CODES[out.dtype], *shape),
            *_make_elements_record(a),
            *((0,) * 6 if b is None else _make_elements_record(b)),
            *_make_elements_record(out),
            torch.get_num_threads(),
        ),
        b,
    )


def _make_elements_record(x: Tensor) -> tuple[int, ...]:
    size = x.itemsize
    strides = (0,) * (4 - x.ndim) + tuple(n * size for n in x.stride())
    return (x.data_ptr(), count_remaining_bytes(x, size), *strides)
