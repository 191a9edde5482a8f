"""Test reserved memory: ordinary tensors that are not resident until touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from weakref import ReferenceType, ref

import pytest
import torch

from kvant import Cache
from kvant.pages import storage
from kvant.pages.storage import MIN_MAPPING_BYTES, MMAP_FLAGS, reserve_tensor

CPU = torch.device("cpu")
SCRIPT = """
import torch
from kvant.pages.storage import reserve_tensor
from kvant.bench.harness import read_resident_nbytes

used = torch.empty(1 << 24, dtype=torch.uint8).fill_(1)
del used
before = read_resident_nbytes("VmRSS")
held = [reserve_tensor((1 << 24,), torch.uint8, torch.device("cpu")) for _ in range(8)]
untouched = read_resident_nbytes("VmRSS") - before
held[0].fill_(1)
touched = read_resident_nbytes("VmRSS") - before
held.clear()
print(untouched, touched, read_resident_nbytes("VmRSS") - before)
"""


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "count", [0, 1, MIN_MAPPING_BYTES // 4 - 1, MIN_MAPPING_BYTES // 4, MIN_MAPPING_BYTES]
)
def test_reserved_tensor_behaves_like_any_other(count: int, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        tensor = reserve_tensor((count, 1), dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.is_inference()) == ((count, 1), dtype, False)
    tensor.fill_(3)
    assert tensor.sum(dtype=torch.float64) == 3 * count


@pytest.mark.skipif(
    not (MMAP_FLAGS and Path("/proc/self/status").exists()),
    reason="the system does not report resident memory",
)
def test_untouched_pages_are_not_resident_and_freed_pages_are_returned() -> None:
    run = [sys.executable, "-c", SCRIPT]
    process = subprocess.run(run, capture_output=True, text=True, check=True)
    untouched, touched, freed = map(int, process.stdout.split())
    assert untouched < 1 << 20 < 1 << 24 <= touched < 17 << 20 and freed < 1 << 20


def test_growth_without_room_for_a_reserve_takes_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: an OutOfMemoryError of torch was not caught."""

    grown = list[ReferenceType[torch.Tensor]]()
    num_live = list[int]()  # of these, at each allocation of what is needed

    def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = reserve_tensor(shape, dtype, device)
        if shape[0] == 1:
            num_live.append(sum(other() is not None for other in grown))
        elif shape[0] > 1 and grown:  # there is room for the keys, but not for the values
            raise torch.OutOfMemoryError("no room for the reserve")
        elif shape[0] > 1:
            grown.append(ref(tensor))
        return tensor

    monkeypatch.setattr(storage, "reserve_tensor", reserve)
    cache = Cache(1, "raw")
    cache[0].append(*torch.randn(2, 1, 1, 64, 32))
    assert cache.length == 64
    assert num_live == [0, 0], "the keys of the failed attempt are freed first"
