"""Measure the throughput of many requests at once, for the engine and for transformers.

A model of a known shape with random weights continues prompts of random tokens. The methods are
stock `generate` one prompt after the other, stock `generate` of one padded batch, transformers'
continuous batching and `kvant.Engine`; for one sequence also `kvant.generate`. All methods run at
once and take one step each in turn, so that changes in the machine's speed affect all of them.

The time from one forward to the next is measured once all prompts are prefilled and all sequences
decode: model, attention, sampling and scheduling. Prompts are prefilled in large chunks, or the
first requests would end before the last ones begin. `tokens_s` counts the tokens of all sequences;
`times_generate` is relative to stock `generate` of one sequence, the median over the steps.
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
from kvant.bench.cache_race import SHAPE_HELP, open_model
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
UNLIMITED_SECONDS = 1e3  # for a chunk: all prompts are prefilled before the first request ends
WARMUP_TURNS = 2  # before the counted turns
CONTINUOUS_SEQUENCES = 8  # of continuous batching, and of the engine in comparison


class SilentTokenizer:
    """A tokenizer that costs no time: text is not measured."""

    chat_template = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "." * len(tokens)


@dataclass(frozen=True)
class ServingMethod:
    """A method to continue prompts."""

    name: str
    num_sequences: int
    run: Callable[[Any, list[list[int]]], object]
    needs_own_weights: bool = False  # whether it changes the weights


class SteppedMethod:
    """A method that pauses before each decode forward until its next turn."""

    def __init__(self, method: ServingMethod, model: Any, prompts: list[list[int]]) -> None:
        self.method = method
        self.seconds: list[float] = []  # from one decode forward to the next
        self.error: BaseException | None = None
        self.is_done = False
        self._step_start: float | None = None
        self._may_step, self._has_stopped = Semaphore(0), Semaphore(0)
        self._model = model
        self._hook = model.register_forward_pre_hook(self._pause, with_kwargs=True)
        self._thread = Thread(target=self._run, args=[prompts[: method.num_sequences]], daemon=True)

    def start(self) -> None:
        """Prefill the prompts, up to the first decode forward."""
        self._thread.start()
        self._has_stopped.acquire()

    def step(self) -> None:
        """Run to the next decode forward, or to the end."""
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
        """Pause before a decode forward, on the thread that runs it."""
        ids: Tensor = kwargs["input_ids"]
        if ids.numel() == self.method.num_sequences:
            if self._step_start is not None:
                self.seconds.append(time.perf_counter() - self._step_start)
            openmp.release_threads()  # idle threads would slow the other methods down
            self._has_stopped.release()
            self._may_step.acquire()
            self._step_start = time.perf_counter()


def copy_model(model: Any, *, own_weights: bool) -> Any:
    """Copy a model, so that another cache can be attached; share the weights if possible."""
    tensors = [] if own_weights else [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def list_methods(spec: str, tokens: int, sequences: int) -> list[ServingMethod]:
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None}

    def run_generate(model: Any, prompts: list[list[int]]) -> None:
        model.generate(torch.tensor(prompts), **options)

    def run_continuous(model: Any, prompts: list[list[int]]) -> None:
        config = GenerationConfig(**options | {"eos_token_id": -1})  # no end token
        model.generate_batch(prompts, generation_config=config, warmup=False)

    def run_engine(model: Any, prompts: list[list[int]], pack: bool = False) -> None:
        sizes: Any = {"max_sequences": len(prompts), "chunk_seconds": UNLIMITED_SECONDS}
        with Engine(model, SilentTokenizer(), spec, **sizes, pack=pack) as engine:
            streams = [
                engine.submit(prompt, max_new_tokens=tokens, ignore_end=True) for prompt in prompts
            ]
            for stream in streams:
                stream.result()

    def run_single(model: Any, prompts: list[list[int]]) -> None:
        settings: Any = {"max_new_tokens": tokens, "ignore_end": True, "kv_cache": spec}
        for _ in generate(model, SilentTokenizer(), prompts[0], **settings):
            pass

    num_continuous = min(CONTINUOUS_SEQUENCES, sequences)
    methods = [
        ServingMethod(STOCK_GENERATE, 1, run_generate),
        ServingMethod(f"kvant.generate {spec}", 1, run_single),
    ]
    counts = sorted({num_continuous, sequences})
    methods += [ServingMethod(f"engine {spec}", n, run_engine) for n in sorted({1, *counts})]
    run_packed = partial(run_engine, pack=True)
    methods += [ServingMethod(f"engine {spec} packed", n, run_packed, True) for n in counts]
    return [
        *methods,
        ServingMethod(CONTINUOUS_BATCHING, num_continuous, run_continuous),
        ServingMethod(PADDED_BATCH, sequences, run_generate),
    ]


def main(
    sequences: Annotated[int, typer.Option(min=2, help="Requests at once")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per request")] = 40,
    kv_cache: Annotated[str, typer.Option(help="Spec of the cache")] = "affine8",
    shape: Annotated[str, typer.Option(help=SHAPE_HELP)] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    json: Json = False,
) -> None:
    """Measure the throughput of many requests at once, against transformers."""
    if tokens < sequences + WARMUP_TURNS + 5:
        raise ValueError(
            f"--tokens {tokens}: {sequences + WARMUP_TURNS + 5} or more are needed, or the first "
            f"of {sequences} requests ends before the last one begins"
        )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model, sizes = open_model(shape, layers, threads)
    get_support(model)  # before hooks are registered, which the check would run
    generator = torch.Generator().manual_seed(0)
    vocab_size = sizes["vocab_size"]
    prompts = torch.randint(vocab_size, (sequences, context), generator=generator).tolist()
    stepped_methods = [
        SteppedMethod(m, copy_model(model, own_weights=m.needs_own_weights), prompts)
        for m in list_methods(kv_cache, tokens, sequences)
    ]
    for stepped in stepped_methods:
        show_progress(f"{stepped.method.name}, {stepped.method.num_sequences}: prefill")
        stepped.start()
    while not any(stepped.is_done for stepped in stepped_methods):
        show_progress(f"step {len(stepped_methods[0].seconds)}")
        for stepped in stepped_methods:
            stepped.step()
    num_steps = min(len(stepped.seconds) for stepped in stepped_methods)
    for stepped in stepped_methods:
        show_progress(f"{stepped.method.name}, {stepped.method.num_sequences}: finishing")
        while not stepped.is_done:
            stepped.step()
    show_progress("")
    steps = slice(WARMUP_TURNS, num_steps)
    stock = next(m.seconds for m in stepped_methods if m.method.name == STOCK_GENERATE)[steps]
    rows = []
    for stepped in stepped_methods:
        n, seconds = stepped.method.num_sequences, stepped.seconds[steps]
        ratios = [n * stock_s / own_s for stock_s, own_s in zip(stock, seconds, strict=True)]
        rows.append(
            {
                "way": stepped.method.name,
                "sequences": n,
                "median_ms": 1e3 * statistics.median(seconds),
                "tokens_s": n / statistics.median(seconds),
                "times_generate": statistics.median(ratios),
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
