"""What model layers remember: one class a kind of memory, built from its recipe."""

from __future__ import annotations

from kvant.contracts import LayerState, Tiles
from kvant.layers.attention import Attention
from kvant.layers.group import Group
from kvant.layers.ledger import Alone, Together
from kvant.layers.reach import check_reach
from kvant.layers.recurrent import Recurrent
from kvant.layers.succession import attending, succeeding, within
from kvant.recipes import GroupSpec, LayerSpec, RecurrentSpec

__all__ = [
    "Alone",
    "Attention",
    "Group",
    "Recurrent",
    "Together",
    "attending",
    "build",
    "check_reach",
    "succeeding",
    "within",
]


def build(recipe: LayerSpec | RecurrentSpec | GroupSpec, tiles: Tiles | None = None) -> LayerState:
    """The empty state of a recipe."""
    if isinstance(recipe, GroupSpec):
        return Group({name: build(part, tiles) for name, part in recipe.parts})
    if isinstance(recipe, RecurrentSpec):
        return Recurrent(recipe)
    return Attention(recipe, tiles)
