"""Devices and dtypes by the names that people type, which there are, and which are slow there."""

from __future__ import annotations

import re
from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import nn

from kvant.recipes import DTYPES
from kvant.sizes import format_size

KNOWN = "cpu, cuda, cuda:N, mps"
AUTO = "auto"  # the dtype that a checkpoint says
# The operators of torch, by dtype, that say whether oneDNN multiplies it on this processor.
SUPPORT = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
_warned: WeakSet[nn.Module] = WeakSet()


def named_device(name: str | None = None) -> torch.device:
    """The device of that name, if it is there; unnamed, a GPU of CUDA where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch("cpu|cuda|cuda:[0-9]{1,4}|mps", name):
        raise ValueError(f"--device {name}: known are {KNOWN}; here there is {', '.join(_there())}")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: torch {torch.__version__} finds no GPU here; there is "
            f"{', '.join(_there())}: install a torch built for it, or leave --device out"
        )
    if name not in (*_there(), "cuda"):
        raise ValueError(f"--device {name}: here there is {', '.join(_there())}")
    return device


def named_dtype(name: str = AUTO) -> torch.dtype | str:
    """The dtype of that name, as loading a checkpoint takes it."""
    if name not in (AUTO, *DTYPES):
        raise ValueError(f"--dtype {name}: known are {', '.join((AUTO, *DTYPES))}")
    return DTYPES.get(name, AUTO)


def is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of many rows take longer in this dtype than in float32.

    They do on a CPU where oneDNN has no kernel for the dtype: bfloat16 without AVX-512 (or
    AVX-NE-CONVERT), float16 without AVX-512 FP16. Where torch cannot tell, the answer is False.
    """
    operator = SUPPORT.get(dtype)
    if device.type != "cpu" or operator is None:
        return False
    supported = getattr(torch.ops.mkldnn, operator, None)
    return supported is not None and not supported()


def list_slow_dtypes() -> list[str]:
    """List the dtypes that are slow on this processor, by name."""
    return [name for name, dtype in DTYPES.items() if is_slow(dtype, torch.device("cpu"))]


def describe_slow_weights(model: nn.Module) -> str | None:
    """Describe what the dtype of a model's weights costs here, in a line; None if nothing."""
    weights = list(model.parameters())
    slow = [weight for weight in weights if is_slow(weight.dtype, weight.device)]
    if not slow:
        return None
    now = sum(weight.numel() * weight.itemsize for weight in weights)
    wide = now + sum(weight.numel() * (4 - weight.itemsize) for weight in slow)
    return (
        f"this processor multiplies {str(slow[0].dtype).removeprefix('torch.')} slowly, so prompts "
        "take longer than in float32: write --dtype float32, or dtype=torch.float32 where Python "
        f"loads the model; weights then take {format_size(wide)} in place of {format_size(now)} "
        "(kvant bench prefill --dtype float32 measures what that gives)"
    )


def warn_of_slow_weights(model: nn.Module, warn: Callable[[str], None]) -> None:
    """Pass the line of `describe_slow_weights` to `warn`, once a model."""
    if model not in _warned and (line := describe_slow_weights(model)) is not None:
        _warned.add(model)
        warn(line)


def _there() -> list[str]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apple = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{index}" for index in range(gpus)), *apple]
