"""The host's masks, as rules over positions or as they are.

The host asks for a mask before it asks for keys, with a function over indices. Where that function
is one of the known patterns, or a mask hides left padding and nothing else, attention needs the
rule and the padding, and nothing that grows with the context. Any other pattern is evaluated by
the host's own code.

The host counts columns: all sequences of a batch end in the same one, and what stands before the
first token of a sequence is padding. Padding that was told is not stored; rows that only a mask
tells to be padding are stored like others, and hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvant.attention.mask import visible
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.lazies import Lazy, dense


def left_padding(seen: Tensor) -> list[int] | None:
    """Columns of padding before each sequence of [B, columns]; None where there are holes."""
    start = seen.to(torch.int8).argmax(-1)
    plain = torch.equal(seen.sum(-1), seen.shape[-1] - start)
    return [int(s) for s in start] if plain else None


HostMask = Callable[..., Tensor | None]  # of the host: the mask of one of its implementations
LOCAL: Mapping[str, Callable[[int], Mask]] = {  # the host's overlays on a causal mask
    "sliding_window_overlay.<locals>.inner_mask": lambda size: Mask(window=size),
    "chunked_overlay.<locals>.inner_mask": lambda size: Mask(chunk=size),
}


class LazyMask(Lazy):
    """What the host asked for: a rule where it is a known one, and the padding mask beside it."""

    host: HostMask
    asked: Mapping[str, Any]

    @classmethod
    def of(cls, host: HostMask, asked: Mapping[str, Any]) -> LazyMask:
        shape = (asked["batch_size"], 1, asked["q_length"], asked["kv_length"])
        # Models are known to ask a mask for its dtype, and to build beside it.
        kind = torch.bool if host is sdpa_mask else asked.get("dtype", torch.float32)
        made: LazyMask = cls.shaped(shape, kind, torch.device(asked.get("device", "cpu")))
        made.host, made.asked = host, asked
        return made

    def make(self, why: str) -> Tensor:
        made = self.host(**{**self.asked, "allow_is_causal_skip": False})
        assert made is not None  # only a skip gives none
        return made

    @cached_property
    def original(self) -> Tensor | None:
        """What the host would have made by itself; it may be nothing."""
        return self.host(**self.asked)

    @cached_property
    def rule(self) -> Mask | None:
        """None: a pattern that positions alone do not tell."""
        return pattern(self.asked["mask_function"], self.asked.get("local_size"))

    @cached_property
    def padding(self) -> list[int] | None:
        """Columns of left padding of each sequence; None where it is not that."""
        seen: Tensor | None = self.asked.get("attention_mask")
        columns = self.asked["q_offset"] + self.asked["q_length"]
        if seen is None:
            return [0] * self.asked["batch_size"]
        return left_padding(seen) if seen.ndim == 2 and seen.shape[1] == columns else None


def pattern(function: Callable[..., Any], local: int | None) -> Mask | None:
    """The rule that a mask function of the host stands for, if it is a known one."""
    if function is causal_mask_function:
        return Mask()
    cells = getattr(function, "__closure__", None)
    parts: Any = cells[0].cell_contents if cells else None
    if not isinstance(parts, tuple) or parts[1:] != (causal_mask_function,):
        return None
    rule = LOCAL.get(parts[0].__qualname__)
    return None if rule is None or local is None else rule(local)


def lazily(host: HostMask) -> HostMask:
    """The host's mask function, made lazy where attention may do without the mask."""

    def mask(**asked: Any) -> Tensor | None:
        # Packed sequences, blocks of an image and encoders are the host's own business.
        if asked.get("allow_is_bidirectional_skip"):
            return host(**asked)
        check_width(asked)
        if not asked.get("allow_is_causal_skip", True):
            return host(**asked)
        return LazyMask.of(host, asked)

    return mask


def check_width(asked: Mapping[str, Any]) -> None:
    """Refuse an attention mask of more columns than tokens: its padding is displaced."""
    seen: Tensor | None = asked.get("attention_mask")
    columns = asked["q_offset"] + asked["q_length"]
    if seen is not None and seen.ndim == 2 and seen.shape[1] > columns:
        raise CacheError(
            f"an attention_mask of {seen.shape[1]} columns for {columns} tokens: this model makes "
            "it wider than its text, and nothing tells which columns are padding; kvant.detach the "
            "model, or give its generate a cache from kvant.cache_for"
        )


