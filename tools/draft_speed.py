"""Measure what n-gram drafts gain in the engine: `python tools/draft_speed.py --model smollm2`.

Clients decode at the same time, in an engine with drafts and in one without, by turns. `edited` is
code that a client repeats with one word changed. `new` is text sampled at temperature 1, which
repeats little. The seeds are equal, so both engines generate the same tokens, up to rounding.
Prompts are cached before, so the speeds are those of decoding. A ratio is the median over the
rounds.
"""

from __future__ import annotations

import ast
import inspect
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import kvant
from kvant.bench import harness
from kvant.checkpoints import load
from kvant.engine import Engine

OLD_WORD, NEW_WORD = "return", "yield"
EDITED, NEW = "edited", "new"


@dataclass(frozen=True)
class Workload:
    """The prompts of the clients, and how their replies are sampled."""

    name: str
    prompts: Sequence[str]
    temperature: float


def make_workloads(num_clients: int) -> list[Workload]:
    """Return the prompts of each client: a function to be repeated, or the start of one."""
    sources = list_sources(num_clients)
    edited = [
        f"# Before:\n{source}\n# After, with `{OLD_WORD}` replaced by `{NEW_WORD}`:\n"
        + source.replace(OLD_WORD, NEW_WORD)[: len(source) // 4]
        for source in sources
    ]
    return [
        Workload(EDITED, edited, temperature=0.0),
        Workload(NEW, [source[: len(source) // 4] for source in sources], temperature=1.0),
    ]


def list_sources(count: int) -> list[str]:
    """Return the sources of `count` functions of the standard library, of about equal length."""
    tree = ast.parse(inspect.getsource(textwrap) + inspect.getsource(statistics))
    functions = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    long = [source for source in functions if 600 < len(source) < 2400]
    if count > len(long):
        raise ValueError(f"{count} clients: at most {len(long)}")
    return long[:count]


def time_round(engine: Engine, workload: Workload, num_tokens: int) -> tuple[float, list[Any]]:
    """Return the seconds that all clients of a workload take, and their tokens."""
    begin = time.perf_counter()
    streams = [
        engine.submit(
            prompt,
            max_new_tokens=num_tokens,
            ignore_end=True,
            temperature=workload.temperature,
            seed=index,
        )
        for index, prompt in enumerate(workload.prompts)
    ]
    results = [stream.result() for stream in streams]
    return time.perf_counter() - begin, [result.tokens for result in results]


def measure_workload(
    engines: Sequence[Engine], workload: Workload, num_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Return the speeds without and with drafts, and their ratio."""
    for engine in engines:  # caches the prompts, and captures forwards
        for _ in range(2):
            time_round(engine, workload, num_tokens)
    before, ratios, seconds = engines[1].stats(), list[float](), list[tuple[float, ...]]()
    num_equal = 0
    for _ in range(num_rounds):
        times, texts = zip(
            *(time_round(engine, workload, num_tokens) for engine in engines), strict=True
        )
        ratios.append(times[0] / times[1])
        seconds.append(times)
        num_equal += texts[0] == texts[1]
    total = len(workload.prompts) * num_tokens
    plain, drafted = (statistics.median(column) for column in zip(*seconds, strict=True))
    drafts = {key: engines[1].stats()[key] - before[key] for key in ("drafts", "drafts_accepted")}
    return {
        "text": workload.name,
        "clients": len(workload.prompts),
        "tokens_s": total / plain,
        "with_drafts": total / drafted,
        "ratio": statistics.median(ratios),
        "drafts_a_token": drafts["drafts"] / (num_rounds * total),
        "accepted_a_token": drafts["drafts_accepted"] / (num_rounds * total),
        "equal_rounds": num_equal,
    }


def main(
    clients: Annotated[str, typer.Option(help="Numbers of clients")] = "1,4,16",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each workload")] = 5,
    kv_cache: harness.KVCache = "affine8",
    model: harness.Model = None,
    weights: Annotated[str | None, typer.Option(help="Round the weights")] = None,
    threads: harness.Threads = None,
    json: harness.Json = False,
) -> None:
    """Measure what n-gram drafts gain in the engine."""
    harness.set_threads(threads)
    loaded, tokenizer = load(model, weights=weights or "raw")
    kvant.attach(loaded, kv_cache)
    rows = list[dict[str, Any]]()
    for count in map(int, clients.split(",")):
        for workload in make_workloads(count):
            harness.show_progress(f"{workload.name}, {count} clients")
            with (
                Engine(loaded, tokenizer, kv_cache, prefixes=kvant.Prefixes()) as plain,
                Engine(
                    loaded, tokenizer, kv_cache, prefixes=kvant.Prefixes(), draft="ngram"
                ) as drafting,
            ):
                rows.append(measure_workload((plain, drafting), workload, tokens, rounds))
    facts = {"model": model or "the model inside", "cache": kv_cache, "weights": weights}
    harness.print_report("drafts", rows, facts | {"tokens": tokens}, quiet=json)


if __name__ == "__main__":
    harness.run(main)
