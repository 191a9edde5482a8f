"""Find, load and check the compiled C++ library, and call its functions.

The package build compiles it if there is a C++ compiler, and installs it on this package's path
(for an editable install, in the build folder). Loading it selects an instruction set of the
processor; KVANT_ISA forces one (amx, avx512, avxvnni, avx2, neon+dotprod+i8mm, neon+dotprod, neon,
plain).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor

from kvant.native.header import (
    ELEMENTS_STRUCT,
    MAP_STRUCT,
    MULTIPLY_STRUCT,
    NORM_STRUCT,
    ROTATE_STRUCT,
    RUN_STRUCT,
    STEP_STRUCT,
)
from kvant.platform.torch_runtime import is_tracing

ABI_VERSION = 18
LIBRARY_NAME = "libkvant.so" if os.name == "posix" else "kvant.dll"
# Functions that take a request, in the order of kvant_function.
FUNCTION_NAMES = ("attend", "store", "rotate", "norm", "choose", "multiply", "map")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kvant_dtype
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded functions, or the reason why loading failed."""

    functions: ctypes.CDLL | None
    isa: str = ""
    reason: str = ""


@lru_cache(maxsize=1)
def get_library() -> NativeLibrary:
    """Return the library of this process, loaded once; log a warning if there is none."""
    library = _find_library()
    if library.functions is None:
        logger.warning("kvant runs its reference backend: %s", library.reason)
    return library


def _find_library() -> NativeLibrary:
    path = next((path for place in __path__ if (path := Path(place, LIBRARY_NAME)).exists()), None)
    if path is None:
        return NativeLibrary(
            None, reason="the native library was not built (is there a C++ compiler?)"
        )
    return load_library(path)


def load_library(path: Path) -> NativeLibrary:
    """Load one file; a copy of the file is a separate library with its own instruction set."""
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return NativeLibrary(None, reason=f"{path} cannot be loaded: {error}")
    if functions.kvant_abi() != ABI_VERSION:
        return NativeLibrary(
            None, reason=f"{path} is from another version of kvant: reinstall kvant"
        )
    for name in ("isa", "run", *FUNCTION_NAMES):
        getattr(functions, f"kvant_{name}").restype = ctypes.c_char_p
    isa = functions.kvant_isa()
    if isa is None:
        forced = os.environ.get("KVANT_ISA")
        reason = f"this processor does not support KVANT_ISA={forced}: unset it, or force another"
        return NativeLibrary(None, reason=reason)
    _share_openmp_threads(functions)
    return NativeLibrary(functions, isa.decode())


def count_remaining_bytes(x: Tensor, itemsize: int) -> int:
    """Return the bytes of a tensor's storage from its first value on."""
    return x.untyped_storage().nbytes() - x.storage_offset() * itemsize  # type: ignore[return-value]


def make_rows_record(x: Tensor) -> tuple[int, ...]:
    """Return the kvant_rows of dense rows [B, H, T, D]: address, bytes, three strides in bytes."""
    size, (batch, head, row, _) = x.itemsize, x.stride()
    nbytes = x.nbytes if x.is_contiguous() else count_remaining_bytes(x, size)
    return (x.data_ptr(), nbytes, batch * size, head * size, row * size)


# The name of a function, a packed request, and the owners of memory that it points to.
NativeRequest = tuple[str, bytes, tuple[object, ...]]
RequestListener = Callable[[NativeRequest], None]
_listeners: dict[int, RequestListener] = {}  # by thread


def call_native(name: str, request: bytes, *keepalive: object) -> None:
    """Call a function with a packed request; raise RuntimeError if it refuses.

    A listener of this thread also receives `keepalive`: memory of the request that must outlive
    the call for a replay.
    """
    functions = get_library().functions
    assert functions is not None
    if (refusal := getattr(functions, f"kvant_{name}")(request)) is not None:
        check_refusal(refusal)
    if _listeners and (listener := _listeners.get(get_ident())) is not None:
        listener((name, request, keepalive))


@contextmanager
def capture_requests(on_request: RequestListener) -> Iterator[None]:
    """Call `on_request` for every request of this thread inside the context."""
    thread = get_ident()
    previous = _listeners.get(thread)
    _listeners[thread] = on_request
    try:
        yield
    finally:
        if previous is None:
            del _listeners[thread]
        else:
            _listeners[thread] = previous


def check_refusal(refusal: bytes | None) -> None:
    """Raise RuntimeError if a function returned the reason of a refusal."""
    if refusal is not None:
        raise RuntimeError(f"the native library refuses a request: {refusal.decode()}")


