"""Test the scratch memory of attention: it must not grow with the context."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from kvant.native import get_library
from thin import thin_rows

pytestmark = [
    pytest.mark.skipif(get_library().functions is None, reason="the native library is not here"),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no mark to set back"),
]

HEADS, GROUP, DIM, ROWS = 8, 4, 128, 16384
SCRIPT = f"""
import sys
from pathlib import Path
import torch
from kvant import Cache, attend
from kvant.bench.harness import read_resident_nbytes, reset_resident_peak

text, queries = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
cache = Cache(1, text)
for _ in range({ROWS} // 1024):
    cache[0].append(*torch.randn(2, 1, {HEADS}, 1024, {DIM}).bfloat16(), prefill="stored")
rows = torch.randn(2, 1, {HEADS}, queries, {DIM}).bfloat16()
view = cache[0].append(*rows, prefill="dense")
q = torch.randn(1, {HEADS * GROUP}, queries, {DIM}).bfloat16()
attend(q[:, :, -1:], cache[0].view())  # what the first call takes for good
before = reset_resident_peak()
attend(q, view, backend="native")
print(max(0, read_resident_nbytes("VmHWM") - before))
"""


@pytest.mark.parametrize(
    ("text", "queries"), thin_rows(product(["raw", "fp8", "affine4", "turbo4v2"], [1, 512]))
)
def test_attention_makes_no_second_copy_of_rows(text: str, queries: int) -> None:
    run = [sys.executable, "-c", SCRIPT, text, str(queries)]
    process = subprocess.run(run, capture_output=True, text=True, check=True)
    # Queries and outputs in float32, before and after the frame, and in 16 bits.
    bound = 6 * 2**20 + HEADS * GROUP * queries * DIM * (4 * 4 + 2 * 2)
    assert int(process.stdout) < bound < ROWS * HEADS * DIM * 2 * 2  # the decoded rows in 16 bits
