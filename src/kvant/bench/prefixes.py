"""How soon the first token comes of a prompt that begins as another one did.

A model of a known shape with random weights reads prompts of random tokens, of which all but the
last few are the same: stock `generate` and `kvant.generate` without prefixes read all of it,
`kvant.generate` and the engine with prefixes what is new. Those that were restarted have nothing in
memory, and all of it in a store. `steps` counts decode steps of `kvant.generate` at that length,
measured behind the same prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from kvant.bench.cache_race import MODEL_SHAPES, open_model
from kvant.bench.device import CPU
from kvant.bench.engine import SilentTokenizer
from kvant.bench.report import Json, print_report, run, show_progress
from kvant.engine import Engine
from kvant.generation import generate
from kvant.prefixes import Prefixes

DECODE_STEPS = 8  # decode steps behind each prompt


def measure_prefixes(
    model: Any, prompts: list[list[int]], spec: str, store: str
) -> tuple[dict[str, list[float]], list[float], dict[str, Any]]:
    """Seconds to the first token by the way, of decode steps, and what prefixes tell of hits."""
    steps: list[float] = []
    found: dict[str, list[float]] = {}
    prefixes, half = Prefixes(None, store=store), len(prompts) // 2
    options: Any = {"kv_cache": spec, "max_new_tokens": DECODE_STEPS, "ignore_end": True}

    def stock(prompt: list[int]) -> float:
        begin = time.perf_counter()
        model.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False, pad_token_id=0)
        return time.perf_counter() - begin

    def ours(prompt: list[int], prefixes: Prefixes | None = prefixes) -> float:
        times = [time.perf_counter()]
        for _ in generate(model, SilentTokenizer(), prompt, prefixes=prefixes, **options):
            times.append(time.perf_counter())
        steps.extend(b - a for a, b in pairwise(times[1:]))
        return times[1] - times[0]

    def measure(name: str, read: Callable[[list[int]], float], some: list[list[int]]) -> None:
        for prompt in some:
            show_progress(f"{name}: {len(prompt)} tokens")
            found.setdefault(name, []).append(read(prompt))

    measure("generate of transformers", stock, prompts[:1])
    measure("kvant.generate", partial(ours, prefixes=None), prompts[:1])
    measure("kvant.generate, first with prefixes", ours, prompts[:1])
    steps.clear()
    measure("kvant.generate, hit", ours, prompts[1:half])
    told = prefixes.stats()
    prefixes.flush()
    for prompt in prompts[1:half]:
        with Prefixes(None, store=store) as restarted:
            measure("kvant.generate, restarted", partial(ours, prefixes=restarted), [prompt])
    with Engine(model, SilentTokenizer(), spec, pack=False, prefixes=prefixes) as engine:

        def time_first_token(prompt: list[int]) -> float:
            begin = time.perf_counter()
            stream = engine.submit(prompt, max_new_tokens=1, ignore_end=True)
            next(stream)
            stream.result()
            return time.perf_counter() - begin

        time_first_token(prompts[half])  # what an engine does once
        measure("engine, hit", time_first_token, prompts[half + 1 :])
    return found, steps, told


def main(
    shared: Annotated[int, typer.Option(min=64, help="tokens that prompts have in common")] = 8192,
    own: Annotated[int, typer.Option(min=1, help="tokens of each prompt behind them")] = 16,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    repeats: Annotated[int, typer.Option(min=1, help="prompts that hit")] = 5,
    shape: Annotated[str, typer.Option(help=", ".join(MODEL_SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    store: Annotated[str | None, typer.Option(help="of prefixes; a folder that is deleted")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """The time to the first token, of prompts that were read before and of others."""
    model, sizes = open_model(shape, layers, threads)
    generator = torch.Generator().manual_seed(0)
    vocabulary = sizes["vocab_size"]
    common = torch.randint(vocabulary, (shared,), generator=generator).tolist()
    ends = torch.randint(vocabulary, (2 * repeats + 2, own), generator=generator).tolist()
    with TemporaryDirectory(prefix="kvant-") as folder:
        prompts = [common + end for end in ends]
        found, steps, told = measure_prefixes(model, prompts, kv_cache, store or folder)
    show_progress("")
    step = statistics.median(steps)
    rows = [
        {
            "way": name,
            "prompts": len(seconds),
            "median_ms": 1e3 * statistics.median(seconds),
            "steps": statistics.median(seconds) / step,
        }
        for name, seconds in found.items()
    ]
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "shared": shared,
        "own": own,
        "cache": kv_cache,
        "step_ms": 1e3 * step,
        "tokens_hit": told["tokens_hit"] // repeats,
        "transformers": version("transformers"),
    }
    print_report("prefixes", rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
