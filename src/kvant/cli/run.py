"""`kvant run`: continue a prompt, and show the text as it comes."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from typer import Option

from kvant.cli.models import load
from kvant.sizes import format_size

PROMPT = "import os\n\ndef "  # for the model inside, which knows Python


def run(
    model: Annotated[str | None, Option(help="A folder or a name on the hub.")] = None,
    prompt: Annotated[str | None, Option(help="The text to continue; - reads it.")] = None,
    file: Annotated[Path | None, Option(help="Read the prompt from a file.")] = None,
    kv_cache: Annotated[str, Option(help="How the cache is stored: affine4, raw, ...")] = "raw",
    max_new_tokens: Annotated[int, Option(min=1)] = 128,
    temperature: Annotated[float, Option(min=0.0)] = 0.0,
    top_p: Annotated[float | None, Option()] = None,
    top_k: Annotated[int | None, Option(min=1)] = None,
    min_p: Annotated[float | None, Option()] = None,
    seed: Annotated[int | None, Option()] = None,
    max_context: Annotated[int | None, Option(min=2)] = None,
    stats: Annotated[bool, Option(help="Say what it took.")] = False,
    json: Annotated[bool, Option(help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Continue a prompt with a model, on a cache of any format."""
    text = _prompt(prompt, file)
    loaded, tokenizer = load(model)
    from kvant.generation import generate
    from kvant.hf import attach, cache_for

    attach(loaded, kv_cache)
    memory = cache_for(loaded, kv_cache)
    with _Reading(quiet=json or not sys.stderr.isatty()) as reading:
        steps = generate(
            loaded,
            tokenizer,
            text,
            kv_cache=memory,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            max_context=max_context,
            progress=reading.show,
        )
        said = _shown(steps, text, quiet=json, reading=reading)
    figures = said.figures() | {"kv_cache": kv_cache, "cache": memory.stats()}
    if json:
        print(json_text.dumps({"prompt": text, "text": said.text} | figures))
    elif stats:
        print(_line(figures), file=sys.stderr)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("--prompt and --file both name a prompt: give one of them")
    if file is not None:
        try:
            text = file.read_text()
        except OSError as error:
            raise ValueError(f"--file {file} cannot be read: {error.strerror}") from error
    elif prompt == "-":
        text = sys.stdin.read()
    else:
        text = PROMPT if prompt is None else prompt
    if not text:
        raise ValueError(
            "the prompt is empty: give --prompt TEXT, --file F, or --prompt - to read it"
        )
    return text


class _Reading:
    """The progress of a prompt, on a terminal; it is gone when the first token comes."""

    def __init__(self, quiet: bool) -> None:
        columns = (TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
        self._task = self._bar.add_task("prompt")

    def __enter__(self) -> _Reading:
        self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


@dataclass
class _Said:
    """What was generated, and when."""

    text: str
    tokens: int
    first: float  # seconds to the first token
    rest: float  # seconds for the others
    finish_reason: str | None

    def figures(self) -> dict[str, Any]:
        speed = (self.tokens - 1) / self.rest if self.rest > 0 and self.tokens > 1 else None
        return {
            "tokens": self.tokens,
            "seconds_to_first": self.first,
            "tokens_a_second": speed,
            "finish_reason": self.finish_reason,
        }


def _shown(steps: Iterator[Any], prompt: str, quiet: bool, reading: _Reading) -> _Said:
    """Print text as it comes, behind the prompt."""
    begin = time.perf_counter()
    said = _Said("", 0, 0.0, 0.0, None)
    for step in steps:
        now = time.perf_counter() - begin
        if said.tokens == 0:
            said.first = now
            reading.stop()
            if not quiet:
                print(prompt, end="")
        said.text, said.tokens, said.rest = said.text + step.text, said.tokens + 1, now - said.first
        said.finish_reason = step.finish_reason
        if not quiet:
            print(step.text, end="", flush=True)
    if not quiet:
        print()
    return said


def _line(figures: dict[str, Any]) -> str:
    cache, speed = figures["cache"], figures["tokens_a_second"]
    told = "" if speed is None else f", {speed:.1f} a second"
    return (
        f"{figures['tokens']} tokens{told}, the first after {figures['seconds_to_first']:.2f} s; "
        f"{figures['kv_cache']}: {cache['length']} tokens held in {format_size(cache['nbytes'])}"
    )
