"""What model layers remember: one class a kind of memory, built from its recipe."""

from __future__ import annotations

from kvant.contracts import LayerState, Tiles
from kvant.layers.attention import Attention
from kvant.layers.group import Group, agreed, joined, restore_all, split
from kvant.layers.ledger import Alone, Together
from kvant.layers.recurrent import Recurrent
from kvant.recipes import GroupSpec, LayerSpec, RecurrentSpec

__all__ = [
    "Alone",
    "Attention",
    "Group",
    "Recurrent",
    "Together",
    "agreed",
    "build",
    "joined",
    "leaves",
    "restore_all",
    "split",
]


def build(recipe: LayerSpec | RecurrentSpec | GroupSpec, tiles: Tiles | None = None) -> LayerState:
    """The empty state of a recipe."""
    if isinstance(recipe, GroupSpec):
        return Group({name: build(part, tiles) for name, part in recipe.parts})
    if isinstance(recipe, RecurrentSpec):
        return Recurrent(recipe)
    return Attention(recipe, tiles)


def leaves(state: LayerState) -> list[LayerState]:
    """The states that are appended to: the state itself, or the parts of a group."""
    if isinstance(state, Group):
        return [leaf for part in state.parts.values() for leaf in leaves(part)]
    return [state]
