"""Estimate the cost of decode attention on a GPU for each format, without a GPU.

`python tools/instructions.py` compiles the attention of one token for an H100-class GPU (sm_90). It
counts the instructions of the longest loop, for a block of rows 128 wide in bf16, by each warp.
The result is an estimate of limits, not a measurement; `--gib-s`, `--multiprocessors` and `--mhz`
describe the GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports triton

import torch
import typer
from triton import knobs

# The tests' offline compiler is used here. Tests are not a package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from attention.offline import Compiled, Driver, use_gpu_page_layout
from kvant import Cache
from kvant.attention.triton import kernel_launch
from kvant.attention.triton.kernel_launch import KernelView, Tuning
from kvant.attention.triton.kernels import attend
from kvant.bench.harness import print_table
from kvant.contracts import AttentionRequest

FORMATS = "raw,affine8,affine8v4,affine4,turbo4v4,turbo3,turbo2"
INSTRUCTION_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
BRANCH_TARGET = re.compile(r"BRA.*?0x([0-9a-f]+)")
DIM = 128
SCHEDULERS = 4  # per multiprocessor; each issues one warp instruction per cycle
ROWS, HEADS = 8 * 32768, 8  # of the estimate: eight sequences


def count_longest_loop(binary: bytes) -> int:
    """Return the number of instructions between the furthest backward jump and its target."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        tool = knobs.nvidia.cuobjdump.path
        output = subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True)
    numbers: dict[int, int] = {}  # line numbers by address
    longest = 0
    for address, text in INSTRUCTION_LINE.findall(output.stdout):
        number = numbers[int(address, 16)] = len(numbers)
        if jump := BRANCH_TARGET.match(text):
            longest = max(longest, number - numbers.get(int(jump[1], 16), number) + 1)
    return longest


def launch_attention(text: str) -> tuple[float, Tuning]:
    """Attend with one token; return the bytes of a row of keys and values, and the tuning."""
    rows = torch.randn(2, 1, HEADS, 640, DIM).bfloat16()
    state: Any = Cache(1, f"{text},tail=0,prefill=stored")[0]
    view = state.append(*rows)
    q = torch.randn(1, 4 * HEADS, 1, DIM).bfloat16()
    queries = view.keys.codec.frame.transform_queries(q)
    kernel_view = KernelView.from_view(view)
    kernel_launch.launch_attention(
        AttentionRequest(queries, 0.1, view.mask, output_dtype=torch.bfloat16), kernel_view
    )
    tuning = Tuning.choose(kernel_view, kernel_launch.MIN_TILE_QUERIES)
    fields = [*view.keys.sealed.values(), *view.values.sealed.values()]
    page = view.page_table.layer_group.page
    row_nbytes = sum(field[0, 0].nbytes for field in fields) / page if fields else 4.0 * DIM
    return row_nbytes, tuning


def main(
    formats: Annotated[str, typer.Option(help="Specs to estimate")] = FORMATS,
    gib_s: Annotated[float, typer.Option(help="Memory bandwidth; default: an H200's")] = 4470,
    multiprocessors: Annotated[int, typer.Option()] = 132,
    mhz: Annotated[float, typer.Option()] = 1755,
) -> None:
    """Estimate memory and instruction times of decode attention."""
    use_gpu_page_layout(Driver(90))
    binaries: dict[str, bytes] = {}

    def record(name: str, kernel: Any) -> None:
        binaries[name] = kernel.asm["cubin"]

    attend.attend = Compiled(attend.attend, record)  # type: ignore[assignment]
    attend.merge = Compiled(attend.merge, record)  # type: ignore[assignment]
    rows = []
    for text in formats.split(","):
        row_nbytes, tuning = launch_attention(text)
        count = count_longest_loop(binaries["attend"])
        blocks = ROWS * HEADS / tuning.block_rows / multiprocessors
        rows.append(
            {
                "format": text,
                "bytes a row": round(row_nbytes),
                "rows a block": tuning.block_rows,
                "warps": tuning.num_warps,
                "instructions a block": count,
                "memory, us": round(ROWS * HEADS * row_nbytes / (gib_s * 2**30) * 1e6),
                "issue, us": round(blocks * count * tuning.num_warps / SCHEDULERS / mhz),
            }
        )
    print_table("Attention of one token", rows)


if __name__ == "__main__":
    typer.run(main)
