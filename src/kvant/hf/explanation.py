"""How the layers of a host's cache are stored and read, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvant.cache import Cache
from kvant.hf.detect import HostLayer
from kvant.hf.notes import Notes
from kvant.recipes import GroupSpec, LayerSpec, Recipe


@dataclass(frozen=True)
class Explanation:
    """One line for each run of layers that are alike."""

    lines: tuple[str, ...]

    @classmethod
    def of(
        cls, layers: Sequence[HostLayer], states: Cache, notes: Mapping[int, Notes]
    ) -> Explanation:
        told = [
            f"{layer.type}: {_stored(recipe)}, {_read(states, index, notes.get(index))}"
            for index, (layer, recipe) in enumerate(zip(layers, states.spec.layers, strict=True))
        ]
        lines, first = [], 0
        for text, run in groupby(told):
            count = len(list(run))
            where = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
            lines.append(f"{where}, {text}")
            first += count
        return cls(tuple(lines))

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _stored(recipe: Recipe) -> str:
    if isinstance(recipe, GroupSpec):
        return _stored(dict(recipe.parts)["attention"]) + " beside a state that transformers keeps"
    if not isinstance(recipe, LayerSpec):
        return "kept by transformers"
    names = [_format(codec) for codec in recipe.sides.values()]
    window = recipe.retention.window
    kept = "" if window is None else f", the last {window} rows"
    kept += f", the first {recipe.retention.sinks}" if recipe.retention.sinks else ""
    return "/".join(dict.fromkeys(names)) + kept


def _format(codec: object) -> str:
    bits = getattr(codec, "bits", "")
    return f"{getattr(codec, 'name', type(codec).__name__)}{bits}"


def _read(states: Cache, index: int, notes: Notes | None) -> str:
    if index not in states.layers or notes is None:
        return "not read by kvant"
    if notes.materialized:
        why = ", ".join(_short(notes.materialized))
        hint = "" if notes.fused else "; kvant.attach(model) may read the pages instead"
        return f"dense rows were made for {why}{hint}"
    attended = states[index].tally.attended
    if notes.fused:
        return f"read from the stored pages by {', '.join(sorted(attended))}"
    return "only its first chunk was read" if notes.prompts else "not read yet"


def _short(reasons: Counter[str]) -> list[str]:
    return [reason.removeprefix("aten.") for reason, _ in reasons.most_common(3)]
