"""How the layers of a host's cache are stored and read, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvant.hf.context import Context
from kvant.hf.detect import HostLayer
from kvant.recipes import GroupSpec, LayerSpec, Recipe
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
        lines.append(f"{replays.tokens} tokens were replayed from a graph")
    if replays.refusal is not None:
        lines.append(f"tokens are not replayed from a graph: {replays.refusal}")
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
    return kept + (f", the first {recipe.retention.sinks}" if recipe.retention.sinks else "")


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
