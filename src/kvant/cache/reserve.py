"""Memory that is reserved: what is never touched costs nothing, what is freed is given back.

An allocator of the process may do neither. It hands out room that earlier work has touched, and
keeps what lies between pieces that are still in use: a cache of hundreds of MiB was seen to take
half as much again. So large tensors on a CPU are mappings of their own.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kvant.lasting import lasting

OWN = 1 << 17  # bytes from which on a tensor is a mapping, which is a whole number of pages
FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)  # 0: not on this system


def reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose values are to be written yet."""
    with lasting():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        large = FLAGS and device.type == "cpu" and nbytes >= OWN
        if large and type(torch.empty(0, device=device)) is Tensor:  # not in a mode of fake ones
            return torch.frombuffer(_mapping(nbytes), dtype=dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def _mapping(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=FLAGS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{nbytes} bytes for a cache are not to be had: a smaller format, "
            "a window or a shorter context takes less (kvant.plan)"
        ) from error
