"""What torch and Triton do at run time: dtypes by name, modes to detect or leave, launches.

Triton is optional: this module imports it only inside functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from kvant.errors import CacheError
from kvant.recipes import DTYPE_NAMES

P = ParamSpec("P")
R = TypeVar("R")

get_transform = peek_interpreter_stack  # the innermost transform of torch.func, or None
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPE_NAMES
}  # of dense rows
TRACING_MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def no_inference_mode() -> AbstractContextManager[None]:
    """Leave inference mode, to create tensors that outlive it: inference tensors are read-only.

    Leaving it enables gradients. Code that computes in this context must also enter no_grad.
    """
    return torch.inference_mode(False)


def is_transforming() -> bool:
    """Tell whether a torch.func transform is active; its tensors have no memory."""
    return get_transform() is not None


def is_dual_level_open() -> bool:
    """Tell whether tensors may have forward-mode tangents, which reading their bytes would lose."""
    return forward_ad._current_level >= 0


def is_tracing() -> bool:
    """Tell whether a compiler, a transform or a trace is active.

    They see operators only, so results computed otherwise are lost. Fake tensors have no memory,
    and tensors created here must not outlive the trace.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or is_transforming()
        or is_dual_level_open()
    ):
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in TRACING_MODES)


def run_uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that no compiler traces it, nor what it calls."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Without dynamo nothing is compiled, and importing it takes a second.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disable: Callable[..., Callable[P, R]] = torch.compiler.disable
        return disable(function)(*args, **kwargs)

    return call


def make_transform_error(operation: str) -> CacheError:
    """Return the error of an in-place operation inside a torch.func transform."""
    return CacheError(
        f"{operation} inside a transform of torch.func (vmap, grad, jvp, functionalize): a "
        "cache that changes in place cannot be transformed; kvant.functional can"
    )


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device current: Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=1)
def is_triton_installed() -> bool:
    return find_spec("triton") is not None


def get_compiled_flags(kernel: object) -> set[bool]:
    """Return whether Triton's own functions, and `kernel`, are compiled or interpreted.

    TRITON_INTERPRET decides when a function is loaded, so the two may differ.
    """
    from triton import language
    from triton.runtime.jit import JITFunction

    return {isinstance(function, JITFunction) for function in (language.cdiv, kernel)}
