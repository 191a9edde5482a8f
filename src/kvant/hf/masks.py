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

from kvant.attention.mask import evaluate_mask
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.lazy_tensor import LazyTensor, materialize_tensor


def find_left_padding(mask: Tensor) -> list[int] | None:
    """Columns of padding before each sequence of [B, columns]; None where there are holes."""
    start = mask.to(torch.int8).argmax(-1)
    plain = torch.equal(mask.sum(-1), mask.shape[-1] - start)
    return [int(s) for s in start] if plain else None


MaskFunction = Callable[..., Tensor | None]  # of the host: the mask of one of its implementations
LOCAL_MASK_RULES: Mapping[str, Callable[[int], Mask]] = {  # the host's overlays on a causal mask
    "sliding_window_overlay.<locals>.inner_mask": lambda size: Mask(window=size),
    "chunked_overlay.<locals>.inner_mask": lambda size: Mask(chunk=size),
}


class LazyMask(LazyTensor):
    """What the host asked for: a rule where it is a known one, and the padding mask beside it."""

    mask_function: MaskFunction
    arguments: Mapping[str, Any]

    @classmethod
    def from_arguments(cls, mask_function: MaskFunction, arguments: Mapping[str, Any]) -> LazyMask:
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        # Models are known to ask a mask for its dtype, and to build beside it.
        kind = torch.bool if mask_function is sdpa_mask else arguments.get("dtype", torch.float32)
        made: LazyMask = cls.make_empty(shape, kind, torch.device(arguments.get("device", "cpu")))
        made.mask_function, made.arguments = mask_function, arguments
        return made

    def compute_dense(self, reason: str) -> Tensor:
        made = self.mask_function(**{**self.arguments, "allow_is_causal_skip": False})
        assert made is not None  # only a skip gives none
        return made

    @cached_property
    def original_mask(self) -> Tensor | None:
        """What the host would have made by itself; it may be nothing."""
        return self.mask_function(**self.arguments)

    @cached_property
    def rule(self) -> Mask | None:
        """None: a pattern that positions alone do not tell."""
        return parse_mask_function(
            self.arguments["mask_function"], self.arguments.get("local_size")
        )

    @cached_property
    def padding(self) -> list[int] | None:
        """Columns of left padding of each sequence; None where it is not that."""
        seen: Tensor | None = self.arguments.get("attention_mask")
        columns = self.arguments["q_offset"] + self.arguments["q_length"]
        if seen is None:
            return [0] * self.arguments["batch_size"]
        return find_left_padding(seen) if seen.ndim == 2 and seen.shape[1] == columns else None


def parse_mask_function(function: Callable[..., Any], local_size: int | None) -> Mask | None:
    """The rule that a mask function of the host stands for, if it is a known one."""
    if function is causal_mask_function:
        return Mask()
    cells = getattr(function, "__closure__", None)
    parts: Any = cells[0].cell_contents if cells else None
    if not isinstance(parts, tuple) or parts[1:] != (causal_mask_function,):
        return None
    rule = LOCAL_MASK_RULES.get(parts[0].__qualname__)
    return None if rule is None or local_size is None else rule(local_size)


def make_lazy_mask_function(mask_function: MaskFunction) -> MaskFunction:
    """The host's mask function, made lazy where attention may do without the mask."""

    def make_mask(**arguments: Any) -> Tensor | None:
        # Packed sequences, blocks of an image and encoders are the host's own business.
        if arguments.get("allow_is_bidirectional_skip"):
            return mask_function(**arguments)
        check_mask_width(arguments)
        if not arguments.get("allow_is_causal_skip", True):
            return mask_function(**arguments)
        return LazyMask.from_arguments(mask_function, arguments)

    return make_mask


def check_mask_width(arguments: Mapping[str, Any]) -> None:
    """Refuse an attention mask of more columns than tokens: its padding is displaced."""
    seen: Tensor | None = arguments.get("attention_mask")
    columns = arguments["q_offset"] + arguments["q_length"]
    if seen is not None and seen.ndim == 2 and seen.shape[1] > columns:
        raise CacheError(
            f"an attention_mask of {seen.shape[1]} columns for {columns} tokens: this model makes "
            "it wider than its text, and nothing tells which columns are padding; kvant.detach the "
            "model, or give its generate a cache from kvant.cache_for"
        )


PADDING_ATTRIBUTE = (
    "_kvant_padding"  # what was found of a mask, on it: every layer is handed the same one
)
CHUNK_PADDING_ATTRIBUTE = (
    "_kvant_told"  # the same of a mask for several queries, and what it was compared with
)


