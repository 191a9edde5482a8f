"""Tensors that outlive the mode they were made in."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def lasting() -> AbstractContextManager[None]:
    """Make tensors here that are kept: one born in inference mode can never be written outside."""
    return torch.inference_mode(False)
