"""Parse names of devices and dtypes, check that they are available, and warn of slow ones."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvant.platform.sizes import format_size
from kvant.recipes import DTYPE_NAMES

if TYPE_CHECKING:  # a name is checked without torch
    import torch
    from torch import nn

KNOWN_DEVICES = "cpu, cuda, cuda:N, mps"
AUTO_DTYPE = "auto"  # the dtype of the checkpoint
# By dtype: the torch operator that tells whether oneDNN has kernels for it on this processor.
SUPPORT_OPERATORS = {
    "bfloat16": "_is_mkldnn_bf16_supported",
    "float16": "_is_mkldnn_fp16_supported",
}
_warned_models: WeakSet[nn.Module] = WeakSet()


def check_device(name: str | None) -> None:
    """Raise ValueError for an unknown or missing device; imports torch unless it is the CPU."""
    if name is not None:
        _check_name(name)
    if name not in (None, "cpu"):
        parse_device(name)


def parse_device(name: str | None = None) -> torch.device:
    """Return the device of a name if it exists; by default a CUDA GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _check_name(name)
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: torch {torch.__version__} finds no GPU here; there is "
            f"{', '.join(_list_devices())}: install a torch built for it, or leave --device out"
        )
    if name not in (*_list_devices(), "cuda"):
        raise ValueError(f"--device {name}: here there is {', '.join(_list_devices())}")
    return device


def _check_name(name: str) -> None:
    if not re.fullmatch("cpu|cuda|cuda:[0-9]{1,4}|mps", name):
        raise ValueError(f"--device {name}: known are {KNOWN_DEVICES}")


def check_dtype(name: str) -> None:
    """Raise ValueError unless models can be loaded in this dtype."""
    if name not in (AUTO_DTYPE, *DTYPE_NAMES):
        raise ValueError(f"--dtype {name}: known are {', '.join((AUTO_DTYPE, *DTYPE_NAMES))}")


def parse_dtype(name: str = AUTO_DTYPE) -> torch.dtype | str:
    """Return the dtype of a name, or "auto", as model loaders accept it."""
    from kvant.platform.torch_runtime import DTYPES

    check_dtype(name)
    return DTYPES.get(name, AUTO_DTYPE)


def describe_processor() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether products of many rows take longer in this dtype than in float32.

    They do on a CPU if oneDNN has no kernel for the dtype: bfloat16 without AVX-512 (or
    AVX-NE-CONVERT), float16 without AVX-512 FP16. Unknown counts as False.
    """
    import torch

    operator = SUPPORT_OPERATORS.get(str(dtype).removeprefix("torch."))
    if device.type != "cpu" or operator is None:
        return False
    supported = getattr(torch.ops.mkldnn, operator, None)
    return supported is not None and not supported()


def list_slow_dtypes() -> list[str]:
    """List the dtypes that are slow on this processor, by name."""
    import torch

    from kvant.platform.torch_runtime import DTYPES

    return [name for name, dtype in DTYPES.items() if is_slow(dtype, torch.device("cpu"))]


@singledispatch
def count_stored_nbytes(weight: torch.Tensor) -> int:
    """Return the bytes that the values of a weight take; classes of codes register their count."""
    return weight.numel() * weight.itemsize


def describe_slow_weights(model: nn.Module) -> str | None:
    """Describe the slow dtype of a model's weights in one line; None if no dtype is slow.

    Packed weights, which are of another class, are not multiplied by torch.
    """
    import torch

    weights = list(model.parameters())
    plain = [weight for weight in weights if type(weight) is torch.nn.Parameter and weight.ndim > 1]
    slow = [weight for weight in plain if is_slow(weight.dtype, weight.device)]
    if not slow:
        return None
    now = sum(map(count_stored_nbytes, weights))
    wide = now + sum(weight.numel() * (4 - weight.itemsize) for weight in slow)
    return (
        f"torch multiplies {str(slow[0].dtype).removeprefix('torch.')} slowly on this processor: "
        "pack the model (kvant.pack(model); commands and engines do), or use --dtype float32 "
        f"(dtype=torch.float32 in Python), with which weights take {format_size(wide)} instead of "
        f"{format_size(now)} (kvant bench weights measures the speed)"
    )


def warn_of_slow_weights(model: nn.Module, warn: Callable[[str], None]) -> None:
    """Pass the line of `describe_slow_weights` to `warn`, once per model."""
    if model not in _warned_models and (line := describe_slow_weights(model)) is not None:
        _warned_models.add(model)
        warn(line)


def _list_devices() -> list[str]:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apple = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{index}" for index in range(gpus)), *apple]
