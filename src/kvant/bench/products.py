"""Time the product of a few rows with a linear layer's 16-bit weight on a CPU.

`torch` packs the weight in every call. `packed` packs it once and multiplies with oneDNN, `kernel`
with kvant's kernel. `stream` reads as many bytes as the weights have: the limit that memory sets.
Each shape has more weights than the CPU's caches hold, used in turn as a model's layers are. If
oneDNN cannot pack the weights, `packed` and `kernel` are skipped, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import linear

from kvant.bench import harness
from kvant.bench.harness import CPU, TimedCall, time_in_turn
from kvant.weights.packed_matrix import PackedMatrix, SummationOrder, explain_refusal

# Of Qwen3-0.6B: four kinds of layers, and the head.
QWEN3_SHAPES = "2048x1024,1024x2048,3072x1024,1024x3072,151936x1024"
MIN_WEIGHT_BYTES = 300_000_000  # of all weights of a shape: more than caches hold


def parse_shapes(text: str) -> list[tuple[int, int]]:
    words = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", word) for word in words):
        raise ValueError(f"--shapes {text}: outputs x inputs are needed, such as {QWEN3_SHAPES}")
    return [(int(outs), int(width)) for outs, width in (word.split("x") for word in words)]


def multiply(product: Callable[..., Tensor], weights: Sequence[Any], x: Tensor) -> None:
    for weight in weights:
        product(weight, x)


def measure_products(
    outs: int, width: int, counts: list[int], repeats: int, *, packs_weights: bool
) -> list[dict[str, Any]]:
    nbytes = outs * width * 2
    order = SummationOrder()
    plain = [torch.randn(outs, width).bfloat16() for _ in range(max(1, MIN_WEIGHT_BYTES // nbytes))]
    packed = [PackedMatrix(weight, order) for weight in plain if packs_weights]
    stream = CPU.make_stream(nbytes * len(plain))
    rows = []
    for count in counts:
        x = torch.randn(count, width).bfloat16()
        calls: dict[str, TimedCall] = {
            "torch": partial(multiply, lambda w, x: linear(x, w), plain, x)
        }
        if packs_weights:
            calls["packed"] = partial(
                multiply, lambda w, x: w.multiply_by_onednn(x, None), packed, x
            )
        calls["stream"] = stream
        if packs_weights and packed[0].find_kernel_k_block(x, None):
            calls["kernel"] = partial(multiply, lambda w, x: w.multiply(x, None), packed, x)
        laps = time_in_turn(calls, repeats, f"{outs} x {width}, {count} rows")
        medians = {name: laps[name].median / len(plain) for name in laps}
        rows += [
            {
                "shape": f"{outs}x{width}",
                "rows": count,
                "way": name,
                "us": median * 1e6,
                "gb_s": nbytes / median / 1e9,
                "of_stream": medians["stream"] / median,
                "times": medians["packed"] / median if packs_weights else None,
            }
            for name, median in medians.items()
        ]
    return rows


def main(
    shapes: Annotated[str, typer.Option(help="Shapes of weights, outputs x inputs")] = QWEN3_SHAPES,
    rows: Annotated[str, typer.Option(help="Numbers of rows per product")] = "1,4,16",
    threads: harness.Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per figure")] = 9,
    json: harness.Json = False,
) -> None:
    """Time products of few rows with packed weights."""
    weight_shapes, counts = parse_shapes(shapes), harness.parse_numbers("rows", rows, 1)
    harness.set_threads(threads)
    reason = explain_refusal(torch.bfloat16)
    with torch.no_grad():
        figures = [
            row
            for shape in weight_shapes
            for row in measure_products(*shape, counts, repeats, packs_weights=reason is None)
        ]
    skipped = [] if reason is None else [f"packed and kernel: {reason}"]
    facts = {"dtype": "bfloat16", "repeats": repeats, "skipped": skipped}
    harness.print_report("products", figures, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
