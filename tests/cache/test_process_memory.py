"""Test the reported bytes of a cache against the memory of the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no mark to set back"
)

SCRIPT = """
import ctypes, json, sys
import torch
from kvant import Cache, attend
from kvant.bench.harness import read_resident_nbytes, reset_resident_peak

text, LAYERS, ROWS, CHUNK = sys.argv[1], 4, 30720, 128
torch.set_num_threads(1)
rows = torch.randn(2, 1, 8, CHUNK, 128).bfloat16()
q = torch.randn(1, 8, 1, 128).bfloat16()

def fill(cache, count):
    for _ in range(count // CHUNK):
        for state in cache:
            state.append(*rows)
    for _ in range(2):
        for state in cache:
            attend(q, state.append(*rows[:, :, :, :1]))

fill(Cache(2, text), 2 * CHUNK)  # what first calls take for good
cache = Cache(LAYERS, text)
before = reset_resident_peak()
fill(cache, ROWS)
peak = read_resident_nbytes("VmHWM") - before
ctypes.CDLL(None).malloc_trim(0)  # what the allocator kept of temporary tensors
rest = read_resident_nbytes("VmRSS") - before
print(json.dumps({
    "allocated": cache.nbytes, "used": cache.nbytes_used, "rest": rest, "peak": peak,
    "scratch": max(state.nbytes for state in cache),
}))
"""


@pytest.mark.parametrize(
    "text",
    [
        "raw",
        pytest.param("raw,capacity=40960", marks=pytest.mark.laws),
        "affine4",
        pytest.param("turbo4v2", marks=pytest.mark.laws),
    ],
)
def test_nbytes_equals_the_growth_of_the_process(text: str) -> None:
    run = [sys.executable, "-c", SCRIPT, text]
    process = subprocess.run(run, capture_output=True, text=True, check=True)
    report = json.loads(process.stdout)
    claimed = report[
        "used" if "capacity" in text else "allocated"
    ]  # reserved memory is not resident
    assert abs(report["rest"] - claimed) <= 0.05 * claimed, report
    # One layer at a time is copied to larger memory.
    assert report["peak"] <= 1.05 * (claimed + report["scratch"]), report
