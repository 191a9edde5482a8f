"""What kvant can do with a model, found by a few forwards of a few tokens on the model itself.

    prompt A, a token     alone
    prompt B, a token     between: no later forward of A may see it
    the token behind A    again: other logits show state in modules
    A and B, a token each in one forward: other logits let sequences decode in turns

A verdict that rests on finite logits, or on what the forward takes, holds for all models of one
class and configuration: the process keeps it. Others, as those of NaN weights, are found anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from textwrap import shorten
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.cache import merge
from kvant.errors import CacheError
from kvant.hf.attach import attach, detach, get_attachments
from kvant.hf.attention import get_transformers_implementation
from kvant.hf.build import cache_for
from kvant.hf.cache import TransformersCache
from kvant.hf.forward import TokenForward
from kvant.hf.module_attributes import restore_modules

log = logging.getLogger("kvant")

PROMPT_LENGTHS = (5, 9)  # tokens of the two prompts: different, and few
# Root mean square of the difference of logits, by their standard deviation. Wrong ones differ by
# about 1; rounding of 16 bits may send a token to other experts.
LOGIT_TOLERANCES = {2: 0.1, 4: 0.01, 8: 0.01}  # by bytes of a number

GENERATE_CALL = "model.generate(...)"
NO_CONTINUATION = "does not continue what its cache holds by new tokens alone"
USE_GENERATE = (
    "kvant's own loop and engine cannot run it; use model.generate(..., "
    "cache=kvant.cache_for(model, spec))"
)


class SupportLevel(IntEnum):
    """What a model supports: each level includes those before it."""

    NOTHING = 0  # no cache of kvant's
    GENERATE = 1  # transformers' own `generate` with a cache of kvant's
    ONE_SEQUENCE = 2  # kvant's loop and engine, one sequence a forward
    RAGGED_BATCH = 3  # sequences of different lengths in one forward


LEVEL_DESCRIPTIONS = {
    SupportLevel.NOTHING: "refused",
    SupportLevel.GENERATE: "for transformers' generate alone",
    SupportLevel.ONE_SEQUENCE: "sequences decode in turns",
    SupportLevel.RAGGED_BATCH: "sequences of different lengths decode together",
}


class Support(NamedTuple):
    """A level, and the reason why it is no higher."""

    level: SupportLevel
    reason: str = ""

    def require_level(self, level: SupportLevel) -> None:
        """Raise the reason as an error if the level is not reached."""
        if self.level < level:
            raise CacheError(self.reason)


class SupportVerdict(NamedTuple):
    """What a model supports, and whether that holds for each model of its class."""

    support: Support
    holds_for_class: bool  # for the same configuration


_lock = RLock()
_known_support: dict[tuple[object, ...], Support] = {}


def get_support(model: PreTrainedModel) -> Support:
    """Return what the model supports; the first call for a class and configuration runs it."""
    device = find_model_device(model)
    if device is None:  # there are no weights to compute with
        return Support(SupportLevel.RAGGED_BATCH)
    config = model.config
    name = get_transformers_implementation(config._attn_implementation)
    settings = repr(config.to_dict())  # not its JSON: it may hold any object
    key = (type(model), settings, name, model.dtype, device.type)
    with _lock:
        found = _known_support.get(key)
        if found is None:
            began = time.perf_counter()
            found, lasting = _check_model(model, device)
            if lasting:
                _known_support[key] = found
            seconds = time.perf_counter() - began
            said = f"{LEVEL_DESCRIPTIONS[found.level]}, checked in {seconds:.2f} s"
            why = f": {found.reason}" if found.reason else ""
            log.info("%s: %s%s", type(model).__name__, said, why)
    return found


def find_model_device(model: PreTrainedModel) -> torch.device | None:
    """Return the device on which a model takes tokens, None where all its weights are on meta.

    Some may be on meta until a hook loads them for their layer, as those that accelerate offloads.
    """
    return next((weight.device for weight in model.parameters() if not weight.is_meta), None)


@torch.no_grad()
def _check_model(model: PreTrainedModel, device: torch.device) -> SupportVerdict:
    """Run the forwards of a check on a model, and leave it as it was."""
    empty, name = cache_for(model), type(model).__name__
    if not isinstance(empty, TransformersCache):
        reason = (
            f"{name} reads an encoder: the loop continues text, it does not translate; use its "
            "own generate with kvant.cache_for"
        )
        return SupportVerdict(Support(SupportLevel.GENERATE, reason), holds_for_class=True)
    devices = [device] if device.type == "cuda" else []
    with restore_modules(model), torch.random.fork_rng(devices):
        model.eval()
        check = _ModelCheck(model, device, empty)
        try:
            support = check.find_refusal()
        except CacheError as error:
            reason = f"{name} cannot use a cache of kvant's: {error}"
            return SupportVerdict(Support(SupportLevel.NOTHING, reason), holds_for_class=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # it may not come again
            reason = f"{name} {NO_CONTINUATION} ({_shorten_error(error)}): {USE_GENERATE}"
            return SupportVerdict(Support(SupportLevel.GENERATE, reason), holds_for_class=False)
        if support is None:
            turns = check.find_reason_for_turns()
            support = (
                Support(SupportLevel.RAGGED_BATCH)
                if turns is None
                else Support(SupportLevel.ONE_SEQUENCE, turns)
            )
    return SupportVerdict(support, check.holds_for_class)


def _shorten_error(error: Exception) -> str:
    """Return the beginning of an error: those about shapes are long."""
    return shorten(f"{type(error).__name__}: {error}".splitlines()[0], 120, placeholder=" ...")


class _ModelCheck:
    """Two prompts of different lengths, and the same next token behind both."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, empty_cache: TransformersCache
    ) -> None:
        self.model, self.device = model, device
        self.forward = TokenForward(model)
        tokens = _choose_tokens(model, sum(PROMPT_LENGTHS) + 1)
        self.prompts = tokens[: PROMPT_LENGTHS[0]], tokens[PROMPT_LENGTHS[0] : -1]
        self.token = tokens[-1]
        self.empty_cache = empty_cache
        self.caches: list[TransformersCache] = []  # of the prompts
        self.single_logits: list[Tensor] = []  # logits of the token behind each prompt
        self.holds_for_class = True  # the findings hold for each model of the class

    def find_refusal(self) -> Support | None:
        """Return the level of a model that kvant cannot run token by token, None for others."""
        name = type(self.model).__name__
        for prompt in self.prompts:
            cache = self.empty_cache.fork()
            self._compute_logits([prompt], [0], cache)
            held = f"after a prompt of {len(prompt)} tokens its cache holds {cache.length}"
            if cache.length < len(prompt):
                reason = f"{name} keeps no cache: {held}; leave kvant out and call {GENERATE_CALL}"
                return Support(SupportLevel.NOTHING, reason)
            if cache.length > len(prompt):
                return Support(
                    SupportLevel.GENERATE, f"{name} {NO_CONTINUATION} ({held}): {USE_GENERATE}"
                )
            self.caches.append(cache)
            self.single_logits.append(self._decode_token(cache.fork(), len(prompt)))
        again = self._decode_token(self.caches[0].fork(), PROMPT_LENGTHS[0])
        self.holds_for_class = all(
            _are_comparable(logits) for logits in (*self.single_logits, again)
        )
        if not self.holds_for_class or _match_logits(again, self.single_logits[0]):
            return None
        return Support(
            SupportLevel.NOTHING,
            f"{name} keeps state of a sequence in its modules, where no cache knows of it, and a "
            "second sequence changes what the first one gets; leave kvant out and call "
            f"{GENERATE_CALL}, one batch after the other",
        )

    def find_reason_for_turns(self) -> str | None:
        """Return why sequences cannot decode in one forward, None where they can."""
        if not self.forward.takes_positions and any(
            one.attends for one in self.empty_cache.layer_info
        ):
            return "its forward takes no position_ids, so each sequence cannot have its own"
        if not self.holds_for_class:
            return "its logits are NaN or all alike, so those of two sequences cannot be compared"
        try:
            with _attach_temporarily(self.model):
                merged = merge(self.caches)
                found = self._compute_logits([[self.token]] * 2, list(PROMPT_LENGTHS), merged)
        except torch.OutOfMemoryError:
            raise
        except CacheError as error:  # of what the forward does, whatever its weights are
            return _shorten_error(error)
        except Exception as error:  # it may not come again: a CPU out of memory is a RuntimeError
            self.holds_for_class = False
            return _shorten_error(error)
        self.holds_for_class = not bool(found.isnan().any())
        if all(_match_logits(*both) for both in zip(found, self.single_logits, strict=True)):
            return None
        return "a sequence gets other logits beside one of another length than alone"

    def _decode_token(self, cache: TransformersCache, length: int) -> Tensor:
        """Return the logits [vocabulary] of the token behind a prompt."""
        return self._compute_logits([[self.token]], [length], cache)[0]

    def _compute_logits(
        self, prompts: list[list[int]], starts: list[int], cache: TransformersCache
    ) -> Tensor:
        """Return logits [sequences, vocabulary] behind the last token of each row."""
        ids = torch.tensor(prompts, device=self.device)
        first = torch.tensor(starts, device=ids.device)[:, None]
        positions = first + torch.arange(ids.shape[1], device=ids.device)
        return self.forward(ids, positions, cache)[:, -1]


