"""Whether this processor can pack weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import kvant


def find_unpacked_reasons(build: Callable[[], nn.Module]) -> str:
    """List why layers of any of 16 models stay unpacked; "" if none does.

    One model is not enough: with AVX-512 but no BF16, packed weights sometimes give other bits.
    """
    left = set[str]()
    with torch.random.fork_rng():
        for seed in range(16):
            torch.manual_seed(seed)
            left.update(kvant.pack(build()).left.values())
    return ", ".join(sorted(left))
