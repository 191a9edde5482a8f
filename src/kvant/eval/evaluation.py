"""Every format on one model and one text, through the caches that users get.

The text is cut in pieces of tokens, as long as the model's context. Several documents take turns, a
piece each, so that no long one decides alone.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.demo import held_out
from kvant.eval.result import (
    EvaluationResult,
    EvaluationSettings,
    ResultFile,
    summarize_nbytes,
    summarize_quality,
)
from kvant.generation.prefill import count_shared_prefix
from kvant.hf import compute_model_fingerprint
from kvant.models import max_context
from kvant.probing.divergence import (
    make_empty_cache,
    make_stored_prefill_spec,
    measure_divergence,
    read_prompt,
)
from kvant.probing.recall import RecallExam, RecallShares, make_exams, measure_recall
from kvant.recipes import AnySpec
from kvant.spec import to_json


@dataclass(frozen=True)
class EvaluationText:
    """Pieces [1, T] of token ids; each begins as the tokenizer begins a text."""

    pieces: tuple[Tensor, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.shape[1] for piece in self.pieces)

    @property
    def full_pieces(self) -> list[Tensor]:
        """Those that are as long as the first: the last of a text is shorter."""
        return [piece for piece in self.pieces if piece.shape == self.pieces[0].shape]

    @property
    def digest(self) -> str:
        """The same for the same tokens in the same pieces."""
        sha = hashlib.sha256()
        for piece in self.pieces:
            sha.update(str(piece[0].tolist()).encode())
        return sha.hexdigest()[:16]


def split_text(tokenizer: Any, text: str | None, context: int, tokens: int) -> EvaluationText:
    """The first `tokens` tokens of a text; without one, of files held out from the demo model."""
    begin = get_leading_tokens(tokenizer)
    room = context - len(begin)
    if room < 2:
        raise ValueError(f"pieces of {context} tokens: {2 + len(begin)} or more are needed")
    documents = [
        tokenizer.encode(document, add_special_tokens=False)
        for document in (held_out() if text is None else [text])
    ]
    whole = [document for document in documents if len(document) >= room]
    pieces: list[Tensor] = []
    for piece in _interleave_documents(whole or documents, room):
        missing = tokens - sum(one.shape[1] for one in pieces)
        ids = [*begin, *piece][: max(0, missing)]
        if len(ids) > 1 + len(begin):
            pieces.append(torch.tensor([ids]))
    if not pieces:
        raise ValueError("the text has fewer than 2 tokens: give a longer one")
    return EvaluationText(tuple(pieces))


def get_leading_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer sets before a text."""
    told: list[int] = tokenizer.encode("")
    return [one for one in told[:1] if one == tokenizer.bos_token_id]


def _interleave_documents(documents: Sequence[list[int]], piece_length: int) -> Iterator[list[int]]:
    cuts = [[d[at : at + piece_length] for at in range(0, len(d), piece_length)] for d in documents]
    for turn in zip_longest(*cuts):
        yield from (piece for piece in turn if piece)


@dataclass
class GreedyContinuation:
    """One that is being written."""

    model: PreTrainedModel
    spec: AnySpec
    prompt: Tensor  # [1, T]
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0  # that tokens took after the first

    def __post_init__(self) -> None:
        self._cache = make_empty_cache(self.model, self.spec)
        self.tokens.append(int(read_prompt(self.model, self.prompt, self._cache).argmax()))

    def decode_token(self) -> None:
        begin = time.perf_counter()
        token = int(read_prompt(self.model, torch.tensor([self.tokens[-1:]]), self._cache).argmax())
        self.seconds += time.perf_counter() - begin
        self.tokens.append(token)


@dataclass(frozen=True)
class ContinuationSummary:
    """What came of all prompts."""

    identical: float  # tokens that are the same as raw's before the first that differs: a mean
    tokens_s: float
    vs_raw: float


