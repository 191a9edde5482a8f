"""Measure requests of several LoRA adapters at once: `python tools/adapter_speed.py`.

Twelve requests decode at the same time: all of the model alone, all of one adapter, or four of the
model and four of each of two adapters, which take turns. The adapters are random matrices of rank 8
on the queries and values of every layer. Prompts are cached before, so the speeds are those of
decoding. The cases take turns; a ratio is the median over the rounds.
"""

from __future__ import annotations

import json as json_format
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

import kvant
from kvant.bench import harness
from kvant.checkpoints import load
from kvant.engine import Engine

NUM_REQUESTS, RANK = 12, 8
TARGETS = ("q_proj", "v_proj")
CASES: dict[str, list[str | None]] = {  # adapters of the requests
    "the model alone": [None],
    "one adapter": ["first"],
    "three groups": [None, "first", "second"],
}


def save_random_adapter(model: Any, folder: Path, seed: int) -> Path:
    """Write an adapter in PEFT's format."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            for part, shape in (
                ("A", (RANK, module.in_features)),
                ("B", (module.out_features, RANK)),
            ):
                matrix = 0.02 * torch.randn(shape, generator=generator)
                weights[f"base_model.model.{name}.lora_{part}.weight"] = matrix
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*TARGETS]}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json_format.dumps(settings))
    return folder


def time_requests(engine: Engine, adapters: list[str | None], num_tokens: int) -> float:
    """Return the seconds of all requests, whose adapters take turns."""
    begin = time.perf_counter()
    streams = [
        engine.submit(
            f"def function_{index}(",
            max_new_tokens=num_tokens,
            ignore_end=True,
            adapter=adapters[index % len(adapters)],
        )
        for index in range(NUM_REQUESTS)
    ]
    for stream in streams:
        stream.result()
    return time.perf_counter() - begin


def main(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case")] = 7,
    kv_cache: harness.KVCache = "affine8",
    model: harness.Model = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure requests of several LoRA adapters at once."""
    harness.set_threads(threads)
    loaded, tokenizer = load(model, weights="raw")
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    with TemporaryDirectory(prefix="kvant-") as folder:
        adapters = {
            name: save_random_adapter(loaded, Path(folder) / name, seed)
            for seed, name in enumerate(("first", "second"))
        }
        with Engine(
            loaded, tokenizer, kv_cache, adapters=adapters, prefixes=kvant.Prefixes()
        ) as engine:
            for _ in range(2):  # caches the prompts, and captures forwards
                for group in CASES.values():
                    time_requests(engine, group, tokens)
            for _ in range(rounds):
                for name, group in CASES.items():
                    seconds[name].append(time_requests(engine, group, tokens))
    alone = seconds["the model alone"]
    rows = [
        {
            "requests": name,
            "tokens_s": NUM_REQUESTS * tokens / statistics.median(times),
            "ratio": statistics.median(a / b for a, b in zip(alone, times, strict=True)),
        }
        for name, times in seconds.items()
    ]
    facts = {"model": model or "the model inside", "cache": kv_cache, "rank": RANK}
    harness.print_report("adapters", rows, facts | {"tokens": tokens}, quiet=json)


if __name__ == "__main__":
    harness.run(main)
