"""What launching kernels in Triton's language asks, whatever they compute.

Triton is optional, and nothing of it is imported before somebody asks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launch where the tensors are: Triton does it on the current device, whatever it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=1)
def is_triton_installed() -> bool:
    return find_spec("triton") is not None


def get_compiled_flags(kernel: object) -> set[bool]:
    """Are functions of Triton's, and ours, compiled? That was settled when they were loaded."""
    from triton import language
    from triton.runtime.jit import JITFunction

    return {isinstance(function, JITFunction) for function in (language.cdiv, kernel)}
