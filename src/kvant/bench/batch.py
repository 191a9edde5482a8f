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
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from kvant.bench import harness
from kvant.bench.cache_race import (
    Contestant,
    Shape,
    decode_in_turn,
    draw_random_rows,
    make_contestant,
    open_model,
)
from kvant.bench.harness import CPU, DYNAMIC, BenchDevice, time_in_turn
from kvant.cache import merge
from kvant.generation import TransformersDecoder
from kvant.hf import cache_for, get_cache_argument
from kvant.replay import NATIVE_REPLAY
from kvant.spec import split_specs
from kvant.weights.packing import pack

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

    def decode() -> None:
        decoder.compute_batch_logits([[1]] * len(lengths), cache.states.lengths, cache, replayer)

    return Contestant(name, cache, cache.states.nbytes, decode)


@torch.no_grad()
def measure_batches(
    model: Any,
    name: str,
    context: int,
    counts: Sequence[int],
    repeats: int,
    device: BenchDevice = CPU,
) -> list[dict[str, Any]]:
    """Return a row for each number of sequences, of a format and of the DynamicCache."""
    rows = draw_random_rows(model, context + max(counts))
    keys, values = (x[:, :, :context] for x in rows)  # the DynamicCache has equal lengths
    pairs = {
        count: (
            make_contestant(
                model, DYNAMIC, keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1)
            ),
            make_merged_batch(model, name, rows, spread_lengths(context, count)),
        )
        for count in counts
    }
    contestants = [contestant for pair in pairs.values() for contestant in pair]
    decode_in_turn(contestants, repeats, name, warmup=WARMUP_TOKENS, device=device)
    singles = {contestant.name: contestant.laps.median for contestant in pairs[1]}
    return [
        {
            "sequences": count,
            "cache": contestant.name,
            "tokens": repeats,
            **contestant.laps.summarize(),
            "tokens_s": count / contestant.laps.median,
            "times_one": count * singles[contestant.name] / contestant.laps.median,
            "ratio": pair[0].laps.median / contestant.laps.median,
            "cache_mib": contestant.cache_nbytes / 2**20,
            "replayed": contestant.num_replayed,
        }
        for count, pair in pairs.items()
        for contestant in pair
    ]


@torch.no_grad()
def measure_beams(
    model: Any, names: Sequence[str], count: int, prompt: int, tokens: int, runs: int
) -> list[dict[str, Any]]:
    """Run beam search with each cache in turn; return a row for each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, prompt), generator=generator)
    options = {"num_beams": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def search(name: str, new: int) -> None:
        cache = DynamicCache(config=model.config) if name == DYNAMIC else cache_for(model, name)
        limits = {"max_new_tokens": new, "min_new_tokens": new}
        model.generate(ids, **options | limits | {get_cache_argument(model): cache})

    searches = [(name, new) for name in (DYNAMIC, *names) for new in (1, tokens)]
    calls = {key: partial(search, *key) for key in searches}
    laps = time_in_turn(calls, runs, f"{count} beams", warmup=0)

    def measure_decoding(name: str) -> float:
        """Return the median seconds of a run, without its prefill."""
        pairs = zip(laps[name, tokens].seconds, laps[name, 1].seconds, strict=True)
        return statistics.median(whole - prefill for whole, prefill in pairs)

    seconds = {name: measure_decoding(name) for name in (DYNAMIC, *names)}
    return [
        {
            "beams": count,
            "cache": name,
            "runs": runs,
            "seconds": median,
            "tokens_s": (tokens - 1) / median,
            "ratio": seconds[DYNAMIC] / median,
        }
        for name, median in seconds.items()
    ]


def main(
    sequences: Annotated[str, typer.Option(help="Numbers of sequences per forward")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="Mean rows in the cache")] = 512,
    formats: Annotated[str, typer.Option(help="Specs to measure")] = "raw,affine8",
    repeats: Annotated[int, typer.Option(min=1, help="Tokens per figure")] = 9,
    shape: Shape = "0.6b",
    layers: harness.Layers = None,
    beam: Annotated[
        int | None, typer.Option("--beams", min=2, help="Measure beam search with this many beams")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="With --beams: tokens to generate")] = 128,
    weights: Annotated[
        str | None, typer.Option(help="Pack the weights: raw, affine8, affine4")
    ] = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Time sequences of different lengths in one forward, or beam search."""
    counts = harness.parse_numbers("sequences", sequences)
    if counts[0] != 1 or sorted(set(counts)) != counts:
        raise ValueError(f"--sequences {sequences}: 1 first, then rising numbers are needed")
    if context <= counts[-1] // 2:
        raise ValueError(f"--context {context}: more than {counts[-1] // 2} rows are needed")
    model, facts = open_model(shape, layers, threads)
    if weights is not None:
        pack(model, weights)
    names = split_specs(formats)
    if beam is not None:
        title, rows = "beams", measure_beams(model, names, beam, context, tokens, repeats)
    else:
        title = "batch"
        rows = [
            row for name in names for row in measure_batches(model, name, context, counts, repeats)
        ]
    harness.print_report(title, rows, facts | {"context": context, "weights": weights}, quiet=json)


if __name__ == "__main__":
    harness.run(main)
