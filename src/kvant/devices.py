"""Devices and dtypes by the names that people type, and which of them there are."""

from __future__ import annotations

import re

import torch

from kvant.recipes import DTYPES

KNOWN = "cpu, cuda, cuda:N, mps"
AUTO = "auto"  # the dtype that a checkpoint says


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


def _there() -> list[str]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apple = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{index}" for index in range(gpus)), *apple]
