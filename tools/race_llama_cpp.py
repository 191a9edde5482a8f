"""Compare decoding of a GGUF file with llama.cpp and with transformers, on the CPU.

`python tools/race_llama_cpp.py FILE.gguf` needs llama-cpp-python, which compiles for ten minutes
(`pip install llama-cpp-python`). All read the same file: kvant and llama.cpp as it is, transformers
expanded to bfloat16. Each measurement is a new process; the candidates of a context take turns for
several rounds. `prompt_s` is tokens of a prompt a second, `tokens_s` decoded tokens a second of all
streams, each the median of the rounds. `prompt_of_llama` and `of_llama` are relative to llama.cpp
with a cache of f16.

Several streams decode in one forward. Their caches are copies of one prompt's (llama.cpp), or have
random rows (the others).
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import DynamicCache

from kvant.bench import harness
from kvant.bench.batch import measure_batches
from kvant.bench.harness import DYNAMIC, run_in_process, show_progress
from kvant.checkpoints import find_gguf, load_model
from kvant.generation import TransformersDecoder
from kvant.spec import split_specs
from kvant.weights.packing import unpack
from llama_cpp_model import LlamaModel, decode

PROMPT_BATCH = 512
BASE = "llama.cpp f16"


class Task(NamedTuple):
    """What a process measures."""

    file: str
    context: int
    streams: int
    tokens: int  # decoded
    threads: int


class Figures(NamedTuple):
    """Tokens a second."""

    prompt: float
    decoded: float


def draw_tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 20000, (count,), generator=generator).tolist()


def measure_kvant(cache_name: str, task: Task) -> Figures:
    torch.set_num_threads(task.threads)
    model = load_model(task.file, device="cpu")
    decoder = TransformersDecoder(model)
    begin = perf_counter()
    decoder.compute_logits(draw_tokens(task.context), decoder.make_cache(cache_name))
    prompt = task.context / (perf_counter() - begin)
    return Figures(prompt, measure_decoding(model, cache_name, cache_name, task))


def measure_transformers(task: Task) -> Figures:
    """Measure a DynamicCache with weights in bfloat16, which transformers expands a file to."""
    torch.set_num_threads(task.threads)
    model = load_model(task.file, device="cpu")
    with warnings.catch_warnings(action="ignore"):
        unpack(model)
    model.to(torch.bfloat16)
    ids, begin = torch.tensor([draw_tokens(task.context)]), perf_counter()
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    prompt = task.context / (perf_counter() - begin)
    return Figures(prompt, measure_decoding(model, "raw", DYNAMIC, task))


def measure_decoding(model: Any, cache_name: str, row_name: str, task: Task) -> float:
    counts = sorted({1, task.streams})
    rows = measure_batches(model, cache_name, task.context, counts, task.tokens)
    found = [r for r in rows if r["cache"] == row_name and r["sequences"] == task.streams]
    return float(found[0]["tokens_s"])


def measure_llama_cpp(cache_type: str, task: Task) -> Figures:
    length = (task.context + task.tokens + 8) * task.streams
    with (
        LlamaModel.open(Path(task.file)) as model,
        model.open_context(
            cache_type, length, task.threads, batch=PROMPT_BATCH, streams=task.streams
        ) as context,
    ):
        return measure_llama_context(model.lib, context, task)


def measure_llama_context(lib: Any, context: Any, task: Task) -> Figures:
    ids, begin = draw_tokens(task.context), perf_counter()
    for first in range(0, task.context, PROMPT_BATCH):
        part = ids[first : first + PROMPT_BATCH]
        decode(lib, context, part, range(first, first + len(part)), [0] * len(part))
    prompt = task.context / (perf_counter() - begin)
    memory = lib.llama_get_memory(context)
    for stream in range(1, task.streams):
        lib.llama_memory_seq_cp(memory, 0, stream, -1, -1)
    seconds = []
    for position in range(task.context, task.context + task.tokens):
        begin = perf_counter()
        same = [position] * task.streams
        decode(lib, context, [1000] * task.streams, same, range(task.streams), every=True)
        seconds.append(perf_counter() - begin)
    return Figures(prompt, task.streams / statistics.median(seconds[2:]))


def race(
    candidates: dict[str, Callable[[Task], Figures]], task: Task, rounds: int
) -> list[dict[str, Any]]:
    figures: dict[str, list[Figures]] = {name: [] for name in candidates}
    for turn in range(rounds):
        for name, measure in candidates.items():
            show_progress(f"{task.streams} x {task.context} tokens, round {turn + 1}: {name}")
            figures[name].append(run_in_process(measure, task))
    show_progress("")
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in figures.items()
    }
    return [
        {
            "streams": task.streams,
            "context": task.context,
            "candidate": name,
            "prompt_s": prompt,
            "tokens_s": decoded,
            "prompt_of_llama": prompt / medians[BASE][0],
            "of_llama": decoded / medians[BASE][1],
        }
        for name, (prompt, decoded) in medians.items()
    ]


def main(
    file: Annotated[str, typer.Argument(help="GGUF file, or smollm2")],
    contexts: Annotated[str, typer.Option(help="Tokens of one stream")] = "128,2048,6000",
    batches: Annotated[str, typer.Option(help="Tokens of each of several streams")] = "128,2048",
    streams: Annotated[int, typer.Option(min=2)] = 16,
    formats: Annotated[str, typer.Option(help="kvant's caches")] = "raw,affine8,affine4",
    llama_caches: Annotated[str, typer.Option(help="llama.cpp's caches besides f16")] = "q8_0",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    tokens: Annotated[int, typer.Option(min=4, help="Decoded tokens of a measurement")] = 24,
    threads: harness.Threads = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Compare kvant with llama.cpp and transformers on a GGUF file."""
    path = find_gguf(file)
    if path is None:
        raise ValueError(f"{file}: a GGUF file is needed")
    candidates: dict[str, Callable[[Task], Figures]] = {
        f"llama.cpp {name}": partial(measure_llama_cpp, name)
        for name in ("f16", *filter(None, llama_caches.split(",")))
    }
    candidates |= {f"kvant {name}": partial(measure_kvant, name) for name in split_specs(formats)}
    candidates["transformers"] = measure_transformers
    threads = threads or torch.get_num_threads()
    rows: list[dict[str, Any]] = []
    facts = {"file": path.name, "rounds": rounds, "tokens": tokens, "rows": rows}
    for count, numbers in ((1, contexts), (streams, batches)):
        for context in harness.parse_numbers("contexts", numbers):
            task = Task(str(path), context, count, tokens, threads)
            rows += race(candidates, task, rounds)
            if output is not None:  # an interrupted run leaves results
                output.write_text(harness.format_report("race", facts) + "\n", "utf-8")
    harness.print_table("race", rows)


if __name__ == "__main__":
    harness.run(main)
