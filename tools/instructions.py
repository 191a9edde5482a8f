"""What decoding asks of a GPU for each format, told without one: bytes, and instructions.

`python tools/instructions.py`: compiles the attention of one token for an H100-class GPU (sm_90),
and counts what its longest loop executes for a block of 64 rows, 128 wide in bf16, by four warps.
An estimate of limits, not a measurement: `--gib-s`, `--multiprocessors` and `--mhz` tell the GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports triton

import torch
import typer
from rich.console import Console
from rich.table import Table
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kvant import Cache
from kvant.attention.triton import forms, launching
from kvant.attention.triton.kernels import attend, merge
from kvant.contracts import Request
from kvant.layers import record

FORMATS = "raw,affine8,affine8v4,affine4,turbo4v4,turbo3,turbo2"
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
JUMP = re.compile(r"BRA.*?0x([0-9a-f]+)")
DIM, BLOCK, WARPS = 128, launching.BLOCK, 4
SCHEDULERS = 4  # of a multiprocessor: each issues an instruction of a warp in a cycle
ROWS, HEADS = 8 * 32768, 8  # of the estimate: eight sequences


class Target:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """In place of a kernel: a launch compiles it, and keeps what it came to."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.binary = kernel, b""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.binary = self.kernel.warmup(*args, grid=grid, **options).asm["cubin"]

        return launch


def longest_loop(binary: bytes) -> int:
    """Instructions between the furthest jump back and where it leads."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        tool = knobs.nvidia.cuobjdump.path
        told = subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True)
    lines = [(int(place, 16), what) for place, what in LINE.findall(told.stdout)]
    index = {place: number for number, (place, _) in enumerate(lines)}
    jumps = ((number, JUMP.match(what)) for number, (_, what) in enumerate(lines))
    back = [number - index.get(int(to[1], 16), number) + 1 for number, to in jumps if to]
    return max(back)


def counted(text: str, kernel: Compiled) -> tuple[float, int]:
    """Bytes of a row of keys and of values, and instructions of a warp for a block of them."""
    rows = torch.randn(2, 1, HEADS, 10 * BLOCK, DIM).bfloat16()
    state: Any = Cache(1, f"{text},tail=0,prefill=stored")[0]
    view = state.append(*rows)
    q = torch.randn(1, 4 * HEADS, 1, DIM).bfloat16()
    asked = view.keys.codec.frame.queries(q)
    launching.launch(Request(asked, 0.1, view.mask, dtype=torch.bfloat16), view)
    fields = [*view.keys.sealed.values(), *view.values.sealed.values()]
    stored = sum(field[0, 0].nbytes for field in fields) / view.page if fields else 4.0 * DIM
    return stored, longest_loop(kernel.binary)


def main(
    formats: Annotated[str, typer.Option(help="of the spec language")] = FORMATS,
    gib_s: Annotated[float, typer.Option(help="memory: of an H200")] = 4470,
    multiprocessors: Annotated[int, typer.Option()] = 132,
    mhz: Annotated[float, typer.Option()] = 1755,
) -> None:
    driver.set_active(Target())
    record.arrangement = lambda device: None  # type: ignore[assignment]
    as_on_a_gpu = forms.dot_type
    forms.dot_type = lambda dtype, _: as_on_a_gpu(dtype, False)  # bfloat16 is one there
    kernel, merging = Compiled(attend.attend), Compiled(merge.merge)
    attend.attend, merge.merge = kernel, merging  # type: ignore[assignment]
    table = Table("format", "bytes a row", "instructions a block", "memory, us", "issue, us")
    for text in formats.split(","):
        stored, count = counted(text, kernel)
        memory = ROWS * HEADS * stored / (gib_s * 2**30) * 1e6
        blocks = ROWS * HEADS / BLOCK / multiprocessors
        issue = blocks * count * WARPS / SCHEDULERS / mhz
        table.add_row(text, f"{stored:.0f}", str(count), f"{memory:.0f}", f"{issue:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
