"""Tensors that outlive the mode they were made in."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from kvant.errors import CacheError

TRACING_MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def no_inference_mode() -> AbstractContextManager[None]:
    """Make tensors here that are kept: one born in inference mode can never be written outside.

    It turns gradients on, whatever was before: who computes here turns them off behind it.
    """
    return torch.inference_mode(False)


def is_transforming() -> bool:
    """Is a transform of torch.func under way? Its tensors have no memory, and end with it."""
    return peek_interpreter_stack() is not None


def is_dual_level_open() -> bool:
    """May tensors have tangents? They look like others, and are lost by who reads their bytes."""
    return forward_ad._current_level >= 0


def is_tracing() -> bool:
    """Does what is made here belong to a compiler, a transform or a trace, and end with it?

    They see operators: what is computed beside them is lost. Fake tensors have no memory at all.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or is_transforming()
        or is_dual_level_open()
    ):
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in TRACING_MODES)


def refuse_transforms(operation: str) -> None:
    """Refuse what changes in place, or is read by address, inside such a transform."""
    if peek_interpreter_stack() is not None:
        raise CacheError(
            f"{operation} inside a transform of torch.func (vmap, grad, jvp, functionalize): a "
            "cache "
            "that changes in place cannot be transformed; kvant.functional can"
        )
