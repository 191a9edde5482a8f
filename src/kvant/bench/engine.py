"""What serving many requests at once gives, beside what transformers does with them.

A model of a known shape with random weights continues prompts of random tokens: stock `generate`
one prompt after the other, stock `generate` of all in one padded batch, transformers' continuous
batching, and `kvant.Engine`; one alone by `kvant.generate` and by the engine. All run in turn,
several rounds. What is timed is the way from one forward to the next, once all prompts are read and
everybody decodes: model, attention, sampling and schedule. Prompts are read in large pieces, or the
first requests would end before the last ones begin. `tokens_s` counts the tokens of all
sequences; `times_generate` is that over stock `generate` of one after the other.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import GenerationConfig

from kvant.bench.cache_race import SHAPES, Task, build
from kvant.bench.device import CPU
from kvant.bench.report import Json, progress, run, show
from kvant.engine import Engine
from kvant.generation import generate

STOCK, PADDED, CONTINUOUS = "generate", "padded batch", "continuous batching"
WHOLE = 1e3  # seconds that a chunk may take: else requests end while others are still read
FEW = 8  # sequences of continuous batching, and of the engine beside it


class Silent:
    """A tokenizer that costs nothing: what is measured is not text."""

    chat_template = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "." * len(tokens)


@dataclass
class Watch:
    """When forwards of so many tokens began."""

    rows: int
    begins: list[tuple[bool, float]] = field(default_factory=list)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        ids: Tensor = kwargs["input_ids"]
        everybody = ids.numel() == self.rows
        self.begins.append((everybody, time.perf_counter()))

    @property
    def steps(self) -> list[float]:
        """Seconds from one forward of everybody to the next; the first two are warming up."""
        pairs = zip(self.begins[:-1], self.begins[1:], strict=True)
        return [b - a for (one, a), (other, b) in pairs if one and other][2:]


@dataclass(frozen=True)
class Way:
    """One way to continue prompts."""

    name: str
    sequences: int
    go: Callable[[list[list[int]]], object]


def ways(model: Any, spec: str, tokens: int, sequences: int) -> list[Way]:
    given: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    given |= {"eos_token_id": None}

    def stock(prompts: list[list[int]]) -> None:
        model.generate(torch.tensor(prompts), **given)

    def continuous(prompts: list[list[int]]) -> None:
        asked = GenerationConfig(**given | {"eos_token_id": -1})  # never
        model.generate_batch(prompts, generation_config=asked, warmup=False)

    def engine(prompts: list[list[int]], pack: bool = False) -> None:
        sizes: Any = {"max_sequences": len(prompts), "chunk_seconds": WHOLE}
        with Engine(model, Silent(), spec, **sizes, pack=pack) as serving:
            streams = [
                serving.submit(prompt, max_new_tokens=tokens, ignore_end=True) for prompt in prompts
            ]
            for stream in streams:
                stream.result()

    def alone(prompts: list[list[int]]) -> None:
        options: Any = {"max_new_tokens": tokens, "ignore_end": True, "kv_cache": spec}
        for _ in generate(model, Silent(), prompts[0], **options):
            pass

    few = min(FEW, sequences)
    found = [Way(STOCK, 1, stock), Way(f"kvant.generate {spec}", 1, alone)]
    found += [Way(f"engine {spec}", n, engine) for n in sorted({1, few, sequences})]
    found.append(Way(f"engine {spec} packed", sequences, partial(engine, pack=True)))
    return [*found, Way(CONTINUOUS, few, continuous), Way(PADDED, sequences, stock)]


def main(
    sequences: Annotated[int, typer.Option(min=2, help="requests at once")] = 16,
    context: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 512,
    tokens: Annotated[int, typer.Option(help="new ones of each request")] = 32,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    rounds: Annotated[int, typer.Option(min=1, help="of all ways in turn")] = 3,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """What serving many requests at once gives, beside what transformers does with them."""
    if tokens < sequences + 8:
        raise ValueError(
            f"--tokens {tokens}: {sequences + 8} or more, or the first of {sequences} requests "
            "ends before the last one begins"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    task = Task(layers, rounds, shape)
    progress("building the model")
    model = build(task.sizes)
    generator = torch.Generator().manual_seed(0)
    vocabulary = task.sizes["vocab_size"]
    prompts = torch.randint(vocabulary, (sequences, context), generator=generator).tolist()
    steps: dict[Way, list[float]] = {way: [] for way in ways(model, kv_cache, tokens, sequences)}
    for turn in range(rounds):
        for way, seconds in steps.items():
            progress(f"round {turn + 1} of {rounds}: {way.name}, {way.sequences}")
            watch = Watch(way.sequences)
            hook = model.register_forward_pre_hook(watch, with_kwargs=True)
            try:
                way.go(prompts[: way.sequences])
            finally:
                hook.remove()
            seconds += watch.steps
    progress("")
    stock = next(statistics.median(s) for way, s in steps.items() if way.name == STOCK)
    rows = [
        {
            "way": way.name,
            "sequences": way.sequences,
            "steps": len(seconds),
            "median_ms": 1e3 * statistics.median(seconds),
            "tokens_s": way.sequences / statistics.median(seconds),
            "times_generate": way.sequences * stock / statistics.median(seconds),
        }
        for way, seconds in steps.items()
    ]
    facts = {
        "model": f"{shape}, random",
        "layers": task.sizes["num_hidden_layers"],
        "context": context,
        "transformers": version("transformers"),
    }
    show("engine", rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
