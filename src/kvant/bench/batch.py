"""Time sequences of different lengths in one forward, and beam search.

A model of a known shape with random weights decodes one sequence, and several sequences under one
cache (`kvant.merge`) whose lengths differ around the context. In comparison, transformers'
DynamicCache holds as many sequences of one length. All decode one token each in turn. `tokens_s`
counts the tokens of all sequences; `times_one` is relative to one sequence of the same format,
`ratio` to the DynamicCache; `replayed` is the number of replayed tokens.

With `--beams` the model continues a random prompt by beam search, with the DynamicCache and with
each format in turn; `tokens_s` counts the tokens of the result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from kvant.bench.cache_race import (
    SHAPE_HELP,
    Contestant,
    RaceTask,
    build_model,
    draw_random_rows,
    make_contestant,
)
from kvant.bench.device import CPU, DYNAMIC
from kvant.bench.report import Json, parse_numbers, print_report, run, show_progress
from kvant.cache import merge
from kvant.generation import TransformersDecoder
from kvant.hf import NATIVE_REPLAY, cache_for, get_cache_argument
from kvant.spec import split_specs

WARMUP_TOKENS = NATIVE_REPLAY.num_warmup_forwards + 2  # per cache, before the timed tokens


def spread_lengths(context: int, sequences: int) -> list[int]:
    """Return different lengths whose mean is the context."""
    return [context - sequences // 2 + i for i in range(sequences)]


def make_merged_batch(
    model: Any, name: str, rows: tuple[Tensor, Tensor], lengths: list[int]
) -> Contestant:
    """Make one kvant cache with a sequence of each length."""
    keys, values = rows
    parts = [make_contestant(model, name, keys[:, :, :n], values[:, :, :n]).cache for n in lengths]
    cache = merge(parts) if len(parts) > 1 else parts[0]
    decoder = TransformersDecoder(model)
    replayer = decoder.make_replayer()

    def forward(token: Tensor, cache: Any) -> Any:
        decoder.compute_batch_logits([1] * len(lengths), cache.states.lengths, cache, replayer)

    return Contestant(name, cache, cache.states.nbytes, forward)


def make_uniform_batch(
    model: Any, rows: tuple[Tensor, Tensor], context: int, sequences: int
) -> Contestant:
    """Make a DynamicCache with several sequences of one length."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.update(*(x[:, :, :context].expand(sequences, -1, -1, -1) for x in rows))
    cache_nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    cache_argument = get_cache_argument(model)

    def forward(token: Tensor, cache: Any) -> Any:
        model(token.expand(sequences, 1), **{cache_argument: cache})

    return Contestant(DYNAMIC, cache, cache_nbytes, forward)


@torch.no_grad()
def measure_batches(
    model: Any, name: str, context: int, counts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each number of sequences, of a format and of the DynamicCache."""
    rows = draw_random_rows(model, context + max(counts))
    pairs = {
        count: (
            make_uniform_batch(model, rows, context, count),
            make_merged_batch(model, name, rows, spread_lengths(context, count)),
        )
        for count in counts
    }
    for turn in range(WARMUP_TOKENS + repeats):
        show_progress(f"{name}: token {turn + 1} of {WARMUP_TOKENS + repeats}")
        for pair in pairs.values():
            for contestant in pair:
                contestant.decode()
    figures: list[dict[str, Any]] = []
    speeds: dict[tuple[int, str], float] = {}
    for count, pair in pairs.items():
        for contestant in pair:
            seconds = contestant.seconds[WARMUP_TOKENS:]
            median = statistics.median(seconds)
            speeds[count, contestant.name] = count / median
            figures.append(
                {
                    "sequences": count,
                    "cache": contestant.name,
                    "tokens": len(seconds),
                    "median_ms": median * 1e3,
                    "best_ms": min(seconds) * 1e3,
                    "tokens_s": count / median,
                    "times_one": speeds[count, contestant.name]
                    / speeds[counts[0], contestant.name],
                    "ratio": speeds[count, contestant.name] / speeds[count, DYNAMIC],
                    "cache_mib": contestant.cache_nbytes / 2**20,
                    "replayed": contestant.num_replayed,
                }
            )
    return figures


@torch.no_grad()
def measure_beams(
    model: Any, names: Sequence[str], count: int, prompt: int, tokens: int, runs: int
) -> list[dict[str, Any]]:
    """Run beam search with each cache in turn; return a row for each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, prompt), generator=generator)
    options = {"num_beams": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    seconds: dict[str, list[float]] = {name: [] for name in (DYNAMIC, *names)}
    for turn in range(runs):
        for name, cache_seconds in seconds.items():
            show_progress(f"beams with {name}: {turn + 1} of {runs}")
            laps = []
            for new in (1, tokens):  # the prefill time is subtracted
                cache = DynamicCache(config=model.config)
                if name != DYNAMIC:
                    cache = cache_for(model, name)
                begin = time.perf_counter()
                limits = {"max_new_tokens": new, "min_new_tokens": new}
                model.generate(ids, **options | limits | {get_cache_argument(model): cache})
                laps.append(time.perf_counter() - begin)
            cache_seconds.append(laps[1] - laps[0])
    speeds = {name: (tokens - 1) / statistics.median(laps) for name, laps in seconds.items()}
    return [
        {
            "beams": count,
            "cache": name,
            "runs": runs,
            "seconds": statistics.median(seconds[name]),
            "tokens_s": speed,
            "ratio": speed / speeds[DYNAMIC],
        }
        for name, speed in speeds.items()
    ]


def main(
    sequences: Annotated[str, typer.Option(help="Numbers of sequences per forward")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="Mean rows in the cache")] = 512,
    formats: Annotated[str, typer.Option(help="Specs to measure")] = "raw,affine8",
    repeats: Annotated[int, typer.Option(min=1, help="Tokens per figure")] = 9,
    shape: Annotated[str, typer.Option(help=SHAPE_HELP)] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model")] = None,
    beam: Annotated[
        int | None, typer.Option("--beams", min=2, help="Measure beam search with this many beams")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="With --beams: tokens to generate")] = 128,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    json: Json = False,
) -> None:
    """Time sequences of different lengths in one forward, or beam search."""
    counts = parse_numbers("sequences", sequences)
    if counts[0] != 1 or sorted(set(counts)) != counts:
        raise ValueError(f"--sequences {sequences}: 1 first, then rising numbers are needed")
    if context <= counts[-1] // 2:
        raise ValueError(f"--context {context}: more than {counts[-1] // 2} rows are needed")
    if threads is not None:
        torch.set_num_threads(threads)
    task = RaceTask(layers, repeats, shape)
    show_progress("building the model")
    model = build_model(task.model_sizes)
    facts: Mapping[str, Any] = {
        "model": f"{shape}, random",
        "layers": task.model_sizes["num_hidden_layers"],
        "context": context,
        "transformers": version("transformers"),
    }
    names = split_specs(formats)
    if beam is not None:
        title, rows = "beams", measure_beams(model, names, beam, context, tokens, repeats)
    else:
        title = "batch"
        rows = [
            row for name in names for row in measure_batches(model, name, context, counts, repeats)
        ]
    show_progress("")
    print_report(title, rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
