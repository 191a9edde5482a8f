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
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from threading import Semaphore, Thread
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvant.bench import harness
from kvant.bench.cache_race import Shape, open_model
from kvant.engine import Engine
from kvant.generation import generate
from kvant.hf import get_support
from kvant.platform import c_libraries

Prompts = list[list[int]]
UNLIMITED_SECONDS = 1e3  # for a chunk: all prompts are prefilled before the first request ends
WARMUP_TURNS = 2  # before the counted turns
CONTINUOUS_SEQUENCES = 8  # of continuous batching, and of the engine in comparison


class SilentTokenizer:
    """A tokenizer that costs no time: text is not measured."""

    chat_template = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "." * len(tokens)


def continue_prompts(engine: Engine, prompts: Prompts, tokens: int) -> list[list[int]]:
    """Return the `tokens` tokens that an engine generates for each prompt."""
    streams = [engine.submit(p, max_new_tokens=tokens, ignore_end=True) for p in prompts]
    return [list(stream.result().tokens) for stream in streams]


class SteppedMethod:
    """A method to continue prompts that pauses before each decode forward until its next turn."""

    def __init__(
        self, name: str, run: Callable[[Any, Prompts], object], model: Any, prompts: Prompts
    ) -> None:
        self.name, self.num_sequences = name, len(prompts)
        self.seconds: list[float] = []  # from one decode forward to the next
        self.error: BaseException | None = None
        self.is_done = False
        self._step_start: float | None = None
        self._may_step, self._has_stopped = Semaphore(0), Semaphore(0)
        self._model, self._run_method = model, run
        self._hook = model.register_forward_pre_hook(self._pause, with_kwargs=True)
        self._thread = Thread(target=self._run, args=[prompts], daemon=True)

    def __str__(self) -> str:
        return f"{self.name}, {self.num_sequences}"

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

    def _run(self, prompts: Prompts) -> None:
        try:
            self._run_method(self._model, prompts)
        except BaseException as error:
            self.error = error
        self._hook.remove()
        self.is_done = True
        self._has_stopped.release()

    def _pause(self, module: Any, args: Any, kwargs: Any) -> None:
        """Pause before a decode forward, on the thread that runs it."""
        ids: Tensor = kwargs["input_ids"]
        if ids.numel() == self.num_sequences:
            if self._step_start is not None:
                self.seconds.append(time.perf_counter() - self._step_start)
            c_libraries.release_threads()  # idle threads would slow the other methods down
            self._has_stopped.release()
            self._may_step.acquire()
            self._step_start = time.perf_counter()


def copy_model(model: Any, *, own_weights: bool) -> Any:
    """Copy a model, so that another cache can be attached; share the weights if possible."""
    tensors = [] if own_weights else [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def make_methods(model: Any, prompts: Prompts, spec: str, tokens: int) -> list[SteppedMethod]:
    """Make every method for the numbers of prompts that it can continue."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None}

    def run_generate(model: Any, prompts: Prompts) -> None:
        model.generate(torch.tensor(prompts), **options)

    def run_continuous(model: Any, prompts: Prompts) -> None:
        config = GenerationConfig(**options | {"eos_token_id": -1})  # no end token
        memory = ContinuousBatchingConfig()  # else it takes most of the machine's memory
        pages = len(prompts) * math.ceil((len(prompts[0]) + tokens) / memory.page_size)
        memory.num_blocks = 2 * pages
        settings: Any = {"generation_config": config, "continuous_batching_config": memory}
        model.generate_batch(prompts, **settings, warmup=False)

    def run_engine(model: Any, prompts: Prompts, pack: bool = False) -> None:
        sizes: Any = {"max_sequences": len(prompts), "chunk_seconds": UNLIMITED_SECONDS}
        with Engine(model, SilentTokenizer(), spec, **sizes, pack=pack) as engine:
            continue_prompts(engine, prompts, tokens)

    def run_single(model: Any, prompts: Prompts) -> None:
        settings: Any = {"max_new_tokens": tokens, "ignore_end": True, "kv_cache": spec}
        for _ in generate(model, SilentTokenizer(), prompts[0], **settings):
            pass

    def make(
        name: str, count: int, run: Callable[[Any, Prompts], object], *, packs: bool = False
    ) -> SteppedMethod:
        return SteppedMethod(name, run, copy_model(model, own_weights=packs), prompts[:count])

    some = min(CONTINUOUS_SEQUENCES, len(prompts))
    counts = sorted({some, len(prompts)})
    run_packed = partial(run_engine, pack=True)
    return [
        make("generate", 1, run_generate),  # the first: others are relative to it
        make(f"kvant.generate {spec}", 1, run_single),
        *(make(f"engine {spec}", n, run_engine) for n in sorted({1, *counts})),
        *(make(f"engine {spec} packed", n, run_packed, packs=True) for n in counts),
        make("continuous batching", some, run_continuous),
        make("padded batch", len(prompts), run_generate),
    ]


def run_in_turn(methods: list[SteppedMethod]) -> list[list[float]]:
    """Run all methods a step each in turn; return the seconds of the counted steps of each."""
    for method in methods:
        harness.show_progress(f"{method}: prefill")
        method.start()
    while not any(method.is_done for method in methods):
        harness.show_progress(f"step {len(methods[0].seconds)}")
        for method in methods:
            method.step()
    num_steps = min(len(method.seconds) for method in methods)
    for method in methods:
        harness.show_progress(f"{method}: finishing")
        while not method.is_done:
            method.step()
    return [method.seconds[WARMUP_TURNS:num_steps] for method in methods]


def main(
    sequences: Annotated[int, typer.Option(min=2, help="Requests at once")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per request")] = 40,
    kv_cache: harness.KVCache = "affine8",
    shape: Shape = "0.6b",
    layers: harness.Layers = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure the throughput of many requests at once, against transformers."""
    if tokens < sequences + WARMUP_TURNS + 5:
        raise ValueError(
            f"--tokens {tokens}: {sequences + WARMUP_TURNS + 5} or more are needed, or the first "
            f"of {sequences} requests ends before the last one begins"
        )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model, facts = open_model(shape, layers, threads)
    get_support(model)  # before hooks are registered, which the check would run
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    prompts = torch.randint(vocab_size, (sequences, context), generator=generator).tolist()
    methods = make_methods(model, prompts, kv_cache, tokens)
    seconds_by_method = run_in_turn(methods)
    stock = seconds_by_method[0]
    rows = []
    for method, seconds in zip(methods, seconds_by_method, strict=True):
        n, median = method.num_sequences, statistics.median(seconds)
        ratios = [n * stock_s / own_s for stock_s, own_s in zip(stock, seconds, strict=True)]
        rows.append(
            {
                "way": method.name,
                "sequences": n,
                "median_ms": 1e3 * median,
                "tokens_s": n / median,
                "times_generate": statistics.median(ratios),
            }
        )
    harness.print_report(
        "engine", rows, facts | {"context": context, "steps": len(stock)}, quiet=json
    )


if __name__ == "__main__":
    harness.run(main)
