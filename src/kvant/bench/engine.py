"""What serving many requests at once gives, beside what transformers does with them.

A model of a known shape with random weights continues prompts of random tokens: stock `generate`
one prompt after the other, stock `generate` of all in one padded batch, transformers' continuous
batching, and `kvant.Engine`; one alone by `kvant.generate` and by the engine. All run at once and
take a step in turn, so that a machine whose speed changes changes it for all of them. What is timed
is the way from one forward to the next, once all prompts are read and everybody decodes: model,
attention, sampling and schedule. Prompts are read in large pieces, or the first requests would end
before the last ones begin. `tokens_s` counts the tokens of all sequences; `times_generate` is that
over stock `generate` of one after the other, the median over the turns.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from threading import Semaphore, Thread
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import GenerationConfig

from kvant import openmp
from kvant.bench.cache_race import SHAPES, opened
from kvant.bench.device import CPU
from kvant.bench.report import Json, progress, run, show
from kvant.engine import Engine
from kvant.generation import generate
from kvant.hf import support_of

STOCK, PADDED, CONTINUOUS = "generate", "padded batch", "continuous batching"
WHOLE = 1e3  # seconds that a chunk may take: else requests end while others are still read
WARM = 2  # turns that do not count
FEW = 8  # sequences of continuous batching, and of the engine beside it


class Silent:
    """A tokenizer that costs nothing: what is measured is not text."""

    chat_template = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "." * len(tokens)


@dataclass(frozen=True)
class Way:
    """One way to continue prompts."""

    name: str
    sequences: int
    go: Callable[[Any, list[list[int]]], object]
    packs: bool = False  # needs weights of its own


class Turns:
    """One way, which stops before each forward of a token of everybody until it is its turn."""

    def __init__(self, way: Way, model: Any, prompts: list[list[int]]) -> None:
        self.way = way
        self.seconds: list[float] = []  # from one of these forwards to the next
        self.error: BaseException | None = None
        self.over = False
        self._begin: float | None = None
        self._ours, self._theirs = Semaphore(0), Semaphore(0)
        self._model = model
        self._hook = model.register_forward_pre_hook(self._stop, with_kwargs=True)
        self._thread = Thread(target=self._go, args=[prompts[: way.sequences]], daemon=True)

    def begin(self) -> None:
        """Read the prompts."""
        self._thread.start()
        self._theirs.acquire()

    def take(self) -> None:
        """A step, or what is left where there is no other."""
        self._ours.release()
        self._theirs.acquire()
        if self.error is not None:
            raise self.error

    def _go(self, prompts: list[list[int]]) -> None:
        try:
            self.way.go(self._model, prompts)
        except BaseException as error:
            self.error = error
        self._hook.remove()
        self.over = True
        self._theirs.release()

    def _stop(self, module: Any, args: Any, kwargs: Any) -> None:
        """Called before a forward, in whatever thread runs it."""
        ids: Tensor = kwargs["input_ids"]
        if ids.numel() == self.way.sequences:
            if self._begin is not None:
                self.seconds.append(time.perf_counter() - self._begin)
            openmp.release()  # of all ways, or each would slow the others down
            self._theirs.release()
            self._ours.acquire()
            self._begin = time.perf_counter()


def again(model: Any, *, packs: bool) -> Any:
    """The same model, to which something else may be attached; with the same weights if it may."""
    tensors = [] if packs else [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def ways(spec: str, tokens: int, sequences: int) -> list[Way]:
    given: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    given |= {"eos_token_id": None}

    def stock(model: Any, prompts: list[list[int]]) -> None:
        model.generate(torch.tensor(prompts), **given)

    def continuous(model: Any, prompts: list[list[int]]) -> None:
        asked = GenerationConfig(**given | {"eos_token_id": -1})  # never
        model.generate_batch(prompts, generation_config=asked, warmup=False)

    def engine(model: Any, prompts: list[list[int]], pack: bool = False) -> None:
        sizes: Any = {"max_sequences": len(prompts), "chunk_seconds": WHOLE}
        with Engine(model, Silent(), spec, **sizes, pack=pack) as serving:
            streams = [
                serving.submit(prompt, max_new_tokens=tokens, ignore_end=True) for prompt in prompts
            ]
            for stream in streams:
                stream.result()

    def alone(model: Any, prompts: list[list[int]]) -> None:
        options: Any = {"max_new_tokens": tokens, "ignore_end": True, "kv_cache": spec}
        for _ in generate(model, Silent(), prompts[0], **options):
            pass

    few = min(FEW, sequences)
    found = [Way(STOCK, 1, stock), Way(f"kvant.generate {spec}", 1, alone)]
    found += [Way(f"engine {spec}", n, engine) for n in sorted({1, few, sequences})]
    packed = partial(engine, pack=True)
    found += [Way(f"engine {spec} packed", n, packed, True) for n in sorted({few, sequences})]
    return [*found, Way(CONTINUOUS, few, continuous), Way(PADDED, sequences, stock)]


def main(
    sequences: Annotated[int, typer.Option(min=2, help="requests at once")] = 16,
    context: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 512,
    tokens: Annotated[int, typer.Option(help="new ones of each request")] = 40,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """What serving many requests at once gives, beside what transformers does with them."""
    if tokens < sequences + WARM + 5:
        raise ValueError(
            f"--tokens {tokens}: {sequences + WARM + 5} or more, or the first of {sequences} "
            "requests ends before the last one begins"
        )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model, sizes = opened(shape, layers, threads)
    support_of(model)  # the check would else meet the hooks that let the ways take turns
    generator = torch.Generator().manual_seed(0)
    vocabulary = sizes["vocab_size"]
    prompts = torch.randint(vocabulary, (sequences, context), generator=generator).tolist()
    turns = [
        Turns(way, again(model, packs=way.packs), prompts)
        for way in ways(kv_cache, tokens, sequences)
    ]
    for one in turns:
        progress(f"{one.way.name}, {one.way.sequences}: reading prompts")
        one.begin()
    while not any(one.over for one in turns):
        progress(f"step {len(turns[0].seconds)}")
        for one in turns:
            one.take()
    whole = min(len(one.seconds) for one in turns)
    for one in turns:
        progress(f"{one.way.name}, {one.way.sequences}: ending")
        while not one.over:
            one.take()
    progress("")
    stock = next(one.seconds for one in turns if one.way.name == STOCK)[WARM:whole]
    rows = []
    for one in turns:
        n, seconds = one.way.sequences, one.seconds[WARM:whole]
        times = [n * theirs / ours for theirs, ours in zip(stock, seconds, strict=True)]
        rows.append(
            {
                "way": one.way.name,
                "sequences": n,
                "median_ms": 1e3 * statistics.median(seconds),
                "tokens_s": n / statistics.median(seconds),
                "times_generate": statistics.median(times),
            }
        )
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "context": context,
        "steps": len(stock),
        "transformers": version("transformers"),
    }
    show("engine", rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
