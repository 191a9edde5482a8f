"""Define the state that the layers of one TransformersCache share, and the text of `explain`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from transformers import GenerationMixin

from kvant.cache import Cache
from kvant.cache.reports import merge_equal_layers
from kvant.errors import CacheError
from kvant.hf.model import ModelLayer
from kvant.recipes import GroupSpec, LayerSpec, Recipe
from kvant.spec import format_codecs

T = TypeVar("T")
GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__


@dataclass
class AttentionStats:
    """Attention calls of one layer, by how its rows were read."""

    fused_calls: int = 0  # computed on the stored pages
    prompt_calls: int = 0  # first chunks, which attend to their own rows only
    materialized: Counter[str] = field(default_factory=Counter)  # by the operation that needed it
    tensor_masks: int = 0  # masks that could not be replaced by a rule


def sum_attention_stats(layers: Iterable[AttentionStats]) -> dict[str, int]:
    """Return the sums over layers, under the names of `stats()`."""
    layers = [*layers]
    return {
        "fused": sum(stats.fused_calls for stats in layers),
        "prompts": sum(stats.prompt_calls for stats in layers),
        "materialized": sum(stats.materialized.total() for stats in layers),
        "masks": sum(stats.tensor_masks for stats in layers),
    }


@dataclass
class ReplayStats:
    """The number of tokens that were replayed, and why the latest token was not."""

    num_tokens: int = 0
    refusal: str | None = None


@dataclass(eq=False)
class CacheContext:
    """The cache that the layers write to, and facts about the batch."""

    states: Cache
    padding: tuple[int, ...] | None = None  # columns of left padding, None if unknown
    mask_columns: int | None = None  # columns of the attention mask with that padding
    is_cross: bool = False  # the rows come from an encoder
    attachable: bool = False  # `attach` can switch the model to kvant's attention
    slack: int = 0  # newest tokens that every layer can rewind exactly, set for speculation
    record_past: bool = False  # speculation: a chunk attends as single tokens would
    first_forward_done: bool = False  # a forward appended rows to every layer
    layers_without_rows: list[int] | None = None  # still empty after an incomplete first forward
    attention_stats: dict[int, AttentionStats] = field(default_factory=dict)
    replay_stats: ReplayStats = field(default_factory=ReplayStats)
    num_moves: int = 0  # of single layers between devices, which `states` does not count

    @property
    def change_counts(self) -> tuple[int, int]:
        """Counters that grow whenever tensors may have moved to other addresses."""
        return self.states.holder.num_changes, self.num_moves

    def end_speculation(self) -> None:
        """Treat later chunks as prompts again."""
        self.record_past = self.states.holder.external_speculation = False

    def copy_states(self, slack: int) -> Cache:
        """Return `states`, or a fork of them that rewinds up to `slack` tokens exactly."""
        if self.slack >= slack:
            return self.states
        fork = self.states.fork()
        fork.ensure_slack(slack)
        return fork

    def compute_start(self, batch: int) -> tuple[int, ...] | None:
        """Return the padding of each sequence in a batch; beams of a prompt share its padding."""
        if self.padding is None:
            return None
        repeats, remainder = divmod(batch, len(self.padding))
        if remainder:
            raise ValueError(
                f"{batch} sequences, but an attention_mask of {len(self.padding)}: give the mask "
                "of this batch to kvant.cache_for(..., attention_mask=...)"
            )
        return tuple(p for p in self.padding for _ in range(repeats))

    def check_padding_columns(self, count: int) -> None:
        """Refuse a first chunk longer than the mask: its padding columns would be wrong."""
        if self.mask_columns is not None and count > self.mask_columns and any(self.padding or ()):
            raise CacheError(
                f"{count} first rows for an attention_mask of {self.mask_columns} columns: this "
                "model adds tokens to the prompt, so the columns of padding are unknown; "
                "kvant.detach the model, or give its generate a cache from kvant.cache_for without "
                "attention_mask"
            )

    def check_not_appended(self, index: int) -> None:
        """Refuse a second append in one forward; at the first layer it starts a new forward."""
        if index != min(self.states.layers):
            raise CacheError(
                f"layer {index} got rows twice in one forward: if the second rows are of an "
                "encoder, they need a separate cache; set add_cross_attention=True in the "
                "configuration of this model"
            )

    def check_first_forward(self, length: int, count: int) -> None:
        """Refuse a model that never appends to some layer: every forward would be rolled back.

        `length` is the number of rows that an incomplete first forward left in this layer, which
        now appends `count`. That forward may have failed, so one retry with the same number of
        tokens is allowed. A retry with another number is refused, and so is a later retry that
        finds the same layers empty.
        """
        if self.first_forward_done or not length:
            return
        self.first_forward_done = self.states.length > 0
        if self.first_forward_done:
            return
        previous = self.layers_without_rows
        self.layers_without_rows = missing = [
            i for i, state in self.states.layers.items() if state.length == 0
        ]
        if count != length or missing == previous:
            raise CacheError(
                f"the first forward appended no rows to layers {missing}: if it failed, reset the "
                "cache; if this model never uses these layers, kvant cannot cache it"
            )


class DelegatedAttribute(Generic[T]):
    """An attribute or a method of another object, which `get_target` finds from the instance."""

    get_target: ClassVar[attrgetter[Any]]

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value: T = getattr(self.get_target(instance), self.name)
        return value

    def __set__(self, instance: Any, value: T) -> None:
        setattr(self.get_target(instance), self.name, value)


class StatesAttribute(DelegatedAttribute[T]):
    """An attribute of TransformersCache that reads and sets that of its `kvant.Cache`."""

    get_target = attrgetter("context.states")


@dataclass(frozen=True)
class CacheExplanation:
    """The text of `explain`: one line for each run of equal layers, then lines about replays.

    A replay decodes a token by a captured forward, such as a CUDA graph.
    """

    lines: tuple[str, ...]

    @classmethod
    def from_layers(cls, layers: Sequence[ModelLayer], context: CacheContext) -> CacheExplanation:
        """Describe the storage and the reads of each layer."""
        recipes = context.states.spec.layers
        texts = [
            f"{layer.kind}: {_describe_storage(layer, recipe)}{_describe_reads(context, index)}"
            for index, (layer, recipe) in enumerate(zip(layers, recipes, strict=True))
        ]
        lines = [f"{layers}, {text}" for layers, text in merge_equal_layers(texts)]
        replays = context.replay_stats
        if replays.num_tokens:
            lines.append(f"{replays.num_tokens} tokens were replayed")
        if replays.refusal is not None:
            lines.append(f"tokens are not replayed: {replays.refusal}")
        return cls(tuple(lines))

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _describe_storage(layer: ModelLayer, recipe: Recipe) -> str:
    if isinstance(recipe, GroupSpec):
        attention = _describe_storage(layer, dict(recipe.parts)["attention"])
        return f"{attention}, and a recurrent state kept by transformers"
    if not isinstance(recipe, LayerSpec):
        return "kept by transformers" if layer.is_opaque or layer.recurs else "remembers nothing"
    text = format_codecs(*recipe.sides.values())
    if recipe.retention.window is not None:
        text += f", the last {recipe.retention.window} rows"
    if recipe.retention.sinks:
        text += f", the first {recipe.retention.sinks}"
    if (selection := recipe.select) is not None:
        share = selection.pages or f"{selection.percent:g}% of the"
        text += f", a token reads {share} pages"
    if (prune := recipe.prune) is not None:
        share = f"{prune.rows} rows" if prune.rows else f"{prune.percent:g}% of the rows"
        text += f", prompts pruned to {share} by {prune.score.name}"
    return text


def _describe_reads(context: CacheContext, index: int) -> str:
    stats = context.attention_stats.get(index)
    if stats is None:
        return ""
    texts = []
    if stats.fused_calls:
        backends = ", ".join(sorted(context.states[index].stats.attend_calls))
        texts.append(f"read {stats.fused_calls} times from the stored pages by {backends}")
    if stats.materialized:
        count = stats.materialized.total()
        reasons = ", ".join(name for name, _ in stats.materialized.most_common(3))
        texts.append(f"made dense {count} times for {reasons}")
        if context.attachable and not stats.fused_calls:
            texts.append("kvant.attach(model) may read the pages instead")
    if not texts:
        texts.append("not read yet" if stats.prompt_calls == 0 else "only its prompt was read")
    return "; " + "; ".join(texts)


@dataclass
class UseCacheCheck:
    """Refuse a `generate` with use_cache=False, which passes the whole text at every step.

    The sizes of its first two forwards show this: n tokens, then n + 1. Outside `generate`, all
    n + 1 tokens may be new, so such forwards are allowed.
    """

    first_num_tokens: int = 0  # in the first forward
    is_done: bool = False

    def check(self, count: int, *, is_draft: bool) -> None:
        """Check a forward of `count` tokens."""
        if self.is_done:
            return
        first, self.first_num_tokens = self.first_num_tokens, count
        self.is_done = first > 0
        if count == first + 1 and first and not is_draft and _is_generating():
            raise CacheError(
                f"{first} tokens and then {count}: generate passes the whole text at every step, "
                "since use_cache=False (see model.generation_config), and would append all of it "
                "again; call generate(..., use_cache=True), or give it no cache"
            )


def _is_generating() -> bool:
    """Return whether `generate` of transformers is on the call stack.

    The rows do not show whether tokens are new or repeated, since they come without positions.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE_CODE:
        frame = frame.f_back
    return frame is not None


def resolve_indices(indices: Any, batch: int) -> Tensor:
    """Return the sequences that `rows[indices, ...]` selects; raise the errors that it raises."""
    indices = indices.cpu() if isinstance(indices, Tensor) else indices
    try:
        selected = torch.arange(batch)[indices, ...]
    except (IndexError, TypeError) as error:
        raise type(error)(f"sequences {indices} of a batch of {batch}: {error}") from error
    if selected.ndim != 1 or not len(selected):
        raise ValueError(
            f"sequences {indices} of a batch of {batch}: one dimension, at least one index"
        )
    return selected
