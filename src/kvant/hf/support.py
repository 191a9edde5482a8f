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
from kvant.hf.attach import attach, attachments, detach
from kvant.hf.attention import host_name
from kvant.hf.build import cache_for
from kvant.hf.cache import HostCache
from kvant.hf.forward import TokenForward
from kvant.hf.modules import restore_modules

log = logging.getLogger("kvant")

LENGTHS = (5, 9)  # tokens of the two prompts: different, and few
# Root mean square of the difference of logits, by their standard deviation. Wrong ones differ by
# about 1; rounding of 16 bits may send a token to other experts.
TOLERANCE = {2: 0.1, 4: 0.01, 8: 0.01}  # by bytes of a number

STOCK = "model.generate(...)"
CONTINUES_NOT = "does not continue what its cache holds by new tokens alone"
OWN = (
    "kvant's own loop and engine cannot run it; use model.generate(..., "
    "cache=kvant.cache_for(model, spec))"
)


class Level(IntEnum):
    """What a model supports: each level includes those before it."""

    NOTHING = 0  # no cache of kvant's
    GENERATE = 1  # transformers' own `generate` with a cache of kvant's
    ALONE = 2  # kvant's loop and engine, one sequence a forward
    TOGETHER = 3  # sequences of different lengths in one forward


LEVELS = {
    Level.NOTHING: "refused",
    Level.GENERATE: "for transformers' generate alone",
    Level.ALONE: "sequences decode in turns",
    Level.TOGETHER: "sequences of different lengths decode together",
}


class Support(NamedTuple):
    """A level, and the reason why it is no higher."""

    level: Level
    reason: str = ""

    def require(self, level: Level) -> None:
        """Raise the reason as an error if the level is not reached."""
        if self.level < level:
            raise CacheError(self.reason)


class Verdict(NamedTuple):
    """What a model supports, and whether that holds for each model of its class."""

    support: Support
    lasting: bool  # for the same configuration


_lock = RLock()
_known: dict[tuple[object, ...], Support] = {}


def support_of(model: PreTrainedModel) -> Support:
    """Return what the model supports; the first call for a class and configuration runs it."""
    device = find_device(model)
    if device is None:  # there are no weights to compute with
        return Support(Level.TOGETHER)
    config = model.config
    name = host_name(config._attn_implementation)
    settings = repr(config.to_dict())  # not its JSON: it may hold any object
    key = (type(model), settings, name, model.dtype, device.type)
    with _lock:
        found = _known.get(key)
        if found is None:
            began = time.perf_counter()
            found, lasting = _check_model(model, device)
            if lasting:
                _known[key] = found
            seconds = time.perf_counter() - began
            said = f"{LEVELS[found.level]}, checked in {seconds:.2f} s"
            why = f": {found.reason}" if found.reason else ""
            log.info("%s: %s%s", type(model).__name__, said, why)
    return found


def find_device(model: PreTrainedModel) -> torch.device | None:
    """Return the device on which a model takes tokens, None where all its weights are on meta.

    Some may be on meta until a hook loads them for their layer, as those that accelerate offloads.
    """
    return next((weight.device for weight in model.parameters() if not weight.is_meta), None)


