"""Time the first token of prompts that share a prefix with earlier prompts.

A model of a known shape with random weights reads prompts of random tokens, which are equal but for
their last tokens. Stock `generate` and `kvant.generate` without prefixes prefill the whole prompt;
`kvant.generate` and the engine with prefixes prefill only its end. A "restarted" run has an empty
cache, and the prefix in a store. `steps` is the time in decode steps of `kvant.generate` at that
length, which are measured after the same prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from kvant.bench import harness
from kvant.bench.cache_race import Shape, open_model
from kvant.bench.engine import SilentTokenizer
from kvant.engine import Engine
from kvant.generation import generate
from kvant.prefixes import Prefixes

DECODE_STEPS = 8  # after each prompt


def measure_prefixes(
    model: Any, prompts: list[list[int]], spec: str, store: str
) -> tuple[dict[str, list[float]], list[float], dict[str, Any]]:
    """Return the seconds to the first token by method, of decode steps, and the hit statistics."""
    steps: list[float] = []
    seconds: dict[str, list[float]] = {}
    prefixes, half = Prefixes(None, store=store), len(prompts) // 2
    options: Any = {"kv_cache": spec, "max_new_tokens": DECODE_STEPS, "ignore_end": True}

    def time_stock(prompt: list[int]) -> float:
        begin = time.perf_counter()
        model.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False, pad_token_id=0)
        return time.perf_counter() - begin

    def time_generate(prompt: list[int], prefixes: Prefixes | None = prefixes) -> float:
        times = [time.perf_counter()]
        for _ in generate(model, SilentTokenizer(), prompt, prefixes=prefixes, **options):
            times.append(time.perf_counter())
        steps.extend(b - a for a, b in pairwise(times[1:]))
        return times[1] - times[0]

    def measure(
        name: str, read: Callable[[list[int]], float], timed_prompts: list[list[int]]
    ) -> None:
        for prompt in timed_prompts:
            harness.show_progress(f"{name}: {len(prompt)} tokens")
            seconds.setdefault(name, []).append(read(prompt))

    measure("generate of transformers", time_stock, prompts[:1])
    measure("kvant.generate", partial(time_generate, prefixes=None), prompts[:1])
    measure("kvant.generate, first with prefixes", time_generate, prompts[:1])
    steps.clear()
    measure("kvant.generate, hit", time_generate, prompts[1:half])
    stats = prefixes.stats()
    prefixes.flush()
    for prompt in prompts[1:half]:
        with Prefixes(None, store=store) as restarted:
            measure(
                "kvant.generate, restarted", partial(time_generate, prefixes=restarted), [prompt]
            )
    with Engine(model, SilentTokenizer(), spec, pack=False, prefixes=prefixes) as engine:

        def time_first_token(prompt: list[int]) -> float:
            begin = time.perf_counter()
            stream = engine.submit(prompt, max_new_tokens=1, ignore_end=True)
            next(stream)
            stream.result()
            return time.perf_counter() - begin

        time_first_token(prompts[half])  # warm-up
        measure("engine, hit", time_first_token, prompts[half + 1 :])
    return seconds, steps, stats


def main(
    shared: Annotated[int, typer.Option(min=64, help="Tokens that all prompts share")] = 8192,
    own: Annotated[int, typer.Option(min=1, help="Further tokens of each prompt")] = 16,
    kv_cache: harness.KVCache = "affine8",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts that hit")] = 5,
    shape: Shape = "0.6b",
    layers: harness.Layers = None,
    store: harness.Store = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Time the first token of prompts with and without a cached prefix."""
    model, facts = open_model(shape, layers, threads)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    prefix = torch.randint(vocab_size, (shared,), generator=generator).tolist()
    suffixes = torch.randint(vocab_size, (2 * repeats + 2, own), generator=generator).tolist()
    with TemporaryDirectory(prefix="kvant-") as folder:
        prompts = [prefix + suffix for suffix in suffixes]
        seconds, steps, stats = measure_prefixes(model, prompts, kv_cache, store or folder)
    step = statistics.median(steps)
    rows = [
        {
            "way": name,
            "prompts": len(times),
            "median_ms": 1e3 * statistics.median(times),
            "steps": statistics.median(times) / step,
        }
        for name, times in seconds.items()
    ]
    facts |= {
        "shared": shared,
        "own": own,
        "cache": kv_cache,
        "step_ms": 1e3 * step,
        "tokens_hit": stats["tokens_hit"] // repeats,
    }
    harness.print_report("prefixes", rows, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
