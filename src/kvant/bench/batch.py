"""What sequences of different lengths cost in one forward, and what beams cost.

A model of a known shape with random weights decodes, as in sessions and engines: one sequence, and
several under one cache (`kvant.merge`), whose lengths lie around the context and are all different.
Beside them several of one length, with the host's DynamicCache. All decode one token each in turn.
`tokens_s` counts the tokens of all sequences; `times_one` is that over what one sequence of the
same format gets, `ratio` that over the host's cache, `replayed` the tokens that were replayed.

With `--beams` the model continues a prompt of random tokens by beam search, with the host's cache
and with each format in turn: `tokens_s` counts the tokens of the result.
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
    MODEL_SHAPES,
    Contestant,
    RaceTask,
    build_model,
    make_contestant,
    random_rows,
)
from kvant.bench.device import CPU, DYNAMIC
from kvant.bench.report import Json, parse_numbers, print_report, run, show_progress
from kvant.cache import merge
from kvant.generation import TransformersDecoder
from kvant.hf import NATIVE_REPLAY, cache_for, get_cache_argument
from kvant.spec import split_specs

WARMUP_TOKENS = (
    NATIVE_REPLAY.num_warmup_forwards + 2
)  # tokens that each cache decodes before it is timed


def spread_lengths(context: int, sequences: int) -> list[int]:
    """So many different lengths, whose mean is the context."""
    return [context - sequences // 2 + i for i in range(sequences)]


def make_merged_batch(
    model: Any, name: str, rows: tuple[Tensor, Tensor], lengths: list[int]
) -> Contestant:
    """One cache of ours with a sequence of each length."""
    keys, values = rows
    parts = [make_contestant(model, name, keys[:, :, :n], values[:, :, :n]).cache for n in lengths]
    cache = merge(parts) if len(parts) > 1 else parts[0]
    decoder = TransformersDecoder(model)
    replayer = decoder.make_replayer()

    def forward(token: Tensor, cache: Any) -> Any:
        decoder.compute_batch_logits(
            [1] * len(lengths), cache.states.lengths, cache, replayer
        )  # that token

    return Contestant(name, cache, cache.states.nbytes, forward)


def make_uniform_batch(
    model: Any, rows: tuple[Tensor, Tensor], context: int, sequences: int
) -> Contestant:
    """The host's cache with so many sequences of one length."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.update(*(x[:, :, :context].expand(sequences, -1, -1, -1) for x in rows))
    rest = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    given = get_cache_argument(model)

    def forward(token: Tensor, cache: Any) -> Any:
        model(token.expand(sequences, 1), **{given: cache})

    return Contestant(DYNAMIC, cache, rest, forward)


@torch.no_grad()
def measure_batches(
    model: Any, name: str, context: int, counts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each number of sequences: of one format, and of the host's cache beside it."""
    rows = random_rows(model, context + max(counts))
    pairs = {
        n: (
            make_uniform_batch(model, rows, context, n),
            make_merged_batch(model, name, rows, spread_lengths(context, n)),
        )
        for n in counts
    }
    for turn in range(WARMUP_TOKENS + repeats):
        show_progress(f"{name}: token {turn + 1} of {WARMUP_TOKENS + repeats}")
        for pair in pairs.values():
            for one in pair:
                one.decode()
    found: list[dict[str, Any]] = []
    speeds: dict[tuple[int, str], float] = {}
    for n, pair in pairs.items():
        for one in pair:
            seconds = one.seconds[WARMUP_TOKENS:]
            median = statistics.median(seconds)
            speeds[n, one.name] = n / median
            found.append(
                {
                    "sequences": n,
                    "cache": one.name,
                    "tokens": len(seconds),
                    "median_ms": median * 1e3,
                    "best_ms": min(seconds) * 1e3,
                    "tokens_s": n / median,
                    "times_one": speeds[n, one.name] / speeds[counts[0], one.name],
                    "ratio": speeds[n, one.name] / speeds[n, DYNAMIC],
                    "cache_mib": one.cache_nbytes / 2**20,
                    "replayed": one.num_replayed,
                }
            )
    return found


@torch.no_grad()
def measure_beams(
    model: Any, names: Sequence[str], count: int, prompt: int, tokens: int, runs: int
) -> list[dict[str, Any]]:
    """A row for each cache: beam search over one prompt, in turn."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, prompt), generator=generator)
    given = {"num_beams": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    seconds: dict[str, list[float]] = {name: [] for name in (DYNAMIC, *names)}
    for turn in range(runs):
        for name, found in seconds.items():
            show_progress(f"beams with {name}: {turn + 1} of {runs}")
            laps = []
            for new in (1, tokens):  # what reading the prompt takes is taken off
                cache = DynamicCache(config=model.config)
                if name != DYNAMIC:
                    cache = cache_for(model, name)
                begin = time.perf_counter()
                limits = {"max_new_tokens": new, "min_new_tokens": new}
                model.generate(ids, **given | limits | {get_cache_argument(model): cache})
                laps.append(time.perf_counter() - begin)
            found.append(laps[1] - laps[0])
    best = {name: (tokens - 1) / statistics.median(found) for name, found in seconds.items()}
    return [
        {
            "beams": count,
            "cache": name,
            "runs": runs,
            "seconds": statistics.median(seconds[name]),
            "tokens_s": speed,
            "ratio": speed / best[DYNAMIC],
        }
        for name, speed in best.items()
    ]


def main(
    sequences: Annotated[str, typer.Option(help="how many in one forward")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="rows that are there, on average")] = 512,
    formats: Annotated[str, typer.Option(help="of the spec language")] = "raw,affine8",
    repeats: Annotated[int, typer.Option(min=1, help="tokens a figure")] = 9,
    shape: Annotated[str, typer.Option(help=", ".join(MODEL_SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    beam: Annotated[
        int | None, typer.Option("--beams", min=2, help="measure beam search instead")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="with --beams: new ones")] = 128,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """What sequences of different lengths cost in one forward, and what beams cost."""
    counts = parse_numbers("sequences", sequences)
    if counts[0] != 1 or sorted(set(counts)) != counts:
        raise ValueError(f"--sequences {sequences}: 1, and more of them in rising order")
    if context <= counts[-1] // 2:
        raise ValueError(f"--context {context}: more than half of the {counts[-1]} sequences")
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