@torch.no_grad()
def _check_model(model: PreTrainedModel, device: torch.device) -> Verdict:
    """Run the forwards of a check on a model, and leave it as it was."""
    empty, name = cache_for(model), type(model).__name__
    if not isinstance(empty, HostCache):
        reason = (
            f"{name} reads an encoder: the loop continues text, it does not translate; use its "
            "own generate with kvant.cache_for"
        )
        return Verdict(Support(Level.GENERATE, reason), lasting=True)
    devices = [device] if device.type == "cuda" else []
    with restore_modules(model), torch.random.fork_rng(devices):
        model.eval()
        check = _ModelCheck(model, device, empty)
        try:
            support = check.find_refusal()
        except CacheError as error:
            reason = f"{name} cannot use a cache of kvant's: {error}"
            return Verdict(Support(Level.NOTHING, reason), lasting=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # it may not come again
            reason = f"{name} {CONTINUES_NOT} ({_shorten_error(error)}): {OWN}"
            return Verdict(Support(Level.GENERATE, reason), lasting=False)
        if support is None:
            turns = check.find_reason_for_turns()
            support = Support(Level.TOGETHER) if turns is None else Support(Level.ALONE, turns)
    return Verdict(support, check.lasting)


def _shorten_error(error: Exception) -> str:
    """Return the beginning of an error: those about shapes are long."""
    return shorten(f"{type(error).__name__}: {error}".splitlines()[0], 120, placeholder=" ...")


class _ModelCheck:
    """Two prompts of different lengths, and the same next token behind both."""

    def __init__(self, model: PreTrainedModel, device: torch.device, empty: HostCache) -> None:
        self.model, self.device = model, device
        self.forward = TokenForward(model)
        tokens = _choose_tokens(model, sum(LENGTHS) + 1)
        self.prompts = tokens[: LENGTHS[0]], tokens[LENGTHS[0] : -1]
        self.token = tokens[-1]
        self.empty = empty
        self.caches: list[HostCache] = []  # of the prompts
        self.alone: list[Tensor] = []  # logits of the token behind each prompt
        self.lasting = True  # the findings hold for each model of the class

    def find_refusal(self) -> Support | None:
        """Return the level of a model that kvant cannot run token by token, None for others."""
        name = type(self.model).__name__
        for prompt in self.prompts:
            cache = self.empty.fork()
            self._compute([prompt], [0], cache)
            held = f"after a prompt of {len(prompt)} tokens its cache holds {cache.length}"
            if cache.length < len(prompt):
                reason = f"{name} keeps no cache: {held}; leave kvant out and call {STOCK}"
                return Support(Level.NOTHING, reason)
            if cache.length > len(prompt):
                return Support(Level.GENERATE, f"{name} {CONTINUES_NOT} ({held}): {OWN}")
            self.caches.append(cache)
            self.alone.append(self._decode_token(cache.fork(), len(prompt)))
        again = self._decode_token(self.caches[0].fork(), LENGTHS[0])
        self.lasting = all(_are_comparable(logits) for logits in (*self.alone, again))
        if not self.lasting or _match_logits(again, self.alone[0]):
            return None
        return Support(
            Level.NOTHING,
            f"{name} keeps state of a sequence in its modules, where no cache knows of it, and a "
            "second sequence changes what the first one gets; leave kvant out and call "
            f"{STOCK}, one batch after the other",
        )

    def find_reason_for_turns(self) -> str | None:
        """Return why sequences cannot decode in one forward, None where they can."""
        if not self.forward.takes_positions and any(one.attends for one in self.empty.described):
            return "its forward takes no position_ids, so each sequence cannot have its own"
        if not self.lasting:
            return "its logits are NaN or all alike, so those of two sequences cannot be compared"
        try:
            with _attach_meanwhile(self.model):
                merged = merge(self.caches)
                found = self._compute([[self.token]] * 2, list(LENGTHS), merged)
        except torch.OutOfMemoryError:
            raise
        except CacheError as error:  # of what the forward does, whatever its weights are
            return _shorten_error(error)
        except Exception as error:  # it may not come again: a CPU out of memory is a RuntimeError
            self.lasting = False
            return _shorten_error(error)
        self.lasting = not bool(found.isnan().any())
        if all(_match_logits(*both) for both in zip(found, self.alone, strict=True)):
            return None
        return "a sequence gets other logits beside one of another length than alone"

    def _decode_token(self, cache: HostCache, length: int) -> Tensor:
        """Return the logits [vocabulary] of the token behind a prompt."""
        return self._compute([[self.token]], [length], cache)[0]

    def _compute(self, rows: list[list[int]], begins: list[int], cache: HostCache) -> Tensor:
        """Return logits [sequences, vocabulary] behind the last token of each row."""
        ids = torch.tensor(rows, device=self.device)
        first = torch.tensor(begins, device=ids.device)[:, None]
        positions = first + torch.arange(ids.shape[1], device=ids.device)
        return self.forward(ids, positions, cache)[:, -1]


@contextmanager
def _attach_meanwhile(model: PreTrainedModel) -> Iterator[None]:
    """Attach the model within, as an engine does, unless it is attached."""
    if attachments(model):
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


def _match_logits(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits are those expected, but for rounding."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(found), finite):
        return False
    limit = TOLERANCE[expected.dtype.itemsize]
    found, expected = found[finite].double(), expected[finite].double()
    return bool((found - expected).square().mean().sqrt() <= limit * expected.std())


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