PADDING = "_kvant_padding"  # what was found of a mask, on it: every layer is handed the same one
TOLD = "_kvant_told"  # the same of a mask for several queries, and what it was compared with


def rule_of(
    view: View, count: int, mask: Tensor | None, causal: bool, narrow: bool
) -> tuple[View, Mask | Tensor] | None:
    """What `count` queries see; None where only dense rows can tell.

    `narrow` says that the view's own window is narrower than anything that the host knows of.
    """
    if count > 1 and view.mask.chunk is not None and view.extent.ragged:
        raise UnsupportedView(
            "chunks of sequences of different lengths begin in different columns, of which the "
            "host's mask knows nothing: read one token at a time"
        )
    if isinstance(mask, LazyMask):
        rule, padding = mask.rule, mask.padding
        if rule is not None and padding is not None and _agree(view, padding):
            if not narrow and rule.window is None and rule.chunk is None:
                check_window(view, count)
            return padded(view, padding), both(view.mask, rule)
        mask = dense(mask, "a pattern of the host's")
    if mask is None:  # the host hides nothing
        if causal and not narrow:
            check_window(view, count)
        if view.extent.padded:
            check_shown(view, count)
        if causal or count == 1:
            return view, view.mask
        return (view, Mask(causal=False)) if view.mask == Mask() else None
    padding = _padding_of(view, mask) if count == 1 else _told_by(view, count, mask, narrow)
    if padding is not None and _agree(view, padding):
        return padded(view, padding), view.mask
    if view.extent.ragged and count == 1:
        check_hides_nothing(mask)
        return view, view.mask
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, count, -1)  # one row for all
    check_stored(view, mask)
    return view, within_window(view, count, mask) if narrow else mask


def _padding_of(view: View, mask: Tensor) -> list[int] | None:
    """The padding, where a mask for one query says no more than that."""
    _, heads, count, columns = mask.shape
    chunk = view.mask.chunk is not None
    if (heads, count, mask.dtype) != (1, 1, torch.bool) or chunk:
        return None
    version = None if mask.is_inference() else mask._version
    seen_at, known = getattr(mask, PADDING, (None, []))
    if seen_at is None or seen_at != version:
        known = left_padding(mask[:, 0, 0]) or []
        setattr(mask, PADDING, (version, known))
    if not known or (any(known) and view.extent.kind.sinks and not told(view)):
        return None
    before = view.extent.columns - columns
    return [n and n + before for n in known] * (view.batch // len(known))


def _told_by(view: View, count: int, mask: Tensor, narrow: bool) -> list[int] | None:
    """The padding, where a mask for several queries says that, and what the view's rule does."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, count):
        return None
    # A window of the view's own is narrower than the host's, and lies on top.
    rule = replace(view.mask, window=None, sinks=0) if narrow else view.mask
    version = None if mask.is_inference() else mask._version
    asked = (version, rule, view.extent.columns, view.batch, tuple(_starts(view)))
    known: tuple[object, list[int] | None] = getattr(mask, TOLD, (None, None))
    if known[0] != asked:
        known = (asked, _found(view, count, mask, rule))
        setattr(mask, TOLD, known)
    return known[1]


def _found(view: View, count: int, mask: Tensor, rule: Mask) -> list[int] | None:
    batch, columns = view.batch, view.extent.columns
    before = columns - mask.shape[-1]
    guesses = [_starts(view)]
    if not told(view) and before == 0 and not view.extent.kind.sinks:
        padding = left_padding(mask[:, 0, -1])
        guesses += [padding * (batch // len(padding))] if padding else []
    k = torch.arange(columns, device=mask.device)
    for guess in guesses:
        start = torch.tensor(guess, device=mask.device).view(-1, 1, 1, 1)
        seen = visible(rule, k[-count:, None] - start, k - start)
        hidden, rest = seen[..., :before], seen[..., before:]
        if not bool(hidden.any()) and bool((rest == mask).all()):
            return guess
    return None


def _starts(view: View) -> list[int]:
    """The column of the first position of each sequence."""
    extent = view.extent
    starts: list[int] = extent.of_sequences(extent.columns - extent.lengths).tolist()
    return starts


def told(view: View) -> bool:
    """Was padding told, and so not stored?"""
    return view.extent.padded


def _agree(view: View, padding: list[int]) -> bool:
    """Does the mask say no other than what was told before the first rows?"""
    if view.extent.ragged and not any(padding):
        return True
    if told(view):
        return _starts(view) == padding
    # Chunks count from the first token: where that is hidden only, positions do not tell them.
    return view.mask.chunk is None or not any(padding)


def padded(view: View, padding: list[int]) -> View:
    """The view, with the padding hidden that only a mask tells of."""
    if not any(padding) or told(view):
        return view
    if view.extent.kind.sinks or view.extent.pruned.any():
        raise padding_needed()
    return view._replace(extent=view.extent.hiding(padding))


def check_shown(view: View, count: int) -> None:
    """Refuse to show padding that was told: it is not there. Without a mask nobody hides it."""
    if not told(view):
        return
    window, columns = view.mask.window, view.extent.columns
    low = 0 if window is None else max(0, columns - count - window + 1)
    if low < max(_starts(view)):
        raise told_otherwise(view)


def check_window(view: View, count: int) -> None:
    """Refuse a prompt beyond the model's own window, of which the model hides nothing."""
    window = view.mask.window
    if window is not None and count > window:
        raise UnsupportedView(
            f"{count} tokens at once on a layer with a window of {window}, and the model lets each "
            f"see all before it: give prompts in chunks of at most {window} tokens "
            "(prefill_chunk), or leave kvant out"
        )


def check_hides_nothing(mask: Tensor) -> None:
    """Refuse what a mask says of columns, where each sequence has its newest token in another."""
    if not bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all()):
        raise UnsupportedView(
            "a mask or a bias that the model made for one length, on sequences of different "
            "lengths: extract the sequences one by one"
        )


