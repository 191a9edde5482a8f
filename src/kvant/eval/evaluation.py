"""Evaluate formats on one model and one text, with the caches that users get.

The text is cut into pieces of the model's context length. Pieces of several documents alternate, so
that a long document does not dominate.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.demo import load_held_out_texts
from kvant.eval.decoding import decode_token, measure_token_seconds
from kvant.eval.result import (
    EvaluationResult,
    EvaluationSettings,
    ResultFile,
    summarize_nbytes,
    summarize_quality,
)
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import compute_model_fingerprint
from kvant.prefixes.tree import count_shared_prefix
from kvant.probing.divergence import make_empty_cache, measure_divergence, read_prompt
from kvant.probing.recall import RecallExam, RecallShares, make_exams, measure_recall
from kvant.probing.verdicts import ProbeProgress, ignore_progress
from kvant.recipes import AnySpec
from kvant.spec import to_json
from kvant.spec.packages import identify_extensions


@dataclass(frozen=True)
class EvaluationText:
    """Pieces [1, T] of token ids; each starts with the tokenizer's leading tokens."""

    pieces: tuple[Tensor, ...]

    @property
    def full_pieces(self) -> list[Tensor]:
        """The pieces of full length; the last piece of a document may be shorter."""
        return [piece for piece in self.pieces if piece.shape == self.pieces[0].shape]

    @property
    def digest(self) -> str:
        """Hash of the tokens and their pieces."""
        sha = hashlib.sha256()
        for piece in self.pieces:
            sha.update(str(piece[0].tolist()).encode())
        return sha.hexdigest()[:16]


def split_text(tokenizer: Any, text: str | None, context: int, tokens: int) -> EvaluationText:
    """Split the first `tokens` tokens of a text; the default is the held-out library files."""
    leading = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]
    num_free = context - len(leading)
    if num_free < 2:
        raise ValueError(f"pieces of {context} tokens: {2 + len(leading)} or more are needed")
    documents = [
        tokenizer.encode(document, add_special_tokens=False)
        for document in (load_held_out_texts() if text is None else [text])
    ]
    full = [document for document in documents if len(document) >= num_free]
    pieces: list[Tensor] = []
    for piece in _interleave_documents(full or documents, num_free):
        num_missing = tokens - sum(p.shape[1] for p in pieces)
        ids = [*leading, *piece][: max(0, num_missing)]
        if len(ids) > 1 + len(leading):
            pieces.append(torch.tensor([ids]))
    if not pieces:
        raise ValueError("the text has fewer than 2 tokens: give a longer one")
    return EvaluationText(tuple(pieces))


def _interleave_documents(documents: Sequence[list[int]], piece_length: int) -> Iterator[list[int]]:
    cuts = [[d[at : at + piece_length] for at in range(0, len(d), piece_length)] for d in documents]
    for turn in zip_longest(*cuts):
        yield from (piece for piece in turn if piece)


def _continue_greedily(
    decoder: TransformersDecoder, spec: AnySpec, prompt: Tensor
) -> Iterator[tuple[int, float]]:
    """Yield the tokens of a greedy continuation, each with the seconds of its forward."""
    cache = make_empty_cache(decoder.model, spec)
    start = time.perf_counter()
    token = int(read_prompt(decoder.model, prompt, cache).argmax())
    while True:
        yield token, time.perf_counter() - start
        start = time.perf_counter()
        token = int(decode_token(decoder, token, cache).argmax())


@dataclass(frozen=True)
class ContinuationSummary:
    """Figures over all prompts."""

    identical: float  # mean number of tokens before the first that differs from raw's
    tokens_s: float
    vs_raw: float


def compare_continuations(
    model: PreTrainedModel, prompts: Iterable[Tensor], spec: AnySpec, num_tokens: int
) -> ContinuationSummary:
    """Continue each prompt by `num_tokens` tokens with raw and with a spec, in turn."""
    decoder = TransformersDecoder(model)
    num_identical: list[int] = []
    seconds: list[tuple[float, float]] = []  # of a token, with raw and with the spec
    for prompt in prompts:
        raw = _continue_greedily(decoder, "raw", prompt)
        both = zip(raw, _continue_greedily(decoder, spec, prompt), strict=True)
        pairs = list(islice(both, num_tokens))
        tokens = [token for (token, _), _ in pairs], [token for _, (token, _) in pairs]
        num_identical.append(count_shared_prefix(*tokens))
        decoded = pairs[1:]  # the first token took the prompt's forward
        raw_seconds = measure_token_seconds([s for (_, s), _ in decoded])
        seconds.append((raw_seconds, measure_token_seconds([s for _, (_, s) in decoded])))
    raw_median, spec_median = (statistics.median(column) for column in zip(*seconds, strict=True))
    identical = statistics.fmean(num_identical)
    return ContinuationSummary(identical, 1 / spec_median, raw_median / spec_median)


