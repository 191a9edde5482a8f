"""Settings of sampling, of the end of generation, and of caching; values validate themselves.

The module does not import torch, so a command rejects invalid values at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from kvant import checkpoints
from kvant.errors import ContextError, PromptError, SpecError
from kvant.platform.sizes import as_bytes
from kvant.recipes import RAW_WEIGHTS

if TYPE_CHECKING:
    from kvant.generation.grammar import Grammar

MAX_FLOAT = 3e38  # of float32, in which logits are computed
MAX_PENALTY = 100.0  # a larger factor makes logits infinite, and so does its inverse
MAX_NEW_TOKENS = 1 << 30  # of a reply; with more, counts of bytes could exceed 64 bits
NGRAM = "ngram"  # drafts that followed earlier copies of the newest tokens
STRATEGIES = ("always", "disabled", "long", "adaptive")


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0  # subtracted from the logit of each generated token,
    frequency_penalty: float = 0.0  # and this times its count
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias), added to its logit
    grammar: Grammar | None = None  # constrains the reply

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: 0 or more is needed")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}={value}: 0 to 1 is needed")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: 1 or more, or None for all tokens")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed={self.seed}: a 64-bit integer is needed")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: {1 / MAX_PENALTY} to {MAX_PENALTY} "
                "is needed; 1 changes nothing"
            )
        for name, number in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
            *((f"logit_bias of token {token}", bias) for token, bias in self.logit_bias),
        ):
            if not abs(number) <= MAX_FLOAT:  # NaN too is refused
                raise ValueError(f"{name}={number}: a number is needed, at most {MAX_FLOAT:g}")

    @property
    def modifies_logits(self) -> bool:
        """Whether penalties, biases or a grammar change the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0
        return any(penalties) or bool(self.logit_bias) or self.grammar is not None

    def check_tokens(self, vocab_size: int | None) -> None:
        """Raise for a bias of a token outside the vocabulary."""
        for token, _ in self.logit_bias:
            if not 0 <= token < (1 << 31 if vocab_size is None else vocab_size):
                raise ValueError(f"logit_bias of token {token}: the vocabulary has {vocab_size}")

    def derive_choice(self, index: int) -> Sampling:
        """Return these settings with the seed of one of several continuations."""
        return self.with_seed(derive_seed(self.seed, index))

    def with_seed(self, seed: int | None) -> Sampling:
        """Return these settings with another seed; the same object if the seed stays."""
        return self if seed == self.seed else replace(self, seed=seed)


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of every function that samples; see the fields of `Sampling`."""

    sampling: Sampling | None  # the others replace its fields
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: Mapping[int, float] | None
    grammar: Grammar | None


def make_sampling(options: SamplingOptions, default: Sampling | None = None) -> Sampling:
    """Return `sampling`, or else `default`, with the fields that the other options name."""
    values: dict[str, Any] = {**options}
    if unknown := sorted(values.keys() - SamplingOptions.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    sampling = values.pop("sampling", None) or default or Sampling()
    if "logit_bias" in values:
        values["logit_bias"] = tuple(sorted((values["logit_bias"] or {}).items()))
    return replace(sampling, **values)


def derive_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of one of several texts, modulo 2**64."""
    return None if seed is None else (seed + index) % 2**64


@dataclass(frozen=True)
class StopConditions:
    """Limits that end generation, and the number of drafts."""

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()
    max_context: int | None = None
    vocab_size: int | None = None
    max_drafts: int = 8  # drafts per forward
    include_special_tokens: bool = False  # whether text includes the names of special tokens

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_context", "max_drafts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is needed")
        if any(not string for string in self.stop):
            raise ValueError(f"stop={list(self.stop)}: an empty string cannot be a stop string")

    def check_prompt(self, tokens: Sequence[int], num_new: int = 1) -> None:
        """Raise if the prompt is empty, has an invalid token, or leaves no room for new tokens."""
        num_tokens, vocab_size = len(tokens), self.vocab_size
        if num_tokens == 0:
            raise PromptError("the prompt has no tokens: give at least one")
        if min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size):
            invalid = min(tokens) if min(tokens) < 0 else max(tokens)
            allowed = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
            raise PromptError(f"the prompt has token {invalid}: {allowed} is needed")
        if self.max_context is not None and num_tokens + num_new > self.max_context:
            raise ContextError(
                f"a prompt of {num_tokens} tokens for a context of {self.max_context} (the "
                "smallest of max_context, the model's and capacity=N in the spec): shorten it, or "
                "keep a window (window=N in the spec) and allow a longer context"
            )

    def count_new_tokens(self, num_tokens: int) -> int:
        """Return how many tokens may be generated after a prompt of `num_tokens`."""
        most = min(self.max_new_tokens, MAX_NEW_TOKENS)
        return most if self.max_context is None else min(most, self.max_context - num_tokens)


def find_smallest_limit(*limits: int | None) -> int | None:
    """Return the smallest of some limits on tokens; None: there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def check_draft(name: str | None) -> None:
    """Raise if a value of --draft names a model that cannot be loaded."""
    if name not in (None, NGRAM):
        checkpoints.check_checkpoint(name, flag="--draft", tokenizer=False)


def load_draft(name: str | None, *, pack: bool, **options: Unpack[checkpoints.LoadOptions]) -> Any:
    """Return the method of drafts that --draft names, or load its model, packed if requested."""
    if name in (None, NGRAM):
        return name
    options |= {"flag": "--draft", "weights": RAW_WEIGHTS if pack else None}
    return checkpoints.load_model(name, **options)


def check_strategy(name: str, threshold: int = 512, budget: int | str | None = None) -> None:
    """Raise for an unknown strategy or invalid numbers."""
    if budget is not None and name != "adaptive":
        raise SpecError(f"budget={budget} with strategy={name!r}: only 'adaptive' has a budget")
    if name not in STRATEGIES:
        raise SpecError(f"strategy={name!r}: allowed are {', '.join(STRATEGIES)}")
    if name == "adaptive" and budget is None:
        raise SpecError("strategy='adaptive' needs budget=, the maximum bytes of the cache")
    if budget is not None and as_bytes(budget) < 1:
        raise ValueError(f"budget={budget}: 1 byte or more is needed")
    if threshold < 0:
        raise ValueError(f"threshold={threshold}: 0 or more tokens are needed")
