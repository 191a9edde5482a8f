"""Define the methods of `kvant.Cache` for a TransformersCache, and the text of `explain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvant.cache import Cache, constrain_spec
from kvant.cache.transitions import end_padding
from kvant.contracts import Snapshot
from kvant.errors import CacheError
from kvant.hf.cache_context import AttentionStats, CacheContext
from kvant.hf.layers import AttentionLayer
from kvant.hf.model import ModelLayer, make_cache_spec
from kvant.recipes import AnySpec, CacheSpec, GroupSpec, LayerSpec, Recipe, iterate_attention
from kvant.renamed import RenamedAttribute
from kvant.spec import format_codecs


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
            f"{layer.type}: {_describe_storage(layer, recipe)}{_describe_reads(context, index)}"
            for index, (layer, recipe) in enumerate(zip(layers, recipes, strict=True))
        ]
        lines, first = [], 0
        for text, run in groupby(texts):
            count = len(list(run))
            label = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
            lines.append(f"{label}, {text}")
            first += count
        return cls((*lines, *_describe_replays(context)))

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _describe_replays(context: CacheContext) -> list[str]:
    replays, lines = context.replay_stats, []
    if replays.num_tokens:
        lines.append(f"{replays.num_tokens} tokens were replayed")
    if replays.refusal is not None:
        lines.append(f"tokens are not replayed: {replays.refusal}")
    return lines


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
        count = sum(stats.materialized.values())
        reasons = ", ".join(name for name, _ in stats.materialized.most_common(3))
        texts.append(f"made dense {count} times for {reasons}")
        if context.attachable and not stats.fused_calls:
            texts.append("kvant.attach(model) may read the pages instead")
    if not texts:
        texts.append("not read yet" if stats.prompt_calls == 0 else "only its prompt was read")
    return "; " + "; ".join(texts)


class CacheMethods:
    """Methods that change all layers or none.

    Most are refused for a cache with opaque layers, whose state only transformers understands.
    """

    layer_info: tuple[ModelLayer, ...]
    context: CacheContext
    layers: list[Any]
    get_seq_length: Callable[..., int]

    # Old public names.
    resumable = RenamedAttribute("find_exact_rewind")
    extended = RenamedAttribute("import_sequence")
    prompting = RenamedAttribute("prompt_mode")
    speculating = RenamedAttribute("speculation_mode")

    @property
    def states(self) -> Cache:
        return self.context.states

    @property
    def spec(self) -> CacheSpec:
        return self.states.spec

    @property
    def backend(self) -> str | None:
        """The backend that reads every layer; None: the first that can."""
        return self.states.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        self.states.backend = name

    @property
    def length(self) -> int:
        """Tokens in the cache; an incomplete forward does not count."""
        return self.get_seq_length()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        return self.states.lengths

    @property
    def num_rows(self) -> int:
        """Rows of the layer that stores the most."""
        return self.states.num_rows

    held = num_rows  # the public name

    @property
    def capacity(self) -> int | None:
        """The maximum length; None if only memory limits it."""
        return self.context.states.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated, opaque layers not counted."""
        return self.states.nbytes

    def nbytes_after(self, num_new_tokens: int, spec: AnySpec | None = None) -> int:
        """Bytes allocated after `num_new_tokens` more tokens, recoded to `spec` first if given."""
        return self.states.nbytes_after(
            num_new_tokens, None if spec is None else self._resolve_spec(spec)
        )

    def reachable(self, to: int) -> int:
        """Return the longest length <= `to` that every layer can rewind to."""
        if self._get_opaque_layers():  # they cannot rewind, only reset
            return self.length if to >= self.length else 0
        return self.states.reachable(to)

    def find_exact_rewind(self, to: int) -> int:
        """Return the longest length <= `to` whose rewind is exact."""
        return (
            self.reachable(to) if self._get_opaque_layers() else self.states.find_exact_rewind(to)
        )

    def rewind(self, to: int) -> None:
        """Rewind every layer to length `to`, or raise an error and change none."""
        self._invalidate_pending()
        if to != self.length:
            self._check_no_opaque_layers("rewind")
            self._rewind_to(to)
        elif self.states.layers:  # roll back an incomplete forward
            self.states.rewind(self.states.length)

    def checkpoint(self) -> None:
        """Save the states of recurrent layers, so that they can rewind to this length."""
        self.states.checkpoint()

    def prune(self) -> int:
        """Prune the rows of a prompt now, and return the mean number of dropped rows per head.

        The first token after a prompt prunes automatically.
        """
        num_dropped = self.states.prune()
        if num_dropped:
            self._invalidate_pending()
        return num_dropped

    def ensure_slack(self, slack: int) -> None:
        """Make rewinds of up to `slack` tokens exact from now on."""
        if slack > self.context.slack:
            self.context.slack = slack
            self._invalidate_pending()
            self.states.ensure_slack(slack)

    def recode(self, spec: AnySpec) -> None:
        """Convert the stored rows to another spec; the windows of the model still apply."""
        cache_spec = self._resolve_spec(spec)
        self._invalidate_pending()
        self.states.recode(cache_spec)

    @property
    def tokens_until_prune(self) -> int | None:
        """Tokens until rows are pruned again; None: never."""
        return self.states.tokens_until_prune

    def prompt_mode(self) -> AbstractContextManager[None]:
        """Treat every append within the context as part of a prompt, so that it does not prune."""
        return self.states.prompt_mode()

    def speculation_mode(self) -> AbstractContextManager[None]:
        """Treat chunks within the context as drafts: a token reads the rows it would read alone."""
        return self.states.speculation_mode()

    def snapshot(self) -> Snapshot:
        """Return a copy of the state of all layers, for `restore`."""
        return self.shared_snapshot().copy()

    def shared_snapshot(self) -> Snapshot:
        """Return a snapshot that may share memory with the cache, valid until its next change."""
        self._check_no_opaque_layers("snapshot")
        return self.states.shared_snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the state of all layers by a snapshot."""
        self._check_no_opaque_layers("restore")
        self._invalidate_pending()
        self.states.restore(snapshot)
        if self.states.length:  # the snapshot has its own padding
            self.context.padding = None

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the cache and of its attention calls."""
        total = AttentionStats()
        for layer_stats in self.context.attention_stats.values():
            total.add(layer_stats)
        return self.states.stats() | {
            "fused": total.fused_calls,
            "prompts": total.prompt_calls,
            "materialized": sum(total.materialized.values()),
            "masks": total.tensor_masks,
            "replayed": self.context.replay_stats.num_tokens,
        }

    def explain(self) -> CacheExplanation:
        """Explain how each layer is stored, and whether attention reads the stored pages."""
        return CacheExplanation.from_layers(self.layer_info, self.context)

    def _rewind_to(self, to: int) -> None:
        """Rewind every layer of kvant to length `to`, or raise an error and change none."""
        if to == 0 < self.states.length:  # the next tokens may be of another batch
            self.context.padding = None
        self.states.rewind(to)
        # With sinks, padding must be known before rows are appended. Without, masks define it.
        if not any(recipe.retention.sinks for recipe in iterate_attention(*self.spec.layers)):
            holder = self.states.holder
            holder.state = end_padding(holder.state)

    def _resolve_spec(self, spec: AnySpec) -> CacheSpec:
        """Return the spec of each layer after a recode to `spec`."""
        self._check_no_opaque_layers("recode")
        cache_spec = make_cache_spec(self.layer_info, spec)
        if not isinstance(spec, CacheSpec):
            cache_spec = constrain_spec(self.spec, cache_spec)
        return cache_spec.with_slack(self.context.slack)

    def _list_attention_layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    def _get_opaque_layers(self) -> dict[int, Any]:
        """Return the layers whose state only transformers understands, by index."""
        return {i: self.layers[i] for i, info in enumerate(self.layer_info) if info.is_opaque}

    def _check_no_opaque_layers(self, method: str) -> None:
        opaque_layers = self._get_opaque_layers()
        if opaque_layers:
            types = sorted({self.layer_info[index].type for index in opaque_layers})
            raise CacheError(
                f"{method}: layers {list(opaque_layers)} ({', '.join(types)}) live in "
                "transformers, which supports only crop(-n), reset() and deepcopy for them"
            )

    def _invalidate_pending(self) -> None:
        """Invalidate the handles that the model still has: to use one raises an error."""
        for layer in self._list_attention_layers():
            layer.invalidate_pending()
