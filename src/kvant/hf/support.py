"""Find out what kvant can do with a model, by a few short forwards of the model itself.

Forwards 1 and 2 give reference logits. Forwards 3 and 4 are compared with them:

    1. prompt A, then a token      the reference for A
    2. prompt B, then a token      the reference for B
    3. the token after A, again    if the logits differ from 1, the modules keep state
    4. both tokens in one forward  if they differ from 1 and 2, sequences must decode in turns

A verdict holds for all models of the same class and configuration, and is cached. It is not cached
if the compared logits are NaN or all equal, or if an error other than CacheError ended the check.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from enum import IntEnum
from textwrap import shorten
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.cache import merge
from kvant.errors import CacheError
from kvant.hf.attach import attach, cache_for, detach, get_attachments
from kvant.hf.attention import get_transformers_implementation
from kvant.hf.cache import TransformersCache
from kvant.hf.model import TokenForward, restore_modules

log = logging.getLogger("kvant")

PROMPT_LENGTHS = (5, 9)  # different, and short
# Limits on rms(difference of logits) / std(logits), by bytes per number. Wrong logits differ by
# about 1; in 16 bits, rounding may route a token to other experts.
LOGIT_TOLERANCES = {2: 0.1, 4: 0.01, 8: 0.01}

GENERATE_CALL = "model.generate(...)"
NO_CONTINUATION = "cannot continue a cached prompt from the new tokens alone"
USE_GENERATE = (
    "kvant's own loop and engine cannot run it; use model.generate(..., "
    "cache=kvant.cache_for(model, spec))"
)


class SupportLevel(IntEnum):
    """What a model supports: each level includes those before it."""

    NOTHING = 0  # no kvant cache
    GENERATE = 1  # `generate` of transformers with a kvant cache
    ONE_SEQUENCE = 2  # kvant's loop and engine, one sequence per forward
    RAGGED_BATCH = 3  # sequences of different lengths in one forward


LEVEL_DESCRIPTIONS = {
    SupportLevel.NOTHING: "refused",
    SupportLevel.GENERATE: "only with generate of transformers",
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


_lock = RLock()
_known_support: dict[tuple[object, ...], Support] = {}


def get_support(model: PreTrainedModel) -> Support:
    """Return the support of a model; the first call for its class and settings runs the model."""
    device = find_model_device(model)
    if device is None:  # all weights are on meta: no check can run, so assume full support
        return Support(SupportLevel.RAGGED_BATCH)
    config = model.config
    name = get_transformers_implementation(config._attn_implementation)
    settings = repr(config.to_dict())  # its objects may have no JSON form
    key = (type(model), settings, name, model.dtype, device.type)
    with _lock:
        support = _known_support.get(key)
        if support is None:
            start = time.perf_counter()
            support, holds_for_class = _check_model(model, device)
            if holds_for_class:
                _known_support[key] = support
            seconds = time.perf_counter() - start
            result = f"{LEVEL_DESCRIPTIONS[support.level]}, checked in {seconds:.2f} s"
            reason = f": {support.reason}" if support.reason else ""
            log.info("%s: %s%s", type(model).__name__, result, reason)
    return support


def find_model_device(model: PreTrainedModel) -> torch.device | None:
    """Return the device for the tokens of a model, None if all its weights are on meta.

    Weights that accelerate offloads are on meta until a hook loads them for their layer.
    """
    return next((weight.device for weight in model.parameters() if not weight.is_meta), None)


@torch.no_grad()
def _check_model(model: PreTrainedModel, device: torch.device) -> tuple[Support, bool]:
    """Check a model, and restore its modules.

    Return its support, and whether that holds for all models of its class and configuration.
    """
    empty_cache, name = cache_for(model), type(model).__name__
    if not isinstance(empty_cache, TransformersCache):
        reason = (
            f"{name} reads an encoder, but kvant's loop only continues text: use its own generate "
            "with kvant.cache_for"
        )
        return Support(SupportLevel.GENERATE, reason), True
    devices = [device] if device.type == "cuda" else []
    with restore_modules(model), torch.random.fork_rng(devices):
        model.eval()
        check = _ModelCheck(model, device, empty_cache)
        try:
            support = check.find_refusal()
        except CacheError as error:
            reason = f"{name} cannot use a kvant cache: {error}"
            return Support(SupportLevel.NOTHING, reason), True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # it may be temporary
            reason = f"{name} {NO_CONTINUATION} ({_shorten_error(error)}): {USE_GENERATE}"
            return Support(SupportLevel.GENERATE, reason), False
        if support is None:
            reason_for_turns = check.find_reason_for_turns()
            support = (
                Support(SupportLevel.RAGGED_BATCH)
                if reason_for_turns is None
                else Support(SupportLevel.ONE_SEQUENCE, reason_for_turns)
            )
    return support, check.holds_for_class


def _shorten_error(error: Exception) -> str:
    """Return the beginning of an error message, which may be long."""
    return shorten(f"{type(error).__name__}: {error}".splitlines()[0], 120, placeholder=" ...")


class _ModelCheck:
    """A check with two prompts of different lengths, and the same next token after both."""

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
        self.single_logits: list[Tensor] = []  # of the token after each prompt, decoded alone
        self.holds_for_class = True  # the result holds for all models of the class

    def find_refusal(self) -> Support | None:
        """Return the support of a model that kvant's loop cannot run, None for others."""
        name = type(self.model).__name__
        for prompt in self.prompts:
            cache = self.empty_cache.fork()
            self._compute_logits([prompt], [0], cache)
            lengths = f"after a prompt of {len(prompt)} tokens its cache holds {cache.length}"
            if cache.length < len(prompt):
                reason = (
                    f"{name} keeps no cache: {lengths}; leave kvant out and call {GENERATE_CALL}"
                )
                return Support(SupportLevel.NOTHING, reason)
            if cache.length > len(prompt):
                return Support(
                    SupportLevel.GENERATE, f"{name} {NO_CONTINUATION} ({lengths}): {USE_GENERATE}"
                )
            self.caches.append(cache)
            self.single_logits.append(self._decode_token(cache.fork(), len(prompt)))
        repeated = self._decode_token(self.caches[0].fork(), PROMPT_LENGTHS[0])
        self.holds_for_class = all(
            _are_comparable(logits) for logits in (*self.single_logits, repeated)
        )
        if not self.holds_for_class or _match_logits(repeated, self.single_logits[0]):
            return None
        return Support(
            SupportLevel.NOTHING,
            f"{name} keeps state of a sequence in its modules, outside of any cache, so a second "
            "sequence changes the outputs of the first; leave kvant out and call "
            f"{GENERATE_CALL}, one batch at a time",
        )

    def find_reason_for_turns(self) -> str | None:
        """Return why sequences must decode in turns; None if they can share a forward."""
        if not self.forward.takes_positions and any(
            layer.attends for layer in self.empty_cache.layer_info
        ):
            return "its forward takes no position_ids, so sequences cannot have different positions"
        if not self.holds_for_class:
            return "its logits are NaN or all equal, so those of two sequences cannot be compared"
        try:
            with ExitStack() as stack:
                if not get_attachments(self.model):  # else an engine has attached it already
                    attach(self.model)
                    stack.callback(detach, self.model)
                merged = merge(self.caches)
                logits = self._compute_logits([[self.token]] * 2, list(PROMPT_LENGTHS), merged)
        except torch.OutOfMemoryError:
            raise
        except CacheError as error:  # depends on the forward, not on the weights
            return _shorten_error(error)
        except Exception as error:  # may be temporary: CPU out of memory is a RuntimeError
            self.holds_for_class = False
            return _shorten_error(error)
        self.holds_for_class = not bool(logits.isnan().any())
        if all(_match_logits(*pair) for pair in zip(logits, self.single_logits, strict=True)):
            return None
        return "the logits of a sequence change in a batch with a sequence of another length"

    def _decode_token(self, cache: TransformersCache, length: int) -> Tensor:
        """Return the logits [vocabulary] of the token after a prompt."""
        return self._compute_logits([[self.token]], [length], cache)[0]

    def _compute_logits(
        self, prompts: list[list[int]], starts: list[int], cache: TransformersCache
    ) -> Tensor:
        """Return logits [sequences, vocabulary] of the last token of each sequence."""
        ids = torch.tensor(prompts, device=self.device)
        start = torch.tensor(starts, device=ids.device)[:, None]
        positions = start + torch.arange(ids.shape[1], device=ids.device)
        return self.forward(ids, positions, cache)[:, -1]


