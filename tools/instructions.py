"""What decoding asks of a GPU for each format, told without one: bytes, and instructions.

`python tools/instructions.py`: compiles the attention of one token for an H100-class GPU (sm_90),
and counts what its longest loop executes for a block of 64 rows, 128 wide in bf16, by four warps.
An estimate of limits, not a measurement: `--gib-s`, `--multiprocessors` and `--mhz` tell the GPU.
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
from rich.console import Console
from rich.table import Table
from triton import knobs

# What compiles kernels for the tests does it here. Tests are no package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from attention.offline import Compiled, Driver, pretend
from kvant import Cache
from kvant.attention.triton import kernel_launch
from kvant.attention.triton.kernel_launch import KernelView
from kvant.attention.triton.kernels import attend
from kvant.contracts import AttentionRequest

FORMATS = "raw,affine8,affine8v4,affine4,turbo4v4,turbo3,turbo2"
INSTRUCTION_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
BRANCH_TARGET = re.compile(r"BRA.*?0x([0-9a-f]+)")
DIM, BLOCK, WARPS = 128, kernel_launch.BLOCK_ROWS, 4
SCHEDULERS = 4  # of a multiprocessor: each issues an instruction of a warp in a cycle
ROWS, HEADS = 8 * 32768, 8  # of the estimate: eight sequences


def count_longest_loop(binary: bytes) -> int:
    """Instructions between the furthest jump back and where it leads."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        tool = knobs.nvidia.cuobjdump.path
        told = subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True)
    lines = [(int(place, 16), what) for place, what in INSTRUCTION_LINE.findall(told.stdout)]
    index = {place: number for number, (place, _) in enumerate(lines)}
    jumps = ((number, BRANCH_TARGET.match(what)) for number, (_, what) in enumerate(lines))
    back = [number - index.get(int(to[1], 16), number) + 1 for number, to in jumps if to]
    return max(back)


def launch_attention(text: str) -> float:
    """Bytes of a row of keys and of values, of which a token was attended over."""
    rows = torch.randn(2, 1, HEADS, 10 * BLOCK, DIM).bfloat16()
    state: Any = Cache(1, f"{text},tail=0,prefill=stored")[0]
    view = state.append(*rows)
    q = torch.randn(1, 4 * HEADS, 1, DIM).bfloat16()
    asked = view.keys.codec.frame.queries(q)
    kernel_launch.launch_attention(
        AttentionRequest(asked, 0.1, view.mask, output_dtype=torch.bfloat16),
        KernelView.from_view(view),
    )
    fields = [*view.keys.sealed.values(), *view.values.sealed.values()]
    page = view.page_table.layer_group.page
    return sum(field[0, 0].nbytes for field in fields) / page if fields else 4.0 * DIM


def main(
    formats: Annotated[str, typer.Option(help="of the spec language")] = FORMATS,
    gib_s: Annotated[float, typer.Option(help="memory: of an H200")] = 4470,
    multiprocessors: Annotated[int, typer.Option()] = 132,
    mhz: Annotated[float, typer.Option()] = 1755,
) -> None:
    pretend(Driver(90))
    binaries: dict[str, bytes] = {}

    def keep(name: str, made: Any) -> None:
        binaries[name] = made.asm["cubin"]

    attend.attend = Compiled(attend.attend, keep)  # type: ignore[assignment]
    attend.merge = Compiled(attend.merge, keep)  # type: ignore[assignment]
    table = Table("format", "bytes a row", "instructions a block", "memory, us", "issue, us")
    for text in formats.split(","):
        stored = launch_attention(text)
        count = count_longest_loop(binaries["attend"])
        memory = ROWS * HEADS * stored / (gib_s * 2**30) * 1e6
        blocks = ROWS * HEADS / BLOCK / multiprocessors
        issue = blocks * count * WARPS / SCHEDULERS / mhz
        table.add_row(text, f"{stored:.0f}", str(count), f"{memory:.0f}", f"{issue:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
