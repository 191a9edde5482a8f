"""Measure calls of functions after a prompt of 4,096 tokens, by format: docs/tool-calls.json.

`python tools/tool_calls.py --minutes 60` measures for an hour; the same command goes on. Four
prompts have functions with JSON schemas and examples (see tools/call_exams.py), 50 requests each.
The model answers each request greedily, without a grammar, on a fork of the prompt's cache: the raw
cache, quantized once, so that rows of the prompt do not add up the errors of earlier rows. A format
that prunes, or has a window, reads the prompt itself. Requests are read as decoding reads them
(`prefill=stored`).

A row has a digit for each request: 0 if the call is no valid JSON, 1 if it is, 2 if the function is
right, 3 if all arguments are right, too. The table counts the requests that raw answers right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from call_exams import CallExam, CallRequest, make_call_exam, score_call
from exam_model import load_float32
from exam_options import check_context, parse_formats
from forked_batch import continue_greedily
from kvant.bench import harness
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache
from kvant.probing.divergence import make_empty_cache, make_filled_cache, read_prompt
from pages import DOCS
from result_log import ResultLog, Row

FORMATS = (
    "raw,affine8,fp8,affine6,affine4,affine4,tail=0,affine3,affine2,turbo4v4,turbo3v3,turbo2v2,"
    "affine8,window=1024,affine8,select=25%,affine8,select=12%,affine8,prune=keydiff:25%,"
    "affine8,prune=snapkv:25%,affine8,prune=expected:25%"
)
LENGTH, NUM_PROMPTS, NUM_REQUESTS = 4096, 4, 50
MAX_CALL_TOKENS = 64
BATCH = 25  # requests answered together


class CallTest:
    """Measures rows of the log; keeps the raw cache of the newest prompt for other formats."""

    def __init__(self, model: Any, tokenizer: Any, length: int, num_requests: int) -> None:
        self._decoder, self._tokenizer = TransformersDecoder(model), tokenizer
        self._length, self._num_requests = length, num_requests
        check_context(self._decoder, length + 2 * MAX_CALL_TOKENS)  # a request is shorter
        self._read_raw = lru_cache(maxsize=1)(self._read_prompt)

    def measure(self, key: Mapping[str, Any]) -> Row:
        """Return the scores of a prompt's requests under a format."""
        exam, raw_cache = self._read_raw(key["prompt"])
        prompt = torch.tensor([exam.prompt])
        cache = make_filled_cache(self._decoder.model, prompt, key["format"], raw_cache)
        requests = exam.requests
        texts = [
            text
            for begin in range(0, len(requests), BATCH)
            for text in self._answer(cache, requests[begin : begin + BATCH])
        ]
        scores = [score_call(text, request) for text, request in zip(texts, requests, strict=True)]
        digits = [score.is_valid + score.is_function + score.is_correct for score in scores]
        return {"scores": "".join(map(str, digits))}

    def _answer(self, cache: TransformersCache, requests: Iterable[CallRequest]) -> list[str]:
        """Return the greedy answers to requests, each on a fork of the cache."""
        questions = [
            self._tokenizer.encode(request.question, add_special_tokens=False)
            for request in requests
        ]
        forks = [cache.fork() for _ in questions]
        logits = torch.cat(
            [
                self._decoder.compute_logits(question, fork)
                for question, fork in zip(questions, forks, strict=True)
            ]
        )
        answers = continue_greedily(
            self._decoder, forks, logits, MAX_CALL_TOKENS, self._is_complete
        )
        return [self._decode(answer) for answer in answers]

    def _is_complete(self, tokens: list[int]) -> bool:
        return tokens[-1] in self._decoder.end_tokens or "\n" in self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        end_tokens = self._decoder.end_tokens
        text: str = self._tokenizer.decode([token for token in tokens if token not in end_tokens])
        return text

    def _read_prompt(self, number: int) -> tuple[CallExam, TransformersCache]:
        exam = make_call_exam(self._tokenizer, self._length, self._num_requests, number)
        cache = make_empty_cache(self._decoder.model, "raw")
        read_prompt(self._decoder.model, torch.tensor([exam.prompt]), cache)
        return exam, cache


def summarize(rows: Iterable[Row]) -> list[Row]:
    """Return a line for each format: shares of the requests that raw answers right."""
    scores: dict[str, dict[int, str]] = {}
    for row in rows:
        scores.setdefault(row["format"], {})[row["prompt"]] = row["scores"]
    raw = scores.get("raw", {})
    lines = []
    for name, by_prompt in scores.items():
        counted = [
            int(score)
            for prompt, text in by_prompt.items()
            for score, raw_score in zip(text, raw.get(prompt, ""), strict=False)
            if raw_score == "3"
        ]
        line: Row = {"format": name, "requests": len(counted)}
        for least, title in enumerate(("valid", "function", "arguments"), 1):
            line[title] = sum(s >= least for s in counted) / len(counted) if counted else None
        lines.append(line)
    return lines


def main(
    model: harness.Model = "smollm2",
    formats: Annotated[str, typer.Option(help="Comma-separated specs; raw is needed")] = FORMATS,
    length: Annotated[int, typer.Option(help="Tokens of a prompt")] = LENGTH,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts")] = NUM_PROMPTS,
    requests: Annotated[int, typer.Option(min=1, help="Requests after each")] = NUM_REQUESTS,
    minutes: Annotated[float, typer.Option(help="No row is begun after these")] = 60,
    output: Annotated[Path, typer.Option(help="JSON file to continue")] = DOCS / "tool-calls.json",
) -> None:
    """Measure function calls by format."""
    settings = {"model": model, "length": length, "requests": requests}
    log = ResultLog.open(output, settings | {"call_tokens": MAX_CALL_TOKENS})
    loaded, tokenizer = load_float32(model)
    test = CallTest(loaded, tokenizer, length, requests)
    names = parse_formats(loaded, formats)
    keys = [{"prompt": number, "format": name} for number, name in product(range(prompts), names)]
    log.measure(keys, test.measure, minutes)
    if lines := summarize(log.rows):
        harness.print_table("tool calls", lines)


if __name__ == "__main__":
    harness.run(main)