def _are_comparable(logits: Tensor) -> bool:
    """Return whether logits can be compared: none is NaN, and not all are equal."""
    finite = logits[torch.isfinite(logits)]  # a model may forbid a token by -inf
    return not bool(logits.isnan().any()) and bool((finite != finite[:1]).any())


def _match_logits(actual: Tensor, expected: Tensor) -> bool:
    """Return whether logits equal those expected, within rounding."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite):
        return False
    limit = LOGIT_TOLERANCES[expected.dtype.itemsize]
    actual, expected = actual[finite].double(), expected[finite].double()
    return bool((actual - expected).square().mean().sqrt() <= limit * expected.std())


def _choose_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Return tokens that are not special in the configuration."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or 64
    special = set(_find_special_tokens(model.config.to_dict()))
    ordinary = [token for token in range(size // 8, size // 2) if token not in special]
    step = max(1, len(ordinary) // count)
    return [ordinary[(i * step) % len(ordinary)] for i in range(count)]


def _find_special_tokens(options: dict[str, Any]) -> Iterator[int]:
    """Yield the ids of special tokens, also those in nested configurations."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _find_special_tokens(value)
        elif str(name).endswith(("_id", "_ids", "_index")):
            ids = value if isinstance(value, list | tuple) else [value]
            yield from (token for token in ids if isinstance(token, int))