def resolve_mask(
    view: View, num_queries: int, mask: Tensor | None, causal: bool, narrows_window: bool
) -> tuple[View, Mask | Tensor] | None:
    """What `count` queries see; None where only dense rows can tell.

    `narrow` says that the view's own window is narrower than anything that the host knows of.
    """
    if num_queries > 1 and view.mask.chunk is not None and view.page_table.ragged:
        raise UnsupportedView(
            "chunks of sequences of different lengths begin in different columns, of which the "
            "host's mask knows nothing: read one token at a time"
        )
    if isinstance(mask, LazyMask):
        rule, padding = mask.rule, mask.padding
        if rule is not None and padding is not None and _agrees_with_padding(view, padding):
            if not narrows_window and rule.window is None and rule.chunk is None:
                check_model_window(view, num_queries)
            return hide_padding(view, padding), intersect_rules(view.mask, rule)
        mask = materialize_tensor(mask, "a pattern of the host's")
    if mask is None:  # the host hides nothing
        if causal and not narrows_window:
            check_model_window(view, num_queries)
        if view.page_table.has_padding:
            check_padding_hidden(view, num_queries)
        if causal or num_queries == 1:
            return view, view.mask
        return (view, Mask(causal=False)) if view.mask == Mask() else None
    padding = (
        _find_token_padding(view, mask)
        if num_queries == 1
        else _find_chunk_padding(view, num_queries, mask, narrows_window)
    )
    if padding is not None and _agrees_with_padding(view, padding):
        return hide_padding(view, padding), view.mask
    if view.page_table.ragged and num_queries == 1:
        check_mask_hides_nothing(mask)
        return view, view.mask
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, num_queries, -1)  # one row for all
    check_mask_hides_padding(view, mask)
    return view, restrict_mask_to_window(view, num_queries, mask) if narrows_window else mask


def _find_token_padding(view: View, mask: Tensor) -> list[int] | None:
    """The padding, where a mask for one query says no more than that."""
    _, heads, count, columns = mask.shape
    chunk = view.mask.chunk is not None
    if (heads, count, mask.dtype) != (1, 1, torch.bool) or chunk:
        return None
    version = None if mask.is_inference() else mask._version
    seen_at, known = getattr(mask, PADDING_ATTRIBUTE, (None, []))
    if seen_at is None or seen_at != version:
        known = find_left_padding(mask[:, 0, 0]) or []
        setattr(mask, PADDING_ATTRIBUTE, (version, known))
    if not known or (
        any(known) and view.page_table.layer_group.sinks and not has_known_padding(view)
    ):
        return None
    before = view.page_table.num_columns - columns
    return [n and n + before for n in known] * (view.batch // len(known))


def _find_chunk_padding(
    view: View, num_queries: int, mask: Tensor, narrows_window: bool
) -> list[int] | None:
    """The padding, where a mask for several queries says that, and what the view's rule does."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, num_queries):
        return None
    # A window of the view's own is narrower than the host's, and lies on top.
    rule = replace(view.mask, window=None, sinks=0) if narrows_window else view.mask
    version = None if mask.is_inference() else mask._version
    asked = (version, rule, view.page_table.num_columns, view.batch, tuple(_compute_starts(view)))
    known: tuple[object, list[int] | None] = getattr(mask, CHUNK_PADDING_ATTRIBUTE, (None, None))
    if known[0] != asked:
        known = (asked, _match_chunk_padding(view, num_queries, mask, rule))
        setattr(mask, CHUNK_PADDING_ATTRIBUTE, known)
    return known[1]


def _match_chunk_padding(
    view: View, num_queries: int, mask: Tensor, rule: Mask
) -> list[int] | None:
    batch, columns = view.batch, view.page_table.num_columns
    before = columns - mask.shape[-1]
    guesses = [_compute_starts(view)]
    if not has_known_padding(view) and before == 0 and not view.page_table.layer_group.sinks:
        padding = find_left_padding(mask[:, 0, -1])
        guesses += [padding * (batch // len(padding))] if padding else []
    k = torch.arange(columns, device=mask.device)
    for guess in guesses:
        start = torch.tensor(guess, device=mask.device).view(-1, 1, 1, 1)
        seen = evaluate_mask(rule, k[-num_queries:, None] - start, k - start)
        hidden, rest = seen[..., :before], seen[..., before:]
        if not bool(hidden.any()) and bool((rest == mask).all()):
            return guess
    return None


def _compute_starts(view: View) -> list[int]:
    """The column of the first position of each sequence."""
    extent = view.page_table
    starts: list[int] = extent.reduce_to_sequences(extent.num_columns - extent.lengths).tolist()
    return starts


def has_known_padding(view: View) -> bool:
    """Was padding told, and so not stored?"""
    return view.page_table.has_padding


def _agrees_with_padding(view: View, padding: list[int]) -> bool:
    """Does the mask say no other than what was told before the first rows?"""
    if view.page_table.ragged and not any(padding):
        return True
    if has_known_padding(view):
        return _compute_starts(view) == padding
    # Chunks count from the first token: where that is hidden only, positions do not tell them.
    return view.mask.chunk is None or not any(padding)


def hide_padding(view: View, padding: list[int]) -> View:
    """The view, with the padding hidden that only a mask tells of."""
    if not any(padding) or has_known_padding(view):
        return view
    if view.page_table.layer_group.sinks or view.page_table.pruned_at.any():
        raise make_missing_padding_error()
    return view._replace(page_table=view.page_table.mask_leading_rows(padding))


def check_padding_hidden(view: View, num_queries: int) -> None:
    """Refuse to show padding that was told: it is not there. Without a mask nobody hides it."""
    if not has_known_padding(view):
        return
    window, columns = view.mask.window, view.page_table.num_columns
    low = 0 if window is None else max(0, columns - num_queries - window + 1)
    if low < max(_compute_starts(view)):
        raise make_padding_mismatch_error(view)


def check_model_window(view: View, num_queries: int) -> None:
    """Refuse a prompt beyond the model's own window, of which the model hides nothing."""
    window = view.mask.window
    if window is not None and num_queries > window:
        raise UnsupportedView(
            f"{num_queries} tokens at once on a layer with a window of {window}, and the model "
            "lets each "
            f"see all before it: give prompts in chunks of at most {window} tokens "
            "(prefill_chunk), or leave kvant out"
        )


def check_mask_hides_nothing(mask: Tensor) -> None:
    """Refuse what a mask says of columns, where each sequence has its newest token in another."""
    if not bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all()):
        raise UnsupportedView(
            "a mask or a bias that the model made for one length, on sequences of different "
            "lengths: extract the sequences one by one"
        )


