"""Measure prefill: tokens per second by spec, prefill mode and chunk size.

A model (default: the built-in one) reads the same text in chunks, into transformers' DynamicCache
and into kvant's caches in turn; figures are medians. With `dense` a chunk attends to its own rows
uncompressed, with `stored` as decoding would. `ratio` is relative to the DynamicCache with the same
chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from kvant.bench import harness
from kvant.bench.decode import (
    TRANSFORMERS,
    Candidate,
    MakeCandidate,
    make_candidates,
    make_dynamic,
    open_checkpoint,
)
from kvant.bench.harness import Laps, choose_device, time_in_turn
from kvant.platform.devices import AUTO_DTYPE
from kvant.spec import parse_words, split_specs

PREFILL_MODES = ("dense", "stored")


def feed_chunks(candidate: Candidate, text: list[int], chunk: int) -> None:
    for offset in range(0, len(text), chunk):
        candidate.feed(text[offset : offset + chunk])


def measure_prefill(
    makes: dict[str, MakeCandidate], text: list[int], chunk: int, repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each candidate; the first turn is a warm-up."""
    laps = {name: Laps() for name in makes}
    nbytes: dict[str, int] = {}
    for turn in range(repeats + 1):
        candidates = {name: make() for name, make in makes.items()}
        calls = {name: partial(feed_chunks, c, text, chunk) for name, c in candidates.items()}
        label = f"chunks of {chunk}, {turn} of {repeats}"
        for name, lap in time_in_turn(calls, 1, label, warmup=0).items():
            laps[name] += lap if turn else []
            nbytes[name] = candidates[name].measure_nbytes()
    return [
        {
            "chunk": chunk,
            "cache": name,
            "tokens_s": len(text) / laps[name].median,
            **laps[name].summarize(),
            "ratio": laps[TRANSFORMERS].median / laps[name].median,
            "nbytes": nbytes[name],
        }
        for name in makes
    ]


def main(
    model: harness.Model = None,
    formats: Annotated[str, typer.Option(help="Specs to measure")] = "raw,affine8,affine4",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt")] = 2000,
    chunks: Annotated[str, typer.Option(help="Chunk sizes in tokens")] = "128,512,2000",
    device: harness.Device = None,
    dtype: Annotated[str, typer.Option(help="Of the model; auto: as saved")] = AUTO_DTYPE,
    threads: harness.Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts per figure")] = 5,
    json: harness.Json = False,
) -> None:
    """Measure prefill of one prompt, batch 1."""
    bench_device = choose_device(device)
    chunk_sizes = harness.parse_numbers("chunks", chunks, 1)
    harness.set_threads(threads)
    specs = [f"{spec},prefill={mode}" for spec in split_specs(formats) for mode in PREFILL_MODES]
    for spec in specs:
        parse_words(spec)
    loaded_model, text, facts = open_checkpoint(model, bench_device, dtype, prompt)
    makes = {TRANSFORMERS: make_dynamic(loaded_model), **make_candidates(loaded_model, specs)}
    rows = [row for chunk in chunk_sizes for row in measure_prefill(makes, text, chunk, repeats)]
    facts |= {"prompt": prompt, "repeats": repeats}
    harness.print_report("prefill", rows, facts, quiet=json, gpu=bench_device.describe())


if __name__ == "__main__":
    harness.run(main)
