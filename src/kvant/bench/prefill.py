"""What reading a prompt costs: tokens a second by format, by mode and by chunk.

A model, the small one inside the package if none is named, reads the same text in chunks, into the
host's own cache and into caches of ours, in turn; medians. `dense`: a chunk sees its own rows as
they came; `stored`: as decoding would see them. `ratio` is over the host's cache with that chunk.
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
    """Seconds to read all tokens, and the bytes that they are remembered in."""
    candidate = make()
    begin = time.perf_counter()
    for first in range(0, len(tokens), chunk):
        candidate.feed(tokens[first : first + chunk])
    return time.perf_counter() - begin, candidate.nbytes


def measure_prefill(
    makes: dict[str, MakeCandidate], text: list[int], chunk: int, repeats: int
) -> list[Any]:
    """A row for each way; the first turn finds nothing in the caches and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in makes}
    nbytes = {}
    for turn in range(repeats + 1):
        for name, make in makes.items():
            show_progress(f"chunks of {chunk}, {name}: {turn} of {repeats}")
            taken, nbytes[name] = time_prefill(make, text, chunk)
            if turn:
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
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
    model: Annotated[str | None, typer.Option(help="a folder or a name on the hub")] = None,
    formats: Annotated[str, typer.Option(help="of the spec language")] = "raw,affine8,affine4",
    prompt: Annotated[int, typer.Option(min=1, help="its tokens")] = 2000,
    chunks: Annotated[str, typer.Option(help="tokens that go into a forward")] = "128,512,2000",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the model; auto: as it was saved")] = AUTO_DTYPE,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="prompts a figure")] = 5,
    json: Json = False,
) -> None:
    """Reading a prompt, batch 1."""
    where = choose_device(device)
    points = parse_numbers("chunks", chunks)
    if min(points) < 1:
        raise ValueError(f"--chunks {chunks}: 1 token or more")
    if threads is not None:
        torch.set_num_threads(threads)
    specs = [f"{spec},prefill={mode}" for spec in split_specs(formats) for mode in PREFILL_MODES]
    for spec in specs:
        parse(spec, 1)
    show_progress("loading the model")
    loaded, tokenizer = load(model, device=where.name, dtype=dtype)
    text = read_text_tokens(loaded, tokenizer, prompt)
    makes = {BASELINE: make_dynamic(loaded), **make_candidates(loaded, specs)}
    rows = [row for chunk in points for row in measure_prefill(makes, text, chunk, repeats)]
    show_progress("")
    facts = {
        "model": model or "the model inside",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "prompt": prompt,
        "repeats": repeats,
        "transformers": version("transformers"),
    }
    print_report("prefill", rows, facts, quiet=json, device=where)


if __name__ == "__main__":
    run(main)