def check_mask_hides_padding(view: View, mask: Tensor) -> None:
    """Refuse a mask that shows what was told to be padding."""
    if not has_known_padding(view):
        return
    newest = mask[:, :, -1:]
    shown = newest if mask.dtype == torch.bool else newest > torch.finfo(mask.dtype).min / 2
    columns = view.page_table.num_columns
    column = torch.arange(columns - mask.shape[-1], columns, device=mask.device)
    start = torch.tensor(_compute_starts(view), device=mask.device).view(-1, 1, 1, 1)
    if bool((shown & (column < start)).any()):
        raise make_padding_mismatch_error(view)


def make_padding_mismatch_error(view: View) -> CacheError:
    return CacheError(
        f"sequences that began at columns {_compute_starts(view)}, as was told before the first "
        "rows, "
        "begin elsewhere by this mask, but padding is not stored: reset the cache, or give this "
        "mask to kvant.cache_for(..., attention_mask=...) and read all tokens again"
    )


def make_missing_padding_error() -> CacheError:
    return CacheError(
        "sinks and pruned rows of a left-padded batch need the padding before the first rows: give "
        "kvant.cache_for(..., attention_mask=...), or kvant.attach the model; a window without "
        "sinks is window=N,sinks=0"
    )


def restrict_mask_to_window(view: View, num_queries: int, mask: Tensor) -> Tensor:
    """The host's mask, and beside it the window that the host knows nothing of."""
    if mask.dtype != torch.bool:
        raise UnsupportedView(
            f"a mask of {mask.dtype} beside a window that the model does not have itself: "
            "kvant.attach the model, or leave the window out"
        )
    sinks, columns = view.page_table.layer_group.sinks, view.page_table.num_columns
    whole = mask.shape[-1] == columns
    if not has_known_padding(view) and sinks and whole and not bool(mask[:, :, -1, :sinks].all()):
        raise make_missing_padding_error()
    k = torch.arange(columns - mask.shape[-1], columns, device=mask.device)
    q = torch.arange(columns - num_queries, columns, device=mask.device)
    start = torch.tensor(_compute_starts(view), device=mask.device).view(-1, 1, 1, 1)
    rule = replace(view.mask, causal=False, chunk=None)  # those the host's mask has already
    return mask & evaluate_mask(rule, q[:, None] - start, k - start)


def intersect_rules(view_rule: Mask, model_rule: Mask) -> Mask:
    """What both rules let through: they are of the same layer, so one of them is the narrower."""
    windows = [w for w in (view_rule.window, model_rule.window) if w is not None]
    return replace(
        view_rule, window=min(windows, default=None), chunk=view_rule.chunk or model_rule.chunk
    )
