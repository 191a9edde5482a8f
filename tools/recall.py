"""Measure what a model recalls from prompts of up to 7,168 tokens, by format: docs/recall.json.

`python tools/recall.py --minutes 60` measures for an hour; the same command goes on. Each exam (see
tools/recall_exams.py) is asked in two ways:

* `prompt`: the question ends the prompt, as one chunk, which reads all pages; a prune knows it
  (of `multihop`, the first question alone);
* `decoded`: the prompt is read and pruned first, then the question is decoded token by token,
  reading the pages that a `select` chooses. This is what a later turn of a conversation sees.

Answers are decoded token by token in both. Formats that neither prune nor select are asked in the
second way only: their answers differ by rounding. A row has, for each kind, the number of answers
whose tokens are all the most likely ones, and the sum of the answers' log-probabilities.

For most formats, the raw cache reads the prompt and is then quantized once, so that rows do not add
up the errors of earlier rows. A format that prunes, or has a window, reads the prompt itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import kvant
from exam_model import load_float32
from exam_options import check_context, parse_formats
from forked_batch import ForkedBatch
from kvant.bench import harness
from kvant.eval.evaluation import split_text
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache
from kvant.probing.divergence import needs_prefill, read_prompt
from kvant.recipes import iterate_attention
from pages import DOCS
from recall_exams import ITEMS_OF_KIND, KINDS, LongExam, RecallItem, make_exam
from result_log import ResultLog, Row
from texts import compute_digests, load_text

FORMATS = (
    "raw,affine8,fp8,affine6,affine4,affine3,affine2,turbo4v4,turbo3v3,turbo2v2,"
    "affine8,window=2048,affine8,select=25%,affine8,select=12%,affine4,select=25%,"
    "affine8,prune=keydiff:25%,affine8,prune=snapkv:25%,affine8,prune=expected:25%"
)
CONTEXTS = "1024,2048,4096,7168"
WAYS = ("prompt", "decoded")


class ItemAnswer(NamedTuple):
    is_correct: bool  # whether greedy decoding gives all tokens of the answer
    logprob: float  # of the answer, nats


def answer_items(
    decoder: TransformersDecoder, items: Sequence[RecallItem], cache: TransformersCache, way: str
) -> list[ItemAnswer]:
    """Ask each item on a fork of the cache, in one of `WAYS`; decode all forks together."""
    forks = [cache.fork() for _ in items]
    if way == "prompt":
        counts = [len(item.turns[0].question) for item in items]
        logits = torch.cat(
            [
                decoder.compute_logits(item.turns[0].question, fork)
                for item, fork in zip(items, forks, strict=True)
            ]
        )
        for fork in forks:
            fork.prune()
        batch = ForkedBatch(decoder, forks)
    else:
        counts, batch = [1] * len(items), ForkedBatch(decoder, forks)
        logits = batch.decode([item.tokens[0] for item in items])
    tokens = _stack_columns([i.tokens[count:] for i, count in zip(items, counts, strict=True)])
    is_answer = _stack_columns(
        [i.is_answer[count:] for i, count in zip(items, counts, strict=True)]
    )
    is_likeliest, logprobs = [], []
    for targets in tokens:  # those after the items that have ended are padding
        is_likeliest.append(logits.argmax(-1) == targets)
        logprobs.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
        logits = batch.decode(targets.tolist())
    is_correct = (torch.stack(is_likeliest) | ~is_answer).all(0)
    sums = torch.stack(logprobs).where(is_answer, 0.0).sum(0)
    return [*map(ItemAnswer, is_correct.tolist(), sums.tolist())]


def _stack_columns(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return [longest row, rows], padded with 0 or False."""
    return pad_sequence([torch.tensor(row) for row in rows])


def summarize_answers(items: Sequence[RecallItem], answers: Sequence[ItemAnswer]) -> Row:
    """Return the number of correct answers and the sum of log-probabilities by kind."""
    by_kind: dict[str, list[ItemAnswer]] = {kind: [] for kind in KINDS}
    for item, answer in zip(items, answers, strict=True):
        by_kind[item.kind].append(answer)
    return {
        kind: {
            "correct": sum(answer.is_correct for answer in group),
            "logprob": round(sum(answer.logprob for answer in group), 3),
        }
        for kind, group in by_kind.items()
    }


