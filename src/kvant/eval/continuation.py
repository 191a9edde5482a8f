"""How long a format says what raw says, and how fast: greedy continuations of the same prompts.

The two write a token each in turn, so what else the machine does hits both. Prompts are read as
decoding would read them. Every continuation has the same number of tokens and stops at none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.generation.reader import shared_prefix
from kvant.probing.predictions import empty_cache, read, stored
from kvant.recipes import AnySpec


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