def compare_continuations(
    model: PreTrainedModel, prompts: Iterable[Tensor], spec: AnySpec, num_tokens: int
) -> ContinuationSummary:
    """Of `count` tokens each."""
    specs = make_stored_prefill_spec(model, "raw"), make_stored_prefill_spec(model, spec)
    same: list[int] = []
    seconds: list[tuple[float, float]] = []
    for prompt in prompts:
        raw, ours = (GreedyContinuation(model, one, prompt) for one in specs)
        for _ in range(num_tokens - 1):
            raw.decode_token()
            ours.decode_token()
        same.append(count_shared_prefix(raw.tokens, ours.tokens))
        seconds.append((raw.seconds, ours.seconds))
    theirs, own = (statistics.median(column) for column in zip(*seconds, strict=True))
    return ContinuationSummary(statistics.fmean(same), (num_tokens - 1) / own, theirs / own)


EvaluationProgress = Callable[[int, int], None]  # steps that are done, and all of them
Item = TypeVar("Item")
DEFAULT_SETTINGS = EvaluationSettings()


def ignore_progress(done: int, total: int) -> None:
    """Nobody looks."""


@dataclass
class Evaluation:
    """What is measured, and on what."""

    model: PreTrainedModel
    tokenizer: Any
    text: EvaluationText
    settings: EvaluationSettings
    report_step: Callable[[], None]  # told of each piece, prompt and exam

    def measure_format(self, name: str, spec: AnySpec) -> EvaluationResult:
        continued = self.settings.continued
        found = measure_divergence(self.model, self._report_each(self.text.pieces), spec)
        shares = self.raw_recall, measure_recall(self.model, self._report_each(self._exams), spec)
        written = compare_continuations(
            self.model, self._report_each(self._prompts), spec, continued
        )
        return EvaluationResult(
            format=name,
            continued=continued,
            raw_recall=shares[0],
            recall=shares[1],
            **summarize_quality(found, self.settings.seed),
            **summarize_nbytes(self.model, spec),
            **asdict(written),
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
        """The first halves of pieces, so that there is room behind."""
        whole = self.text.full_pieces
        chosen = [whole[i % len(whole)] for i in range(self.settings.prompts)]
        return [piece[:, : max(1, piece.shape[1] // 2)] for piece in chosen]

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
    progress: EvaluationProgress = ignore_progress,
) -> list[EvaluationResult]:
    """A result for each format, by its name.

    Without a text it is that of files of the Python library which the model inside was not trained
    on. Results that `save` holds are not measured again; those that are new are added to it.
    """
    recipes = {name: _compute_recipe_id(model, spec) for name, spec in formats.items()}
    longest = max_context(model)
    context = settings.context if longest is None else min(settings.context, longest)
    if 2 * settings.continued > context:
        raise ValueError(
            f"{settings.continued} tokens behind half of a context of {context}: continue by fewer"
        )
    found = split_text(tokenizer, text, context, settings.tokens)
    saved = ResultFile(save, make_result_header(model, found, settings))
    steps = len(found.pieces) + 2 * settings.prompts
    done = count(1)
    measured = Evaluation(
        model, tokenizer, found, settings, lambda: progress(next(done), steps * len(formats))
    )
    results = []
    for name, spec in formats.items():
        result = saved.get(name, recipes[name])
        if result is None:
            result = measured.measure_format(name, spec)
            saved.add(recipes[name], result)
        else:
            for _ in range(steps):
                measured.report_step()
        results.append(result)
    return results


def make_result_header(
    model: PreTrainedModel, text: EvaluationText, settings: EvaluationSettings
) -> dict[str, Any]:
    """What results depend on, beside the format."""
    return {
        "eval": version("kvant"),
        "model": compute_model_fingerprint(model),
        "text": text.digest,
        **asdict(settings),
    }


def _compute_recipe_id(model: PreTrainedModel, spec: AnySpec) -> str:
    """A short name for the recipes of a format; what the model cannot have is refused."""
    full = make_empty_cache(
        model, make_stored_prefill_spec(model, spec)
    ).spec  # with scales that are fitted
    summarize_nbytes(model, spec)
    return hashlib.sha256(to_json(full).encode()).hexdigest()[:16]
