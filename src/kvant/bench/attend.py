"""Time attention of the newest tokens over N stored rows, against torch and a plain memory pass.

All methods of a length run in turn. `torch` methods attend over the same bf16 rows. `stream` moves
as many bytes as the raw rows have: on a CPU it sums them, on a GPU it copies half of them. `share`
is the time of such a pass over a format's bytes, relative to the time measured. Each of several
`--backend`s reads all formats.

With several `--queries`, `matmul` is torch's product of two square matrices, of float32 on a CPU
and of bfloat16 on a GPU. `gflop_s` counts two operations for each multiplication; attention counts
those of the scores and values of visible rows.

On a GPU a call finds no input in the GPU's cache, since other memory was read before it. A figure
is the GPU's time; `host_ms` is the time that Python takes to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvant.attention import attend, explain
from kvant.bench import harness
from kvant.bench.cycles import count_cycles
from kvant.bench.harness import (
    BenchDevice,
    CudaDevice,
    Laps,
    TimedCall,
    choose_device,
    time_in_turn,
)
from kvant.cache import Cache
from kvant.cache.layout import CacheLayout
from kvant.contracts import View
from kvant.native import get_library
from kvant.spec import split_specs

APPEND_CHUNK = 4096  # rows appended at once
MATMUL_SIZE = 2048  # of each side: limited by multiplications, not by memory
ResultKey = tuple[str, str]  # a spec or another method, and the backend that reads it
AttentionFunction = Callable[[Tensor, Tensor], Any]


def make_torch_attention(q: Tensor, heads: int, length: int) -> dict[str, AttentionFunction]:
    """Return torch's methods for queries [B, heads * group, T, D], the newest of `length` rows."""
    batch, all_heads, queries, dim = q.shape
    folded = q.view(batch, heads, -1, dim)
    mask = folded_mask = None
    if queries > 1:
        mask = torch.ones(queries, length, dtype=torch.bool, device=q.device)
        mask = mask.tril(length - queries)
        folded_mask = mask.repeat(all_heads // heads, 1)

    def by_hand(keys: Tensor, values: Tensor) -> Any:
        scores = folded @ keys.transpose(2, 3) * dim**-0.5
        if folded_mask is not None:
            scores = scores.masked_fill(~folded_mask, -torch.inf)
        return scores.softmax(-1) @ values

    return {
        "torch gqa": lambda k, v: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        "torch folded": lambda k, v: sdpa(folded, k, v, attn_mask=folded_mask),
        "torch by hand": by_hand,
    }


def make_gpu_attention(
    q: Tensor, heads: int, length: int, compiler: Callable[..., Any] = torch.compile
) -> dict[str, AttentionFunction]:
    """Return torch's methods for GPUs; some may not run on this GPU."""
    methods = make_torch_attention(q, heads, length)
    gqa, flex = methods["torch gqa"], compiler(flex_attention, dynamic=False)
    queries, block_mask = q.shape[2], None
    if queries > 1:
        block_mask = create_block_mask(
            lambda b, h, row, column: column <= row + length - queries,
            *(None, None, queries, length),
            device=str(q.device),
        )

    def flash(keys: Tensor, values: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return gqa(keys, values)

    gpu_methods = {
        "torch flash": flash,
        "torch flex": lambda k, v: flex(q, k, v, block_mask=block_mask, enable_gqa=True),
    }
    return methods | gpu_methods


def filter_runnable(
    functions: Mapping[str, AttentionFunction], keys: Tensor, values: Tensor
) -> tuple[dict[str, AttentionFunction], list[str]]:
    """Run each method once; return those that run, and a line for each that does not."""
    runnable, skipped = {}, []
    for name, function in functions.items():
        try:
            function(keys, values)
            runnable[name] = function
        except Exception as error:  # compilers raise errors of any class
            reason = next(iter(str(error).strip().splitlines()), "no reason is given")
            skipped.append(f"{name}: {type(error).__name__}, {reason}")
    return runnable, skipped


def make_cache(spec: str, backends: Sequence[str | None]) -> Cache:
    """Make a cache of one layer; the interpreted kernels read pages in the layout of a GPU."""
    cache = Cache(1, spec)
    if "interpreted" in backends:
        layout = CacheLayout.from_spec(cache.spec, select_tiles=lambda device: None)
        cache.holder.state = replace(cache.state, layout=layout)
    return cache


def store_rows(cache: Cache, keys: Tensor, values: Tensor, queries: int) -> tuple[View, int]:
    """Store the rows in a cache; return the view of the newest tokens, and the bytes."""
    state: Any = cache[0]
    num_old = keys.shape[2] - queries
    for start in range(0, num_old, APPEND_CHUNK):
        part = slice(start, min(start + APPEND_CHUNK, num_old))
        state.append(keys[:, :, part], values[:, :, part], prefill="stored")
    return state.append(keys[:, :, num_old:], values[:, :, num_old:]), cache.nbytes_used


@dataclass(frozen=True)
class AttendTask:
    """The shapes, the backends and the number of repeats of a measurement."""

    batch: int
    heads: int
    group: int
    dim: int
    queries: int
    repeats: int
    backend: str | None

    @property
    def backends(self) -> list[str | None]:
        return [None] if self.backend is None else [*self.backend.split(",")]

    def count_operations(self, way: str, length: int) -> int:
        """Return the operations that count for a row of a report; a plain memory pass has none."""
        if way in ("matmul", "stream"):
            return 2 * MATMUL_SIZE**3 if way == "matmul" else 0
        visible = self.queries * length - self.queries * (self.queries - 1) // 2
        return 4 * self.dim * self.batch * self.heads * self.group * visible


def measure_attention(
    length: int, names: list[str], task: AttendTask, device: BenchDevice
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each method and backend, and a line for each skipped torch method."""
    shape = task.batch, task.heads, length, task.dim
    keys, values = torch.randn(2, *shape, device=device.name).bfloat16()
    query_shape = task.batch, task.heads * task.group, task.queries, task.dim
    q = torch.randn(query_shape, device=device.name).bfloat16()
    stored = {
        name: store_rows(make_cache(name, task.backends), keys, values, task.queries)
        for name in ("raw", *names)
    }
    raw_nbytes = stored["raw"][1]
    calls, skipped = make_torch_calls(q, keys, values, device)
    calls["stream", ""] = device.make_stream(raw_nbytes)
    if task.queries > 1:
        calls["matmul", ""] = make_matmul(device)
    for backend in task.backends:
        for name, (view, _) in stored.items():
            reader = backend or explain(view).backend
            calls[name, reader] = partial(attend, q, view, backend=backend)
    laps = time_in_turn(calls, task.repeats, f"{length} rows", device=device, queued=True)
    nbytes = {key: stored[key[0]][1] if key[0] in stored else raw_nbytes for key in laps}
    nbytes["matmul", ""] = 0
    rows = [{"rows": length} | row for row in summarize_laps(laps, nbytes)]
    for row in rows if task.queries > 1 else ():
        row["gflop_s"] = task.count_operations(row["way"], length) / row["median_ms"] / 1e6
    return rows, [f"{length} rows, {line}" for line in skipped]


def make_torch_calls(
    q: Tensor, keys: Tensor, values: Tensor, device: BenchDevice
) -> tuple[dict[ResultKey, TimedCall], list[str]]:
    """Return calls of torch's methods that run on this device, and a line for each other."""
    make = make_gpu_attention if isinstance(device, CudaDevice) else make_torch_attention
    methods, skipped = filter_runnable(make(q, *keys.shape[1:3]), keys, values)
    return {(name, ""): partial(method, keys, values) for name, method in methods.items()}, skipped


def make_matmul(device: BenchDevice) -> TimedCall:
    """Return a product of matrices in the dtype that this kind of device multiplies best."""
    dtype = torch.bfloat16 if isinstance(device, CudaDevice) else torch.float32
    sides = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device.name, dtype=dtype)
    return partial(torch.mm, *sides)


def summarize_laps(
    laps: Mapping[ResultKey, Laps], nbytes: Mapping[ResultKey, int]
) -> list[dict[str, Any]]:
    medians = {name: method_laps.median for name, method_laps in laps.items()}
    best = min(median for (method, _), median in medians.items() if method.startswith("torch"))
    raw = next(median for (method, _), median in medians.items() if method == "raw")
    stream = medians["stream", ""] / nbytes["stream", ""]  # seconds a byte
    return [
        {
            "way": name[0],
            "backend": name[1],
            **laps[name].summarize(),
            "gb_s": nbytes[name] / median / 1e9,
            "share": stream * nbytes[name] / median,
            "against_torch": best / median,
            "against_raw": raw / median,
        }
        for name, median in medians.items()
    ]


def main(
    lengths: Annotated[str, typer.Option(help="Rows stored")] = "1024,8192,32768,131072",
    formats: Annotated[
        str, typer.Option(help="Specs to measure, besides raw")
    ] = "affine8,fp8,affine8v4,affine6,affine4,turbo4v4,turbo3v3,turbo4v2",
    threads: harness.Threads = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences")] = 1,
    heads: int = 8,
    group: Annotated[int, typer.Option(min=1, help="Query heads per key head")] = 4,
    dim: int = 128,
    queries: Annotated[int, typer.Option(min=1, help="Newest tokens that attend")] = 1,
    backend: Annotated[
        str | None, typer.Option(help="Backends to measure; default: the preferred one")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Calls per figure")] = 25,
    cycles: Annotated[
        bool,
        typer.Option(
            "--cycles",
            help="Count cycles a row and key head, in the cache, by --formats, --group and --dim",
        ),
    ] = False,
    device: harness.Device = None,
    plot: harness.Plot = None,
    json: harness.Json = False,
) -> None:
    """Time attention of the newest tokens: one layer, bf16."""
    if cycles:
        counts = count_cycles(["raw", *split_specs(formats)], group=group, dim=dim, repeats=repeats)
        facts = {"group": group, "dim": dim, "repeats": repeats, "isa": get_library().isa}
        harness.print_report("attend --cycles", counts, facts, quiet=json)
        return
    bench_device = choose_device(device)
    harness.check_plot(plot)
    row_counts = harness.parse_numbers("lengths", lengths)
    if min(row_counts) < queries:
        raise ValueError(f"--lengths {lengths}: as many rows as queries ({queries}) or more")
    harness.set_threads(threads)
    task = AttendTask(batch, heads, group, dim, queries, repeats, backend)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for length in row_counts:
        measured = measure_attention(length, split_specs(formats), task, bench_device)
        rows += measured[0]
        skipped += measured[1]
    facts = asdict(task) | {"dtype": "bfloat16", "isa": get_library().isa, "skipped": skipped}
    if plot is not None:
        title = f"attention of {queries} over N rows"
        harness.draw_curves(make_attention_curves(rows), title, plot, "milliseconds (median)")
    harness.print_report("attend", rows, facts, quiet=json, gpu=bench_device.describe())


def make_attention_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the median milliseconds by method and rows."""
    preferred = next(row["backend"] for row in rows if row["way"] == "raw")

    def label(row: Mapping[str, Any]) -> str:
        way, backend = row["way"], row["backend"]
        return way if backend in ("", preferred) else f"{way}, {backend}"

    return harness.group_curves(rows, label, "rows")


if __name__ == "__main__":
    harness.run(main)