def compile_requests(requests: Sequence[NativeRequest]) -> Callable[[], bytes | None]:
    """Return a call that runs requests in order; it returns a refusal for `check_refusal`."""
    buffers = [ctypes.create_string_buffer(packed, len(packed)) for _, packed, _ in requests]
    steps = b"".join(
        STEP_STRUCT.pack(FUNCTION_NAMES.index(name), ctypes.addressof(buffer), len(packed))
        for (name, packed, _), buffer in zip(requests, buffers, strict=True)
    )
    buffers.append(ctypes.create_string_buffer(steps, len(steps)))
    functions = get_library().functions
    assert functions is not None
    run_request = RUN_STRUCT.pack(ctypes.addressof(buffers[-1]), len(steps), len(requests))
    run: Any = partial(functions.kvant_run, run_request)
    run.keepalive = buffers, [keepalive for _, _, keepalive in requests]  # memory it points to
    return cast(Callable[[], "bytes | None"], run)


def use_own_threads() -> None:
    """Make the library run on its own threads, separate from torch's."""
    if (functions := get_library().functions) is not None:
        functions.kvant_share_team(None)


def _share_openmp_threads(functions: ctypes.CDLL) -> None:
    """Make the library run on torch's OpenMP threads: two teams would compete for the cores."""
    try:
        team = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # torch uses another OpenMP runtime, or none
        return
    functions.kvant_share_team(ctypes.cast(team, ctypes.c_void_p))


ROTATABLE_DIMS = range(16, 256 + 1, 16)
SignArray = ctypes.Array[ctypes.c_float]  # by channel: +-1 / sqrt(channels of its block)


def can_rotate(x: Tensor) -> bool:
    """Tell whether `rotate_rows` supports x."""
    return x.is_cpu and is_kernel_readable(x) and get_library().functions is not None


def is_kernel_readable(x: Tensor) -> bool:
    """Tell whether kernels can read x: real rows of a supported layout that need no gradient."""
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
    """Rotate rows [B, H, T, D], multiplying by the D signs before the transform or after it.

    The result equals that of codecs/frames/hadamard.py to the bit. A token's rows take less time
    than a few torch operators, so the call must have little overhead.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "the mode makes outputs without storage"
    request = ROTATE_STRUCT.pack(
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
    call_native("rotate", request, signs)
    return out


NORM_DIMS = range(32, 32768 + 1, 32)


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm of rows [..., D]: x / sqrt(mean(x^2) + eps) * weight.

    Computed in float32, rounded before the product with the weight and after it. Rows and weight
    are contiguous and have the same dtype.
    """
    out = torch.empty_like(x)
    dim = weight.shape[0]
    request = NORM_STRUCT.pack(
        *(x.data_ptr(), x.nbytes, weight.data_ptr(), weight.nbytes),
        *(DTYPE_CODES[x.dtype], x.numel() // dim, dim, eps, out.data_ptr(), out.nbytes),
        torch.get_num_threads(),
    )
    call_native("norm", request)
    return out


WEIGHT_COLUMNS = 32  # a weight's columns are a multiple of this


def multiply_rows(
    x: Tensor, weight: ctypes.Array[ctypes.c_char], bias: Tensor | None, num_outputs: int
) -> Tensor:
    """Multiply contiguous rows [..., width] by the weight of a kvant_weight, and add the bias.

    Sums are in float32; outputs are rounded once, to the dtype of the rows.
    """
    out = x.new_empty((*x.shape[:-1], num_outputs))
    request = MULTIPLY_STRUCT.pack(
        *(x.data_ptr(), x.nbytes, x.shape[:-1].numel(), DTYPE_CODES[x.dtype]),
        *(ctypes.addressof(weight), ctypes.sizeof(weight)),
        *((0, 0, 0) if bias is None else (bias.data_ptr(), bias.nbytes, DTYPE_CODES[bias.dtype])),
        *(out.data_ptr(), out.nbytes, torch.get_num_threads()),
    )
    call_native("multiply", request, weight)
    return out


MAP_OPERATIONS = ("copy", "negate", "add", "multiply", "look_up")
NUM_16_BIT_VALUES = 1 << 16


def map_elements(operation: str, out: Tensor, a: Tensor, b: Tensor | None = None) -> None:
    """Apply an elementwise operation to `a` and `b`, and write the result to `out`.

    All have the same dtype and shape, of up to four dimensions. For "look_up", `b` is a table with
    the result for each 16-bit value.
    """
    shape = (1,) * (4 - out.ndim) + tuple(out.shape)
    call_native(
        "map",
        MAP_STRUCT.pack(
            *(MAP_OPERATIONS.index(operation), DTYPE_CODES[out.dtype], *shape),
            *_make_elements_record(a),
            *(ELEMENTS_STRUCT.null if b is None else _make_elements_record(b)),
            *_make_elements_record(out),
            torch.get_num_threads(),
        ),
        b,
    )


def _make_elements_record(x: Tensor) -> tuple[int, ...]:
    """Return address, bytes and four strides in bytes."""
    size = x.itemsize
    strides = (0,) * (4 - x.ndim) + tuple(n * size for n in x.stride())
    return (x.data_ptr(), count_remaining_bytes(x, size), *strides)