def check_stored(view: View, mask: Tensor) -> None:
    """Refuse a mask that shows what was told to be padding."""
    if not told(view):
        return
    newest = mask[:, :, -1:]
    shown = newest if mask.dtype == torch.bool else newest > torch.finfo(mask.dtype).min / 2
    columns = view.extent.columns
    column = torch.arange(columns - mask.shape[-1], columns, device=mask.device)
    start = torch.tensor(_starts(view), device=mask.device).view(-1, 1, 1, 1)
    if bool((shown & (column < start)).any()):
        raise told_otherwise(view)


def told_otherwise(view: View) -> CacheError:
    return CacheError(
        f"sequences that began at columns {_starts(view)}, as was told before the first rows, "
        "begin elsewhere by this mask, but padding is not stored: reset the cache, or give this "
        "mask to kvant.cache_for(..., attention_mask=...) and read all tokens again"
    )


def padding_needed() -> CacheError:
    return CacheError(
        "sinks and pruned rows of a left-padded batch need the padding before the first rows: give "
        "kvant.cache_for(..., attention_mask=...), or kvant.attach the model; a window without "
        "sinks is window=N,sinks=0"
    )


def within_window(view: View, count: int, mask: Tensor) -> Tensor:
    """The host's mask, and beside it the window that the host knows nothing of."""
    if mask.dtype != torch.bool:
        raise UnsupportedView(
            f"a mask of {mask.dtype} beside a window that the model does not have itself: "
            "kvant.attach the model, or leave the window out"
        )
    sinks, columns = view.extent.kind.sinks, view.extent.columns
    whole = mask.shape[-1] == columns
    if not told(view) and sinks and whole and not bool(mask[:, :, -1, :sinks].all()):
        raise padding_needed()
    k = torch.arange(columns - mask.shape[-1], columns, device=mask.device)
    q = torch.arange(columns - count, columns, device=mask.device)
    start = torch.tensor(_starts(view), device=mask.device).view(-1, 1, 1, 1)
    rule = replace(view.mask, causal=False, chunk=None)  # those the host's mask has already
    return mask & visible(rule, q[:, None] - start, k - start)


def both(own: Mask, host: Mask) -> Mask:
    """What both rules let through: they are of the same layer, so one of them is the narrower."""
    windows = [w for w in (own.window, host.window) if w is not None]
    return replace(own, window=min(windows, default=None), chunk=own.chunk or host.chunk)
