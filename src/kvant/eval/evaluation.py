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
from kvant.eval.result import Result, Saved, Settings, quality, size
from kvant.generation.reader import shared_prefix
from kvant.hf import identity
from kvant.models import max_context
from kvant.probing.predictions import divergence, empty_cache, read, stored
from kvant.probing.recall import Exam, Shares, exams, recall
from kvant.recipes import AnySpec
from kvant.spec import to_json


@dataclass(frozen=True)
class Text:
    """Pieces [1, T] of token ids; each begins as the tokenizer begins a text."""

    pieces: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        return sum(piece.shape[1] for piece in self.pieces)

    @property
    def whole(self) -> list[Tensor]:
        """Those that are as long as the first: the last of a text is shorter."""
        return [piece for piece in self.pieces if piece.shape == self.pieces[0].shape]

    @property
    def digest(self) -> str:
        """The same for the same tokens in the same pieces."""
        sha = hashlib.sha256()
        for piece in self.pieces:
            sha.update(str(piece[0].tolist()).encode())
        return sha.hexdigest()[:16]


def cut(tokenizer: Any, text: str | None, context: int, tokens: int) -> Text:
    """The first `tokens` tokens of a text; without one, of files held out from the demo model."""
    begin = beginning(tokenizer)
    room = context - len(begin)
    if room < 2:
        raise ValueError(f"pieces of {context} tokens: {2 + len(begin)} or more are needed")
    documents = [
        tokenizer.encode(document, add_special_tokens=False)
        for document in (held_out() if text is None else [text])
    ]
    whole = [document for document in documents if len(document) >= room]
    pieces: list[Tensor] = []
    for piece in _in_turn(whole or documents, room):
        missing = tokens - sum(one.shape[1] for one in pieces)
        ids = [*begin, *piece][: max(0, missing)]
        if len(ids) > 1 + len(begin):
            pieces.append(torch.tensor([ids]))
    if not pieces:
        raise ValueError("the text has fewer than 2 tokens: give a longer one")
    return Text(tuple(pieces))


def beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer sets before a text."""
    told: list[int] = tokenizer.encode("")
    return [one for one in told[:1] if one == tokenizer.bos_token_id]


def _in_turn(documents: Sequence[list[int]], room: int) -> Iterator[list[int]]:
    cuts = [[d[at : at + room] for at in range(0, len(d), room)] for d in documents]
    for turn in zip_longest(*cuts):
        yield from (piece for piece in turn if piece)


@dataclass
class Continuation:
    """One that is being written."""

    model: PreTrainedModel
    spec: AnySpec
    prompt: Tensor  # [1, T]
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0  # that tokens took after the first

    def __post_init__(self) -> None:
        self._cache = empty_cache(self.model, self.spec)
        self.tokens.append(int(read(self.model, self.prompt, self._cache).argmax()))

    def write(self) -> None:
        begin = time.perf_counter()
        token = int(read(self.model, torch.tensor([self.tokens[-1:]]), self._cache).argmax())
        self.seconds += time.perf_counter() - begin
        self.tokens.append(token)


@dataclass(frozen=True)
class Continued:
    """What came of all prompts."""

    identical: float  # tokens that are the same as raw's before the first that differs: a mean
    tokens_s: float
    vs_raw: float


def continuations(
    model: PreTrainedModel, prompts: Iterable[Tensor], spec: AnySpec, count: int
) -> Continued:
    """Of `count` tokens each."""
    specs = stored(model, "raw"), stored(model, spec)
    same: list[int] = []
    seconds: list[tuple[float, float]] = []
    for prompt in prompts:
        raw, ours = (Continuation(model, one, prompt) for one in specs)
        for _ in range(count - 1):
            raw.write()
            ours.write()
        same.append(shared_prefix(raw.tokens, ours.tokens))
        seconds.append((raw.seconds, ours.seconds))
    theirs, own = (statistics.median(column) for column in zip(*seconds, strict=True))
    return Continued(statistics.fmean(same), (count - 1) / own, theirs / own)


Progress = Callable[[int, int], None]  # steps that are done, and all of them
Item = TypeVar("Item")
USUAL = Settings()


def silent(done: int, total: int) -> None:
    """Nobody looks."""


@dataclass
class Evaluation:
    """What is measured, and on what."""

    model: PreTrainedModel
    tokenizer: Any
    text: Text
    settings: Settings
    tick: Callable[[], None]  # told of each piece, prompt and exam

    def result(self, name: str, spec: AnySpec) -> Result:
        continued = self.settings.continued
        found = divergence(self.model, self._ticking(self.text.pieces), spec)
        shares = self.raw_recall, recall(self.model, self._ticking(self._exams), spec)
        written = continuations(self.model, self._ticking(self._prompts), spec, continued)
        return Result(
            format=name,
            continued=continued,
            raw_recall=shares[0],
            recall=shares[1],
            **quality(found, self.settings.seed),
            **size(self.model, spec),
            **asdict(written),
        )

    @cached_property
    def raw_recall(self) -> Shares:
        return recall(self.model, self._exams, "raw")

    @cached_property
    def _exams(self) -> list[Exam]:
        settings = self.settings
        return exams(self.tokenizer, self.text.whole, settings.prompts, settings.seed)

    @cached_property
    def _prompts(self) -> list[Tensor]:
        """The first halves of pieces, so that there is room behind."""
        whole = self.text.whole
        chosen = [whole[i % len(whole)] for i in range(self.settings.prompts)]
        return [piece[:, : max(1, piece.shape[1] // 2)] for piece in chosen]

    def _ticking(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            yield item
            self.tick()


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    formats: Mapping[str, AnySpec],
    *,
    text: str | None = None,
    settings: Settings = USUAL,
    save: Path | None = None,
    progress: Progress = silent,
) -> list[Result]:
    """A result for each format, by its name.

    Without a text it is that of files of the Python library which the model inside was not trained
    on. Results that `save` holds are not measured again; those that are new are added to it.
    """
    recipes = {name: _checked(model, spec) for name, spec in formats.items()}
    longest = max_context(model)
    context = settings.context if longest is None else min(settings.context, longest)
    if 2 * settings.continued > context:
        raise ValueError(
            f"{settings.continued} tokens behind half of a context of {context}: continue by fewer"
        )
    found = cut(tokenizer, text, context, settings.tokens)
    saved = Saved(save, facts(model, found, settings))
    steps = len(found.pieces) + 2 * settings.prompts
    done = count(1)
    measured = Evaluation(
        model, tokenizer, found, settings, lambda: progress(next(done), steps * len(formats))
    )
    results = []
    for name, spec in formats.items():
        result = saved.get(name, recipes[name])
        if result is None:
            result = measured.result(name, spec)
            saved.add(recipes[name], result)
        else:
            for _ in range(steps):
                measured.tick()
        results.append(result)
    return results


def facts(model: PreTrainedModel, text: Text, settings: Settings) -> dict[str, Any]:
    """What results depend on, beside the format."""
    return {
        "eval": version("kvant"),
        "model": identity(model),
        "text": text.digest,
        **asdict(settings),
    }


def _checked(model: PreTrainedModel, spec: AnySpec) -> str:
    """A short name for the recipes of a format; what the model cannot have is refused."""
    full = empty_cache(model, stored(model, spec)).spec  # with scales that are fitted
    size(model, spec)
    return hashlib.sha256(to_json(full).encode()).hexdigest()[:16]
