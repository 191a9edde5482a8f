"""The host's masks, as rules over positions or as they are.

A mask that is a known pattern, or that hides left padding and nothing else, becomes a rule: then
nothing grows with the context, and the padding is all that the view has to learn.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvant.attention.mask import visible
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.lazies import dense
from kvant.hf.masks import LazyMask
from kvant.hf.padding import left_padding

PADDING = "_kvant_padding"  # what was found of a mask, on it: every layer is handed the same one
TOLD = "_kvant_told"  # the same of a mask for several queries, and what it was compared with


def rule_of(
    view: View, count: int, mask: Tensor | None, causal: bool, narrow: bool
) -> tuple[View, Mask | Tensor] | None:
    """What `count` queries see; None where only dense rows can tell.

    `narrow` says that the view's own window is narrower than anything that the host knows of.
    """
    if isinstance(mask, LazyMask):
        rule, padding = mask.rule, mask.padding
        if rule is not None and padding is not None and _agree(view, padding):
            return padded(view, padding), both(view.mask, rule)
        mask = dense(mask, "a pattern of the host's")
    if mask is None:  # the host hides nothing
        view = unpadded(view) if not view.keys.sinks.shape[2] else begun(view, count)
        if causal or count == 1:
            return view, view.mask
        return (view, Mask(causal=False)) if view.mask == Mask() else None
    padding = _padding_of(view, mask) if count == 1 else _told_by(view, count, mask, narrow)
    if padding is not None and _agree(view, padding):
        return padded(view, padding), view.mask
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, count, -1)  # one row for all
    view = untold(view, mask)
    return view, within_window(view, count, mask) if narrow else mask


def _padding_of(view: View, mask: Tensor) -> list[int] | None:
    """The padding, where a mask for one query says no more than that."""
    batch, heads, count, columns = mask.shape
    if (heads, count, mask.dtype) != (1, 1, torch.bool) or view.mask.chunk is not None:
        return None
    version = None if mask.is_inference() else mask._version
    seen_at, known = getattr(mask, PADDING, (None, []))
    if seen_at is None or seen_at != version:
        known = left_padding(mask[:, 0, 0]) or []
        setattr(mask, PADDING, (version, known))
    if not known or (any(known) and view.keys.sinks.shape[2] and not view.padding):
        return None
    before = view.columns - columns
    return [n and n + before for n in known] * (view.start.shape[0] // batch)


def _told_by(view: View, count: int, mask: Tensor, narrow: bool) -> list[int] | None:
    """The padding, where a mask for several queries says that, and what the view's rule does."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, count):
        return None
    # A window of the view's own is narrower than the host's, and lies on top.
    rule = replace(view.mask, window=None, sinks=0) if narrow else view.mask
    version = None if mask.is_inference() else mask._version
    asked = (version, rule, view.columns, view.start.shape[0], view.padding)
    known: tuple[object, list[int] | None] = getattr(mask, TOLD, (None, None))
    if known[0] != asked:
        known = (asked, _found(view, count, mask, rule))
        setattr(mask, TOLD, known)
    return known[1]


def _found(view: View, count: int, mask: Tensor, rule: Mask) -> list[int] | None:
    batch, before = view.start.shape[0], view.columns - mask.shape[-1]
    guesses = [view.start.tolist()]
    if view.padding == 0 and before == 0 and not view.keys.sinks.shape[2]:
        padding = left_padding(mask[:, 0, -1])
        guesses += [padding * (batch // len(padding))] if padding else []
    k = torch.arange(view.columns, device=mask.device)
    for guess in guesses:
        start = torch.tensor(guess, device=mask.device).view(-1, 1, 1, 1)
        seen = visible(rule, k[-count:, None] - start, k - start)
        hidden, rest = seen[..., :before], seen[..., before:]
        if not bool(hidden.any()) and bool((rest == mask).all()):
            return guess
    return None


def _agree(view: View, padding: list[int]) -> bool:
    """Does the mask say what was told before the first rows? If not, the mask is right."""
    return view.padding == 0 or view.start.tolist() == padding


def padded(view: View, padding: list[int]) -> View:
    """The view, with the padding that only a mask tells of."""
    most = max(padding, default=0)
    if most == 0 or view.padding > 0:
        return view
    if view.keys.sinks.shape[2]:
        raise padding_needed()
    return replace(view, start=torch.tensor(padding, device=view.start.device), padding=most)


def unpadded(view: View) -> View:
    """The view, without the padding that was told before the first rows."""
    if view.padding == 0:
        return view
    return replace(view, start=torch.zeros_like(view.start), padding=0)


def begun(view: View, count: int) -> View:
    """The view, if no query stands where padding was told: without a mask nobody knows better."""
    if view.columns - count < view.padding:
        raise told_otherwise(view)
    return view


def untold(view: View, mask: Tensor) -> View:
    """The view beside a mask that says otherwise than was told: what it shows is seen.

    After a crop below the first token of a sequence it may begin elsewhere. Its sinks do not.
    """
    if view.padding == 0 or not view.keys.sinks.shape[2]:
        return unpadded(view)
    newest = mask[:, :, -1:]
    shown = newest if mask.dtype == torch.bool else newest > torch.finfo(mask.dtype).min / 2
    column = torch.arange(view.columns - mask.shape[-1], view.columns, device=mask.device)
    if bool((shown & (column < view.start.view(-1, 1, 1, 1))).any()):
        raise told_otherwise(view)
    return view


def told_otherwise(view: View) -> CacheError:
    return CacheError(
        f"sequences that began at columns {view.start.tolist()}, as was told before the first "
        "rows, begin elsewhere by this mask, but their sinks do not: reset the cache, or give "
        "this mask to kvant.cache_for(..., attention_mask=...) and read all tokens again"
    )


def padding_needed() -> CacheError:
    return CacheError(
        "sinks of a left-padded batch need the padding before the first rows: give "
        "kvant.cache_for(..., attention_mask=...), or kvant.attach the model"
    )


def within_window(view: View, count: int, mask: Tensor) -> Tensor:
    """The host's mask, and beside it the window that the host knows nothing of."""
    if mask.dtype != torch.bool:
        raise UnsupportedView(
            f"a mask of {mask.dtype} beside a window that the model does not have itself: "
            "kvant.attach the model, or leave the window out"
        )
    sinks, whole = view.keys.sinks.shape[2], mask.shape[-1] == view.columns
    if view.padding == 0 and sinks and whole and not bool(mask[:, :, -1, :sinks].all()):
        raise padding_needed()
    k = torch.arange(view.columns - mask.shape[-1], view.columns, device=mask.device)
    q = torch.arange(view.columns - count, view.columns, device=mask.device)
    start = view.start.view(-1, 1, 1, 1)
    rule = replace(view.mask, causal=False, chunk=None)  # those the host's mask has already
    return mask & visible(rule, q[:, None] - start, k - start)


def both(own: Mask, host: Mask) -> Mask:
    """What both rules let through: they are of the same layer, so one of them is the narrower."""
    windows = [w for w in (own.window, host.window) if w is not None]
    return replace(own, window=min(windows, default=None), chunk=own.chunk or host.chunk)
