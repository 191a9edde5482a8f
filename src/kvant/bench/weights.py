"""Time the product of rows with a linear layer's weight on a CPU, in 16, 8 and 4 bits.

`torch` and `torch float32` multiply with the dense weight; `16 bits`, `affine8` and `affine4` are
kvant's kernels. `of_read` is the share of the speed of a plain read (`torch.sum`) of as many bytes:
the limit of few rows. `of_fma` is the share of the processor's float32 multiply-adds, which limit
many rows on AVX2. Each shape has more weights than the CPU's caches hold, used in turn as a model's
layers are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ctypes import c_int64
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import linear

from kvant.bench import harness
from kvant.bench.harness import TimedCall, time_in_turn
from kvant.native import WEIGHT_COLUMNS, get_library
from kvant.platform.torch_runtime import DTYPES
from kvant.weights.packed_matrix import CodedMatrix, DenseMatrix, WeightMatrix, multiply
from kvant.weights.packing import WEIGHT_CODECS

# Of Qwen3-0.6B: two of its layers, and the head.
QWEN3_SHAPES = "3072x1024,1024x3072,151936x1024"
FORMATS = ("affine8", "affine4")
MIN_WEIGHT_BYTES = 300_000_000  # of all weights of a shape in 16 bits: more than caches hold
CLOCK_CYCLES = 1_000_000
FMA_PER_CYCLE = {"avx2": 16, "avxvnni": 16}  # by instruction set: two instructions of 8 lanes


def parse_shapes(text: str) -> list[tuple[int, int]]:
    words = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", word) for word in words):
        raise ValueError(f"--shapes {text}: outputs x inputs are needed, such as {QWEN3_SHAPES}")
    shapes = [(int(outs), int(width)) for outs, width in (word.split("x") for word in words)]
    if any(width % WEIGHT_COLUMNS for _, width in shapes):
        raise ValueError(f"--shapes {text}: inputs are a multiple of {WEIGHT_COLUMNS}")
    return shapes


def multiply_each(
    product: Callable[[Any, Tensor], Tensor], weights: Sequence[Any], x: Tensor
) -> None:
    for weight in weights:
        product(weight, x)


def read_each(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        weight.sum()


def copy_matrix(matrix: CodedMatrix) -> CodedMatrix:
    return replace(matrix, fields={name: x.clone() for name, x in matrix.fields.items()})


class Ways:
    """The weights of one shape in each format, and plain memory of as many bytes."""

    def __init__(self, num_outputs: int, width: int) -> None:
        count = max(1, MIN_WEIGHT_BYTES // (num_outputs * width * 2))
        weight = torch.randn(num_outputs, width).bfloat16()
        self.torch = [weight.clone() for _ in range(count)]
        self.float32 = [weight.float() for _ in range(max(1, count // 2))]
        self.kvant: dict[str, list[WeightMatrix]] = {
            "16 bits": [DenseMatrix(dense) for dense in self.torch]
        }
        for name in FORMATS:
            first = CodedMatrix.encode(weight, WEIGHT_CODECS[name])
            copies = count * weight.nbytes // first.nbytes
            self.kvant[name] = [first, *(copy_matrix(first) for _ in range(copies))]
        self.plain = {
            name: [torch.ones(len(m) and m[0].nbytes // 8, dtype=torch.int64) for _ in m]
            for name, m in self.kvant.items()
        }

    def list_calls(self, x: Tensor) -> dict[str, tuple[int, TimedCall]]:
        """Return the number of products of each call, and the call."""
        calls: dict[str, tuple[int, TimedCall]] = {}
        if x.dtype == torch.bfloat16:
            product = partial(multiply_each, lambda w, x: linear(x, w), self.torch, x)
            calls["torch"] = len(self.torch), product
        product = partial(multiply_each, lambda w, x: linear(x, w), self.float32, x.float())
        calls["torch float32"] = len(self.float32), product
        for name, matrices in self.kvant.items():
            product = partial(multiply_each, lambda m, x: multiply(x, m, None), matrices, x)
            calls[name] = len(matrices), product
            calls[f"read {name}"] = len(matrices), partial(read_each, self.plain[name])
        return calls


def measure_shape(
    num_outputs: int, width: int, counts: Sequence[int], dtype: torch.dtype, repeats: int
) -> list[dict[str, Any]]:
    ways = Ways(num_outputs, width)
    library = get_library()
    assert library.functions is not None
    clock = partial(library.functions.kvant_spin, c_int64(CLOCK_CYCLES))
    peak = FMA_PER_CYCLE.get(library.isa)
    rows = []
    for count in counts:
        x = torch.randn(count, width).to(dtype)
        calls = ways.list_calls(x)
        timed: dict[str, TimedCall] = {name: call for name, (_, call) in calls.items()}
        laps = time_in_turn(
            timed | {"clock": clock}, repeats, f"{num_outputs}x{width}, {count} rows"
        )
        medians = {name: laps[name].median / number for name, (number, _) in calls.items()}
        cycle = laps["clock"].median / CLOCK_CYCLES
        for name, median in medians.items():
            if name.startswith("read "):
                continue
            read = medians.get(f"read {name}")
            products = count * num_outputs * width
            fma = None if peak is None else peak * torch.get_num_threads() / cycle
            rows.append(
                {
                    "shape": f"{num_outputs}x{width}",
                    "rows": count,
                    "way": name,
                    "us": median * 1e6,
                    "gflop_s": 2 * products / median / 1e9,
                    "of_read": None if read is None else read / median,
                    "of_fma": None if fma is None else products / median / fma,
                    "times_torch": medians["torch"] / median if "torch" in medians else None,
                }
            )
    return rows


def main(
    shapes: Annotated[str, typer.Option(help="Shapes of weights, outputs x inputs")] = QWEN3_SHAPES,
    rows: Annotated[str, typer.Option(help="Numbers of rows per product")] = "1,4,16,512",
    dtype: Annotated[str, typer.Option(help="Dtype of rows: bfloat16 or float32")] = "bfloat16",
    threads: harness.Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per figure")] = 9,
    json: harness.Json = False,
) -> None:
    """Time products of rows with weights in 16, 8 and 4 bits."""
    weight_shapes, counts = parse_shapes(shapes), harness.parse_numbers("rows", rows, 1)
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype {dtype}: known are bfloat16, float32")
    harness.set_threads(threads)
    library = get_library()
    if library.functions is None:
        raise ValueError(f"nothing to measure: {library.reason}")
    with torch.no_grad():
        figures = [
            row
            for num_outputs, width in weight_shapes
            for row in measure_shape(num_outputs, width, counts, DTYPES[dtype], repeats)
        ]
    facts = {"isa": library.isa, "dtype": dtype, "repeats": repeats}
    harness.print_report("weights", figures, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
