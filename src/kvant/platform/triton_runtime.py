"""Helpers for launching Triton kernels.

Triton is optional: this module imports it only inside functions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch


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
