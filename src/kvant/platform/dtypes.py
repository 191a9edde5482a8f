"""Dtypes of dense rows, by name."""

from __future__ import annotations

import torch

from kvant.recipes import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
