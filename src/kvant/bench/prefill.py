"""Measure prefill: tokens per second by spec, prefill mode and chunk size.

A model (default: the built-in one) reads the same text in chunks, into transformers' DynamicCache
and into kvant's caches in turn; figures are medians. With `dense` a chunk attends to its own rows
uncompressed, with `stored` as decoding would. `ratio` is relative to the DynamicCache with the same
chunk.
"""

from __future__ import annotations

import statistics
import time
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer

from kvant.bench.candidates import MakeCandidate, make_candidates, make_dynamic
from kvant.bench.decode import read_text_tokens
from kvant.bench.device import choose_device
from kvant.bench.report import Json, parse_numbers, print_report, run, show_progress
from kvant.checkpoints import load
from kvant.devices import AUTO_DTYPE
from kvant.spec import parse, split_specs

BASELINE = "transformers"
PREFILL_MODES = ("dense", "stored")


def time_prefill(make: MakeCandidate, tokens: list[int], chunk: int) -> tuple[float, int]:
    """Return the seconds to read all tokens, and the bytes of the cache."""
    candidate = make()
    start = time.perf_counter()
    for offset in range(0, len(tokens), chunk):
        candidate.feed(tokens[offset : offset + chunk])
    return time.perf_counter() - start, candidate.nbytes


def measure_prefill(
    makes: dict[str, MakeCandidate], text: list[int], chunk: int, repeats: int
) -> list[Any]:
    """Return a row for each candidate; the first turn is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in makes}
    nbytes = {}
    for turn in range(repeats + 1):
        for name, make in makes.items():
            show_progress(f"chunks of {chunk}, {name}: {turn} of {repeats}")
            elapsed, nbytes[name] = time_prefill(make, text, chunk)
            if turn:
                seconds[name].append(elapsed)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "chunk": chunk,
            "cache": name,
            "tokens_s": len(text) / median,
            "median_ms": median * 1e3,
            "best_ms": min(seconds[name]) * 1e3,
            "ratio": medians[BASELINE] / median,
            "nbytes": nbytes[name],
        }
        for name, median in medians.items()
    ]


def main(
    model: Annotated[str | None, typer.Option(help="Folder, or name on the hub")] = None,
    formats: Annotated[str, typer.Option(help="Specs to measure")] = "raw,affine8,affine4",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt")] = 2000,
    chunks: Annotated[str, typer.Option(help="Chunk sizes in tokens")] = "128,512,2000",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model; auto: as saved")] = AUTO_DTYPE,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts per figure")] = 5,
    json: Json = False,
) -> None:
    """Measure prefill of one prompt, batch 1."""
    bench_device = choose_device(device)
    chunk_sizes = parse_numbers("chunks", chunks)
    if min(chunk_sizes) < 1:
        raise ValueError(f"--chunks {chunks}: each must be 1 token or more")
    if threads is not None:
        torch.set_num_threads(threads)
    specs = [f"{spec},prefill={mode}" for spec in split_specs(formats) for mode in PREFILL_MODES]
    for spec in specs:
        parse(spec, 1)
    show_progress("loading the model")
    loaded_model, tokenizer = load(model, device=bench_device.name, dtype=dtype)
    text = read_text_tokens(loaded_model, tokenizer, prompt)
    makes = {BASELINE: make_dynamic(loaded_model), **make_candidates(loaded_model, specs)}
    rows = [row for chunk in chunk_sizes for row in measure_prefill(makes, text, chunk, repeats)]
    show_progress("")
    facts = {
        "model": model or "the model inside",
        "dtype": str(loaded_model.dtype).removeprefix("torch."),
        "prompt": prompt,
        "repeats": repeats,
        "transformers": version("transformers"),
    }
    print_report("prefill", rows, facts, quiet=json, device=bench_device)


if __name__ == "__main__":
    run(main)
