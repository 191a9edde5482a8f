"""The verbs of kvant on a host's cache, under the names that the rest of kvant knows them by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvant.cache import Cache, within
from kvant.contracts import Snapshot
from kvant.errors import CacheError
from kvant.hf.context import Context, Notes
from kvant.hf.detect import HostLayer, recipes
from kvant.hf.layers import AttentionLayer
from kvant.recipes import AnySpec, CacheSpec, GroupSpec, LayerSpec, Recipe, attention_in
from kvant.spec import spelled


@dataclass(frozen=True)
class Explanation:
    """One line for each run of layers that are alike, and how tokens came about."""

    lines: tuple[str, ...]

    @classmethod
    def of(cls, layers: Sequence[HostLayer], context: Context) -> Explanation:
        recipes = context.states.spec.layers
        told = [
            f"{layer.type}: {_stored(layer, recipe)}{_read(context, index)}"
            for index, (layer, recipe) in enumerate(zip(layers, recipes, strict=True))
        ]
        lines, first = [], 0
        for text, run in groupby(told):
            count = len(list(run))
            where = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
            lines.append(f"{where}, {text}")
            first += count
        return cls((*lines, *_replayed(context)))

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _replayed(context: Context) -> list[str]:
    replays, lines = context.replays, []
    if replays.tokens:
        lines.append(f"{replays.tokens} tokens were replayed")
    if replays.refusal is not None:
        lines.append(f"tokens are not replayed: {replays.refusal}")
    return lines


def _stored(layer: HostLayer, recipe: Recipe) -> str:
    if isinstance(recipe, GroupSpec):
        attention = _stored(layer, dict(recipe.parts)["attention"])
        return f"{attention} beside a state that transformers keeps"
    if not isinstance(recipe, LayerSpec):
        return "kept by transformers" if layer.foreign or layer.recurs else "remembers nothing"
    kept = spelled(*recipe.sides.values())
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


def _read(context: Context, index: int) -> str:
    notes = context.notes.get(index)
    if notes is None:
        return ""
    told = []
    if notes.fused:
        backends = ", ".join(sorted(context.states[index].tally.attended))
        told.append(f"read {notes.fused} times from the stored pages by {backends}")
    if notes.materialized:
        count = sum(notes.materialized.values())
        why = ", ".join(name for name, _ in notes.materialized.most_common(3))
        told.append(f"made dense {count} times for {why}")
        if context.attachable and not notes.fused:
            told.append("kvant.attach(model) may read the pages instead")
    if not told:
        told.append("not read yet" if notes.prompts == 0 else "only its prompt was read")
    return "; " + "; ".join(told)


class Verbs:
    """Each acts on all layers or on none; what only the host understands is refused."""

    described: tuple[HostLayer, ...]
    context: Context
    layers: list[Any]
    get_seq_length: Callable[..., int]

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
    def held(self) -> int:
        """Rows that reading returns, of the layer that holds most."""
        return self.states.held

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
        return self.states.nbytes_after(coming, None if spec is None else self._recoded(spec))

    def reachable(self, to: int) -> int:
        """The longest length <= `to` that every layer can go back to."""
        if self._foreign():  # they stay where they are, or forget all
            return self.length if to >= self.length else 0
        return self.states.reachable(to)

    def resumable(self, to: int) -> int:
        """The longest length <= `to` to go back to and be as if no more had ever come."""
        return self.reachable(to) if self._foreign() else self.states.resumable(to)

    def rewind(self, to: int) -> None:
        """Go back to length `to`; every layer, or an error and none."""
        self._expire()
        if to != self.length:
            self._check_ours("rewind")
            self._go_back(to)
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
            self._expire()
        return found

    def widen(self, slack: int) -> None:
        """From now on, let rewinds of so many tokens be exact."""
        if slack > self.context.slack:
            self.context.slack = slack
            self._expire()
            self.states.widen(slack)

    def recode(self, spec: AnySpec) -> None:
        """Store the same tokens by another spec, within what the model lets its layers see."""
        full = self._recoded(spec)
        self._expire()
        self.states.recode(full)

    @property
    def before_prune(self) -> int | None:
        """So many tokens may come before rows are pruned again; None: any number."""
        return self.states.before_prune

    def prompting(self) -> AbstractContextManager[None]:
        """Within, tokens are of a prompt, though one may come alone: no rows are pruned."""
        return self.states.prompting()

    def speculating(self) -> AbstractContextManager[None]:
        """Within, a chunk may be drafts: it is read as one token after the other would be."""
        return self.states.speculating()

    def snapshot(self) -> Snapshot:
        """A copy of all that is remembered, to `restore` from."""
        return self.shared_snapshot().copied()

    def shared_snapshot(self) -> Snapshot:
        """A snapshot that may share memory with the cache: to be read before anything else."""
        self._check_ours("snapshot")
        return self.states.shared_snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._check_ours("restore")
        self._expire()
        self.states.restore(snapshot)
        if self.states.length:  # its sequences began where the snapshot says
            self.context.padding = None

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, in numbers."""
        total = Notes()
        for notes in self.context.notes.values():
            total.add(notes)
        return self.states.stats() | {
            "fused": total.fused,
            "prompts": total.prompts,
            "materialized": sum(total.materialized.values()),
            "masks": total.masks,
            "replayed": self.context.replays.tokens,
        }

    def explain(self) -> Explanation:
        """How each layer is stored, and whether attention is computed on the stored bytes."""
        return Explanation.of(self.described, self.context)

    def _go_back(self, to: int) -> None:
        """All of ours, or an error and none."""
        if to == 0 < self.states.length:  # the next tokens may be another batch's
            self.context.padding = None
        self.states.rewind(to)
        if not any(recipe.retention.sinks for recipe in attention_in(*self.spec.layers)):
            self.states.end_padding()  # a mask says which of the next tokens are padding

    def _recoded(self, spec: AnySpec) -> CacheSpec:
        """One recipe a layer, as a recode leaves them."""
        self._check_ours("recode")
        full = recipes(self.described, spec)
        if not isinstance(spec, CacheSpec):
            full = within(self.spec, full)
        return full.widened(self.context.slack)

    def _attending(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    def _foreign(self) -> dict[int, Any]:
        """The layers that only the host understands."""
        return {i: self.layers[i] for i, one in enumerate(self.described) if one.foreign}

    def _check_ours(self, verb: str) -> None:
        foreign = self._foreign()
        if foreign:
            kinds = sorted({self.described[index].type for index in foreign})
            raise CacheError(
                f"{verb}: layers {list(foreign)} ({', '.join(kinds)}) live in transformers, "
                "which knows crop(-n), reset() and deepcopy for them"
            )

    def _expire(self) -> None:
        """What the model was handed is not to be read any more."""
        for layer in self._attending():
            layer.expire()