Item = TypeVar("Item")
DEFAULT_SETTINGS = EvaluationSettings()


@dataclass
class Evaluation:
    """The model, the text and the settings of an evaluation; measures one format at a time."""

    model: PreTrainedModel
    tokenizer: Any
    text: EvaluationText
    settings: EvaluationSettings
    report_step: Callable[[], None]  # called after each piece, prompt and exam

    def measure_format(self, name: str, spec: AnySpec) -> EvaluationResult:
        continued = self.settings.continued
        divergence = measure_divergence(self.model, self._report_each(self.text.pieces), spec)
        raw_recall = self.raw_recall
        recall = measure_recall(self.model, self._report_each(self._exams), spec)
        continuations = compare_continuations(
            self.model, self._report_each(self._prompts), spec, continued
        )
        return EvaluationResult(
            format=name,
            continued=continued,
            raw_recall=raw_recall,
            recall=recall,
            **summarize_quality(divergence, self.settings.seed),
            **summarize_nbytes(self.model, spec),
            **asdict(continuations),
        )

    @cached_property
    def raw_recall(self) -> RecallShares:
        return measure_recall(self.model, self._exams, "raw")

    @cached_property
    def _exams(self) -> list[RecallExam]:
        settings = self.settings
        return make_exams(self.tokenizer, self.text.full_pieces, settings.prompts, settings.seed)

    @cached_property
    def _prompts(self) -> list[Tensor]:
        """The first halves of pieces; the context has room for their continuations."""
        full = self.text.full_pieces
        pieces = [full[i % len(full)] for i in range(self.settings.prompts)]
        return [piece[:, : max(1, piece.shape[1] // 2)] for piece in pieces]

    def _report_each(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            yield item
            self.report_step()


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    formats: Mapping[str, AnySpec],
    *,
    text: str | None = None,
    settings: EvaluationSettings = DEFAULT_SETTINGS,
    save: Path | None = None,
    progress: ProbeProgress = ignore_progress,
    on_format: Callable[[EvaluationResult], None] = lambda result: None,
) -> list[EvaluationResult]:
    """Evaluate each format, by its name.

    The default text is the files of the Python library that the built-in model was not trained on.
    Results in the file `save` are not measured again; new results are appended to it. `on_format`
    is called with each result before the next format is measured.
    """
    recipes = {name: _compute_recipe_id(model, spec) for name, spec in formats.items()}
    context = settings.limit_context(model).context
    if 2 * settings.continued > context:
        raise ValueError(
            f"{settings.continued} tokens after half of a context of {context}: continue by fewer"
        )
    evaluation_text = split_text(tokenizer, text, context, settings.tokens)
    header = {  # what results depend on, apart from the format
        "eval": version("kvant"),
        "method": 2,  # raise it when the same settings give other figures
        "model": compute_model_fingerprint(model),
        "text": evaluation_text.digest,
        **asdict(settings),
    }
    result_file = ResultFile(save, header)
    steps = len(evaluation_text.pieces) + 2 * settings.prompts
    done = count(1)
    evaluation = Evaluation(
        model,
        tokenizer,
        evaluation_text,
        settings,
        lambda: progress(next(done), steps * len(formats)),
    )
    results = []
    for name, spec in formats.items():
        result = result_file.get(name, recipes[name])
        if result is None:
            result = evaluation.measure_format(name, spec)
            result_file.add(recipes[name], result)
        else:
            for _ in range(steps):
                evaluation.report_step()
        results.append(result)
        on_format(result)
    return results


def _compute_recipe_id(model: PreTrainedModel, spec: AnySpec) -> str:
    """Hash the recipes of a format; raise if the model does not support them."""
    # With fitted channel scales, which are part of the recipe.
    full = make_empty_cache(model, spec).spec
    summarize_nbytes(model, spec)
    text = "\n".join([to_json(full), *identify_extensions(full)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
