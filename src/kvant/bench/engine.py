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
from kvant.bench.cache_race import MODEL_SHAPES, open_model
from kvant.bench.device import CPU
from kvant.bench.report import Json, print_report, run, show_progress
from kvant.engine import Engine
from kvant.generation import generate
from kvant.hf import get_support

STOCK_GENERATE, PADDED_BATCH, CONTINUOUS_BATCHING = (
    "generate",
    "padded batch",
    "continuous batching",
)
UNLIMITED_SECONDS = (
    1e3  # seconds that a chunk may take: else requests end while others are still read
)
WARMUP_TURNS = 2  # turns that do not count
CONTINUOUS_SEQUENCES = 8  # sequences of continuous batching, and of the engine beside it


class SilentTokenizer:
    """A tokenizer that costs nothing: what is measured is not text."""

    chat_template = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "." * len(tokens)


@dataclass(frozen=True)
class ServingMethod:
    """One way to continue prompts."""

    name: str
    num_sequences: int
    run: Callable[[Any, list[list[int]]], object]
    needs_own_weights: bool = False  # needs weights of its own


class SteppedMethod:
    """One way, which stops before each forward of a token of everybody until it is its turn."""

    def __init__(self, method: ServingMethod, model: Any, prompts: list[list[int]]) -> None:
        self.method = method
        self.seconds: list[float] = []  # from one of these forwards to the next
        self.error: BaseException | None = None
        self.is_done = False
        self._step_start: float | None = None
        self._may_step, self._has_stopped = Semaphore(0), Semaphore(0)
        self._model = model
        self._hook = model.register_forward_pre_hook(self._pause, with_kwargs=True)
        self._thread = Thread(target=self._run, args=[prompts[: method.num_sequences]], daemon=True)

    def start(self) -> None:
        """Read the prompts."""
        self._thread.start()
        self._has_stopped.acquire()

    def step(self) -> None:
        """A step, or what is left where there is no other."""
        self._may_step.release()
        self._has_stopped.acquire()
        if self.error is not None:
            raise self.error

    def _run(self, prompts: list[list[int]]) -> None:
        try:
            self.method.run(self._model, prompts)
        except BaseException as error:
            self.error = error
        self._hook.remove()
        self.is_done = True
        self._has_stopped.release()

    def _pause(self, module: Any, args: Any, kwargs: Any) -> None:
        """Called before a forward, in whatever thread runs it."""
        ids: Tensor = kwargs["input_ids"]
        if ids.numel() == self.method.num_sequences:
            if self._step_start is not None:
                self.seconds.append(time.perf_counter() - self._step_start)
            openmp.release_threads()  # of all ways, or each would slow the others down
            self._has_stopped.release()
            self._may_step.acquire()
            self._step_start = time.perf_counter()


def copy_model(model: Any, *, own_weights: bool) -> Any:
    """The same model, to which something else may be attached; with the same weights if it may."""
    tensors = [] if own_weights else [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def list_methods(spec: str, tokens: int, sequences: int) -> list[ServingMethod]:
    given: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    given |= {"eos_token_id": None}

    def stock(model: Any, prompts: list[list[int]]) -> None:
        model.generate(torch.tensor(prompts), **given)

    def continuous(model: Any, prompts: list[list[int]]) -> None:
        asked = GenerationConfig(**given | {"eos_token_id": -1})  # never
        model.generate_batch(prompts, generation_config=asked, warmup=False)

    def engine(model: Any, prompts: list[list[int]], pack: bool = False) -> None:
        sizes: Any = {"max_sequences": len(prompts), "chunk_seconds": UNLIMITED_SECONDS}
        with Engine(model, SilentTokenizer(), spec, **sizes, pack=pack) as serving:
            streams = [
                serving.submit(prompt, max_new_tokens=tokens, ignore_end=True) for prompt in prompts
            ]
            for stream in streams:
                stream.result()

    def alone(model: Any, prompts: list[list[int]]) -> None:
        options: Any = {"max_new_tokens": tokens, "ignore_end": True, "kv_cache": spec}
        for _ in generate(model, SilentTokenizer(), prompts[0], **options):
            pass

    few = min(CONTINUOUS_SEQUENCES, sequences)
    found = [
        ServingMethod(STOCK_GENERATE, 1, stock),
        ServingMethod(f"kvant.generate {spec}", 1, alone),
    ]
    found += [ServingMethod(f"engine {spec}", n, engine) for n in sorted({1, few, sequences})]
    packed = partial(engine, pack=True)
    found += [
        ServingMethod(f"engine {spec} packed", n, packed, True) for n in sorted({few, sequences})
    ]
    return [
        *found,
        ServingMethod(CONTINUOUS_BATCHING, few, continuous),
        ServingMethod(PADDED_BATCH, sequences, stock),
    ]


def main(
    sequences: Annotated[int, typer.Option(min=2, help="requests at once")] = 16,
    context: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 512,
    tokens: Annotated[int, typer.Option(help="new ones of each request")] = 40,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    shape: Annotated[str, typer.Option(help=", ".join(MODEL_SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """What serving many requests at once gives, beside what transformers does with them."""
    if tokens < sequences + WARMUP_TURNS + 5:
        raise ValueError(
            f"--tokens {tokens}: {sequences + WARMUP_TURNS + 5} or more, or the first of "
            f"{sequences} "
            "requests ends before the last one begins"
        )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model, sizes = open_model(shape, layers, threads)
    get_support(model)  # the check would else meet the hooks that let the ways take turns
    generator = torch.Generator().manual_seed(0)
    vocabulary = sizes["vocab_size"]
    prompts = torch.randint(vocabulary, (sequences, context), generator=generator).tolist()
    turns = [
        SteppedMethod(way, copy_model(model, own_weights=way.needs_own_weights), prompts)
        for way in list_methods(kv_cache, tokens, sequences)
    ]
    for one in turns:
        show_progress(f"{one.method.name}, {one.method.num_sequences}: reading prompts")
        one.start()
    while not any(one.is_done for one in turns):
        show_progress(f"step {len(turns[0].seconds)}")
        for one in turns:
            one.step()
    whole = min(len(one.seconds) for one in turns)
    for one in turns:
        show_progress(f"{one.method.name}, {one.method.num_sequences}: ending")
        while not one.is_done:
            one.step()
    show_progress("")
    stock = next(one.seconds for one in turns if one.method.name == STOCK_GENERATE)[
        WARMUP_TURNS:whole
    ]
    rows = []
    for one in turns:
        n, seconds = one.method.num_sequences, one.seconds[WARMUP_TURNS:whole]
        times = [n * theirs / ours for theirs, ours in zip(stock, seconds, strict=True)]
        rows.append(
            {
                "way": one.method.name,
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
    print_report("engine", rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