class ExamReader:
    """Measures rows of the log; keeps the raw cache of the newest prompt for other formats."""

    def __init__(self, model: Any, tokenizer: Any, text: str, contexts: Sequence[int]) -> None:
        self._decoder, self._tokenizer, self._text = TransformersDecoder(model), tokenizer, text
        check_context(self._decoder, max(contexts))
        self._read_raw = lru_cache(maxsize=1)(self._read_exam)
        self._pieces = {context: self._split_text(context) for context in contexts}

    def count_exams(self, context: int, limit: int) -> int:
        """Return the number of exams, at most `limit`: each has a piece of the text of its own."""
        count = len(self._pieces[context])
        if count < limit:
            print(
                f"exams of {context} tokens: {count}, not {limit}, as the text has no more pieces"
            )
        return min(count, limit)

    def measure(self, key: Mapping[str, Any]) -> Row:
        """Return the answers of an exam under a format, by way."""
        model = self._decoder.model
        exam, raw_cache = self._read_raw(key["context"], key["exam"])
        cache = kvant.cache_for(model, key["format"])
        ways = list_ways(cache.spec)
        if needs_prefill(cache.spec, raw_cache):
            read_prompt(model, torch.tensor([exam.prompt]), cache)
        else:
            spec, cache = cache.spec, raw_cache.fork()
            cache.recode(spec)
        row = {}
        for way in ways:
            if way == "decoded":
                cache.prune()
            answers = answer_items(self._decoder, exam.items, cache, way)
            row[way] = summarize_answers(exam.items, answers)
        return row

    def _read_exam(self, context: int, number: int) -> tuple[LongExam, TransformersCache]:
        exam = make_exam(self._tokenizer, self._pieces[context][number], number)
        cache = kvant.cache_for(self._decoder.model, "raw")
        read_prompt(self._decoder.model, torch.tensor([exam.prompt]), cache)
        return exam, cache

    def _split_text(self, context: int) -> list[Tensor]:
        pieces = split_text(self._tokenizer, self._text, context, len(self._text)).full_pieces
        if pieces[0].shape[1] < context:
            raise ValueError(
                f"a context of {context} tokens: the text has {pieces[0].shape[1]}, give fewer"
            )
        return pieces


def list_ways(spec: kvant.CacheSpec) -> tuple[str, ...]:
    """Return the ways in which answers may differ; `decoded` is last, as it prunes the cache."""
    selects = any(layer.select is not None for layer in iterate_attention(*spec.layers))
    return WAYS if selects or spec.prunes else WAYS[1:]


def summarize(rows: Iterable[Row], kinds: Iterable[str] = KINDS) -> list[Row]:
    """Return a line for each context, way and format: shares and mean log-probabilities."""
    groups: dict[tuple[int, str, str], list[Row]] = {}
    for row, way in ((row, way) for row in rows for way in WAYS if way in row):
        groups.setdefault((row["context"], way, row["format"]), []).append(row[way])
    return [
        {"context": context, "question": way, "format": name, "exams": len(group)}
        | {kind: fmean(row[kind]["correct"] for row in group) / ITEMS_OF_KIND for kind in kinds}
        | {
            f"{kind}, nats": fmean(row[kind]["logprob"] for row in group) / ITEMS_OF_KIND
            for kind in kinds
        }
        for (context, way, name), group in sorted(groups.items(), key=lambda pair: pair[0][:2])
    ]


def main(
    model: harness.Model = "smollm2",
    formats: Annotated[str, typer.Option(help="Comma-separated specs")] = FORMATS,
    contexts: Annotated[str, typer.Option(help="Tokens of a prompt and a question")] = CONTEXTS,
    exams: Annotated[int, typer.Option(min=1, help="Exams of each context")] = 16,
    text: Annotated[str, typer.Option(help="Text of tools/texts.py")] = "prose",
    minutes: Annotated[float, typer.Option(help="No row is begun after these")] = 60,
    output: Annotated[Path, typer.Option(help="JSON file to continue")] = DOCS / "recall.json",
) -> None:
    """Measure recall from long prompts by format."""
    lengths = harness.parse_numbers("contexts", contexts)
    content = load_text(text)
    settings = {"model": model, "text": text, "digest": compute_digests()[text]}
    log = ResultLog.open(output, settings)
    loaded, tokenizer = load_float32(model)
    reader = ExamReader(loaded, tokenizer, content, lengths)
    names = parse_formats(loaded, formats)
    keys = [
        {"context": context, "exam": number, "format": name}
        for context in lengths
        for number, name in product(range(reader.count_exams(context, exams)), names)
    ]
    log.measure(keys, reader.measure, minutes)
    if lines := summarize(log.rows):
        harness.print_table("recall", lines)


if __name__ == "__main__":
    harness.run(main)