@contextmanager
def _attach_temporarily(model: PreTrainedModel) -> Iterator[None]:
    """Attach the model within, as an engine does, unless it is attached."""
    if get_attachments(model):
        yield
        return
    attach(model)
    try:
        yield
    finally:
        detach(model)


def _are_comparable(logits: Tensor) -> bool:
    """Return whether logits tell models apart: none is NaN, and not all are alike."""
    finite = logits[torch.isfinite(logits)]  # a model may forbid a token by -inf
    return not bool(logits.isnan().any()) and bool((finite != finite[:1]).any())


def _match_logits(actual: Tensor, expected: Tensor) -> bool:
    """Return whether logits are those expected, but for rounding."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite):
        return False
    limit = LOGIT_TOLERANCES[expected.dtype.itemsize]
    actual, expected = actual[finite].double(), expected[finite].double()
    return bool((actual - expected).square().mean().sqrt() <= limit * expected.std())


def _choose_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Return tokens to which the configuration gives no meaning."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or 64
    special = set(_find_special_tokens(model.config.to_dict()))
    usual = [token for token in range(size // 8, size // 2) if token not in special]
    step = max(1, len(usual) // count)
    return [usual[(place * step) % len(usual)] for place in range(count)]


def _find_special_tokens(options: dict[str, Any]) -> Iterator[int]:
    """Yield the numbers of special tokens, also those that parts of the configuration name."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _find_special_tokens(value)
        elif str(name).endswith(("_id", "_ids", "_index")):
            several = value if isinstance(value, list | tuple) else [value]
            yield from (one for one in several if isinstance(one, int))
