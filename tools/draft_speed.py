"""Measure what n-gram drafts gain in the engine: `python tools/draft_speed.py --model smollm2`.

Clients decode at the same time, in an engine with drafts and in one without, by turns. `edited` is
code that a client repeats with one word changed. `new` is text sampled at temperature 1, which
repeats little. The seeds are equal, so both engines generate the same tokens, up to rounding.
Prompts are cached before, so the speeds are those of decoding. A client sends its next prompt at
once, so all clients decode all the time. A ratio is the median over the rounds.
"""

from __future__ import annotations

import ast
import inspect
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import kvant
from kvant.bench import harness
from kvant.checkpoints import load
from kvant.engine import Engine
from kvant.generation.settings import NGRAM

OLD_WORD, NEW_WORD = "return", "yield"
WARMUPS, REPLIES = 4, 4  # runs of all clients before the timed one; replies of a client in a run
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


@dataclass(frozen=True)
class Run:
    """The seconds that all clients took, what they generated, and the drafts verified for it."""

    seconds: float
    texts: list[Any]
    drafts: int
    accepted: int


def run_clients(engine: Engine, workload: Workload, num_tokens: int) -> Run:
    """Let each client generate REPLIES replies, one after the other, and each from another prompt.

    So all clients have the same work, and decode at the same time to the end.
    """
    prompts = workload.prompts

    def run_client(client: int) -> list[Any]:
        indices = [(client + reply) % len(prompts) for reply in range(REPLIES)]
        return [
            engine.submit(
                prompts[index],
                max_new_tokens=num_tokens,
                ignore_end=True,
                temperature=workload.temperature,
                seed=index,
            )
            .result()
            .tokens
            for index in indices
        ]

    before, begin = engine.stats(), time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(run_client, range(len(prompts))))
    seconds, after = time.perf_counter() - begin, engine.stats()
    drafts, accepted = (after[key] - before[key] for key in ("drafts", "drafts_accepted"))
    return Run(seconds, texts, drafts, accepted)


def measure_workload(
    make_engine: Callable[[str | None], Engine], workload: Workload, num_tokens: int, rounds: int
) -> dict[str, Any]:
    """Return the speeds without and with drafts, and their ratio.

    Only one engine is open at a time: the threads of two would wait for each other.
    """
    pairs = list[tuple[Run, Run]]()
    for index in range(rounds):
        runs = dict[str | None, Run]()
        for draft in (None, NGRAM) if index % 2 else (NGRAM, None):
            with make_engine(draft) as engine:
                for _ in range(WARMUPS):  # caches the prompts, and captures forwards
                    run_clients(engine, workload, num_tokens)
                runs[draft] = run_clients(engine, workload, num_tokens)
        pairs.append((runs[None], runs[NGRAM]))
    total = len(workload.prompts) * num_tokens * REPLIES
    plain, drafted = (
        statistics.median(run.seconds for run in column) for column in zip(*pairs, strict=True)
    )
    return {
        "text": workload.name,
        "clients": len(workload.prompts),
        "tokens_s": total / plain,
        "with_drafts": total / drafted,
        "ratio": statistics.median(a.seconds / b.seconds for a, b in pairs),
        "drafts_a_token": sum(b.drafts for _, b in pairs) / (rounds * total),
        "accepted_a_token": sum(b.accepted for _, b in pairs) / (rounds * total),
        "equal_rounds": sum(a.texts == b.texts for a, b in pairs),
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

    def make_engine(draft: str | None) -> Engine:
        return Engine(loaded, tokenizer, kv_cache, prefixes=kvant.Prefixes(), draft=draft)

    rows = list[dict[str, Any]]()
    for count in map(int, clients.split(",")):
        for workload in make_workloads(count):
            harness.show_progress(f"{workload.name}, {count} clients")
            rows.append(measure_workload(make_engine, workload, tokens, rounds))
    facts = {"model": model or "the model inside", "cache": kv_cache, "weights": weights}
    harness.print_report("drafts", rows, facts | {"tokens": tokens}, quiet=json)


if __name__ == "__main__":
    harness.run(main)
