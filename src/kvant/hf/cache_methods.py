"""The verbs of kvant on a host's cache, under the names that the rest of kvant knows them by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvant.cache import Cache, constrain_spec
from kvant.contracts import Snapshot
from kvant.errors import CacheError
from kvant.hf.cache_context import AttentionStats, CacheContext
from kvant.hf.layers import AttentionLayer
from kvant.hf.model_layers import ModelLayer, make_cache_spec
from kvant.recipes import AnySpec, CacheSpec, GroupSpec, LayerSpec, Recipe, iterate_attention
from kvant.renamed import RenamedAttribute
from kvant.spec import format_codecs


@dataclass(frozen=True)
class CacheExplanation:
    """One line for each run of layers that are alike, and how tokens came about."""

    lines: tuple[str, ...]

    @classmethod
    def from_layers(cls, layers: Sequence[ModelLayer], context: CacheContext) -> CacheExplanation:
        recipes = context.states.spec.layers
        told = [
            f"{layer.type}: {_describe_storage(layer, recipe)}{_describe_reads(context, index)}"
            for index, (layer, recipe) in enumerate(zip(layers, recipes, strict=True))
        ]
        lines, first = [], 0
        for text, run in groupby(told):
            count = len(list(run))
            where = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
            lines.append(f"{where}, {text}")
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
        return f"{attention} beside a state that transformers keeps"
    if not isinstance(recipe, LayerSpec):
        return "kept by transformers" if layer.is_opaque or layer.recurs else "remembers nothing"
    kept = format_codecs(*recipe.sides.values())
    if recipe.retention.window is not None:
        kept += f", the last {recipe.retention.window} rows"
    if recipe.retention.sinks:
        kept += f", the first {recipe.retention.sinks}"
    if (rule := recipe.select) is not None:
        kept += f", of which a token reads {rule.pages or f'{rule.percent:g}% of the'} pages"
    if (prune := recipe.prune) is not None:
        many = f"{prune.rows} rows" if prune.rows else f"{prune.percent:g}% of the rows"
        kept += f", of a prompt {many} by {prune.score.name}"
    return kept


def _describe_reads(context: CacheContext, index: int) -> str:
    notes = context.attention_stats.get(index)
    if notes is None:
        return ""
    told = []
    if notes.fused_calls:
        backends = ", ".join(sorted(context.states[index].stats.attend_calls))
        told.append(f"read {notes.fused_calls} times from the stored pages by {backends}")
    if notes.materialized:
        count = sum(notes.materialized.values())
        why = ", ".join(name for name, _ in notes.materialized.most_common(3))
        told.append(f"made dense {count} times for {why}")
        if context.attachable and not notes.fused_calls:
            told.append("kvant.attach(model) may read the pages instead")
    if not told:
        told.append("not read yet" if notes.prompt_calls == 0 else "only its prompt was read")
    return "; " + "; ".join(told)


class CacheMethods:
    """Each acts on all layers or on none; what only the host understands is refused."""

    layer_info: tuple[ModelLayer, ...]
    context: CacheContext
    layers: list[Any]
    get_seq_length: Callable[..., int]

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
        """The one that reads every layer; None: the first that can."""
        return self.states.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        self.states.backend = name

    @property
    def length(self) -> int:
        """Tokens that every layer has seen."""
        return self.get_seq_length()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        return self.states.lengths

    @property
    def num_rows(self) -> int:
        """Rows that reading returns, of the layer that holds most."""
        return self.states.num_rows

    held = num_rows  # the public name

    @property
    def capacity(self) -> int | None:
        """The length that no layer passes; None where only memory is the limit."""
        return self.context.states.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated, without those of layers that only the host understands."""
        return self.states.nbytes

    def nbytes_after(self, coming: int, spec: AnySpec | None = None) -> int:
        """Bytes after so many more tokens, recoded to `spec` first where one is given."""
        return self.states.nbytes_after(coming, None if spec is None else self._resolve_spec(spec))

    def reachable(self, to: int) -> int:
        """The longest length <= `to` that every layer can go back to."""
        if self._get_opaque_layers():  # they stay where they are, or forget all
            return self.length if to >= self.length else 0
        return self.states.reachable(to)

    def find_exact_rewind(self, to: int) -> int:
        """The longest length <= `to` to go back to and be as if no more had ever come."""
        return (
            self.reachable(to) if self._get_opaque_layers() else self.states.find_exact_rewind(to)
        )

    def rewind(self, to: int) -> None:
        """Go back to length `to`; every layer, or an error and none."""
        self._invalidate_pending()
        if to != self.length:
            self._check_no_opaque_layers("rewind")
            self._rewind_to(to)
        elif self.states.layers:  # what a forward that died left is taken back
            self.states.rewind(self.states.length)

    def checkpoint(self) -> None:
        """Make the present length one that recurrent layers can come back to."""
        self.states.checkpoint()

    def prune(self) -> int:
        """Let rows go that the spec does not keep behind a prompt; how many a head, in the mean.

        The first token behind a prompt does it by itself.
        """
        found = self.states.prune()
        if found:
            self._invalidate_pending()
        return found

    def ensure_slack(self, slack: int) -> None:
        """From now on, let rewinds of so many tokens be exact."""
        if slack > self.context.slack:
            self.context.slack = slack
            self._invalidate_pending()
            self.states.ensure_slack(slack)

    def recode(self, spec: AnySpec) -> None:
        """Store the same tokens by another spec, within what the model lets its layers see."""
        full = self._resolve_spec(spec)
        self._invalidate_pending()
        self.states.recode(full)

    @property
    def tokens_until_prune(self) -> int | None:
        """So many tokens may come before rows are pruned again; None: any number."""
        return self.states.tokens_until_prune

    def prompt_mode(self) -> AbstractContextManager[None]:
        """Within, tokens are of a prompt, though one may come alone: no rows are pruned."""
        return self.states.prompt_mode()

    def speculation_mode(self) -> AbstractContextManager[None]:
        """Within, a chunk may be drafts: it is read as one token after the other would be."""
        return self.states.speculation_mode()

    def snapshot(self) -> Snapshot:
        """A copy of all that is remembered, to `restore` from."""
        return self.shared_snapshot().copy()

    def shared_snapshot(self) -> Snapshot:
        """A snapshot that may share memory with the cache: to be read before anything else."""
        self._check_no_opaque_layers("snapshot")
        return self.states.shared_snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._check_no_opaque_layers("restore")
        self._invalidate_pending()
        self.states.restore(snapshot)
        if self.states.length:  # its sequences began where the snapshot says
            self.context.padding = None

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, in numbers."""
        total = AttentionStats()
        for notes in self.context.attention_stats.values():
            total.add(notes)
        return self.states.stats() | {
            "fused": total.fused_calls,
            "prompts": total.prompt_calls,
            "materialized": sum(total.materialized.values()),
            "masks": total.tensor_masks,
            "replayed": self.context.replay_stats.num_tokens,
        }

    def explain(self) -> CacheExplanation:
        """How each layer is stored, and whether attention is computed on the stored bytes."""
        return CacheExplanation.from_layers(self.layer_info, self.context)

    def _rewind_to(self, to: int) -> None:
        """All of ours, or an error and none."""
        if to == 0 < self.states.length:  # the next tokens may be another batch's
            self.context.padding = None
        self.states.rewind(to)
        if not any(recipe.retention.sinks for recipe in iterate_attention(*self.spec.layers)):
            self.states.end_padding()  # a mask says which of the next tokens are padding

    def _resolve_spec(self, spec: AnySpec) -> CacheSpec:
        """One recipe a layer, as a recode leaves them."""
        self._check_no_opaque_layers("recode")
        full = make_cache_spec(self.layer_info, spec)
        if not isinstance(spec, CacheSpec):
            full = constrain_spec(self.spec, full)
        return full.with_slack(self.context.slack)

    def _list_attention_layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    def _get_opaque_layers(self) -> dict[int, Any]:
        """The layers that only the host understands."""
        return {i: self.layers[i] for i, one in enumerate(self.layer_info) if one.is_opaque}

    def _check_no_opaque_layers(self, method: str) -> None:
        foreign = self._get_opaque_layers()
        if foreign:
            kinds = sorted({self.layer_info[index].type for index in foreign})
            raise CacheError(
                f"{method}: layers {list(foreign)} ({', '.join(kinds)}) live in transformers, "
                "which knows crop(-n), reset() and deepcopy for them"
            )

    def _invalidate_pending(self) -> None:
        """What the model was handed is not to be read any more."""
        for layer in self._list_attention_layers():
            layer.invalidate_pending()
