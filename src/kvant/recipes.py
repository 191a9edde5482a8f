"""How a cache is described: frozen recipes, one a layer. Also the header of a file.

A recipe holds what was asked for; what follows from it is a property. It allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvant.contracts import Codec, Mask, PageSelection, Pruning, Retention
from kvant.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from kvant.page_table import Paging
else:
    torch = LazyModule("torch")  # for typing.get_type_hints

T = TypeVar("T")
DTYPE_NAMES = ("float32", "bfloat16", "float16")  # of dense rows
Prefill = Literal["dense", "stored"]  # are a prompt chunk's own rows seen dense, or by the rule?


@dataclass(frozen=True)
class LayerSpec:
    """The recipe of one attention layer.

    >>> layer = kvant.parse("affine4,window=1024", 1).layers[0]
    >>> isinstance(layer, kvant.LayerSpec), layer.retention.window, layer.exact
    (True, 1024, False)
    """

    keys: Codec
    values: Codec
    retention: Retention
    page: int = 64
    tail: int | None = None  # None: as the codecs ask
    slack: int = 16  # how far back a rewind is exact
    dense_until: int = 0  # nothing is seen sealed before this many tokens
    prefill: Prefill = "dense"
    step: int = 1  # rows by which memory grows, in whole pages
    capacity: int | None = None  # rows allocated at once; more is an error
    dtype: torch.dtype | None = None  # of dense rows, one of DTYPE_NAMES; None: as they come
    chunk: int | None = None  # a query sees its own block of so many positions only
    value_dim: int | None = None  # values are the first channels of the keys (MLA)
    select: PageSelection | None = None  # None: a token reads all pages that it sees
    prune: Pruning | None = None  # None: rows stay while a token may see them

    @cached_property
    def sides(self) -> Mapping[str, Codec]:
        """The rows a layer stores, by name: values may lie inside the keys."""
        if self.value_dim is not None:
            return {"keys": self.keys}
        return {"keys": self.keys, "values": self.values}

    @cached_property
    def exact(self) -> bool:
        """Do all rows read as they came?"""
        return all(codec.exact for codec in self.sides.values())

    @cached_property
    def seals(self) -> bool:
        """Raw layers stay open for ever: sealed and dense would be the same bytes.

        But pages are selected among sealed ones.
        """
        return not self.exact or self.select is not None

    @cached_property
    def paging(self) -> Paging:
        from kvant.page_table import Paging

        deepest = max(codec.tail for codec in self.sides.values())
        tail = deepest if self.tail is None else self.tail
        return Paging(self.page, tail if self.seals else None, self.dense_until)

    @cached_property
    def mask(self) -> Mask:
        retention = self.retention
        return Mask(window=retention.window, sinks=retention.sinks, chunk=self.chunk)

    @cached_property
    def effective_window(self) -> float:
        """How many of the last rows stay: inf where all do."""
        window = self.retention.window
        return float("inf") if window is None else window

    @cached_property
    def max_held(self) -> int | None:
        """What the rows that are held never pass; None where only memory is the limit."""
        retention, limits = self.retention, [] if self.capacity is None else [self.capacity]
        if retention.window is not None:
            limits.append(retention.window + retention.sinks)
        return min(limits, default=None)


@dataclass(frozen=True)
class RecurrentSpec:
    """The recipe of a layer that remembers fixed-shape tensors.

    >>> cache = kvant.Cache(spec=kvant.CacheSpec((kvant.RecurrentSpec(max_checkpoints=4),)))
    >>> cache[0].append(5, {"state": torch.zeros(1, 8, 8)})  # the state behind 5 tokens
    >>> cache.length
    5
    """

    max_checkpoints: int = 16


@dataclass(frozen=True)
class GroupSpec:
    """The recipe of a layer with several memories, by name (attention beside a recurrence).

    >>> layer = kvant.parse("raw", 1).layers[0]
    >>> group = kvant.GroupSpec((("attention", layer), ("state", kvant.RecurrentSpec())))
    >>> cache = kvant.Cache(spec=kvant.CacheSpec((group,)))
    >>> cache[0]["attention"].length
    0
    """

    parts: tuple[tuple[str, LayerSpec | RecurrentSpec], ...]


@dataclass(frozen=True)
class SharedSpec:
    """A layer that reads the rows of an earlier one and has none of its own.

    >>> layer = kvant.parse("raw", 1).layers[0]
    >>> cache = kvant.Cache(spec=kvant.CacheSpec((layer, kvant.SharedSpec(layer=0))))
    >>> cache[1] is cache[0]
    True
    """

    layer: int


@dataclass(frozen=True)
class EmptySpec:
    """A layer that remembers nothing here: it has no memory, or its host keeps it.

    >>> layer = kvant.parse("raw", 1).layers[0]
    >>> cache = kvant.Cache(spec=kvant.CacheSpec((layer, kvant.EmptySpec())))
    >>> len(cache), len(cache.layers)
    (2, 1)
    """


Recipe = LayerSpec | RecurrentSpec | GroupSpec | SharedSpec | EmptySpec
RECIPES_BY_KIND: dict[str, type[Recipe]] = {  # by the name that a header has for them
    "attention": LayerSpec,
    "recurrent": RecurrentSpec,
    "group": GroupSpec,
    "shared": SharedSpec,
    "empty": EmptySpec,
}


@dataclass(frozen=True)
class CacheSpec:
    """One recipe a layer.

    >>> exact, small = kvant.parse("raw", 1).layers[0], kvant.parse("affine4", 1).layers[0]
    >>> spec = kvant.CacheSpec((exact, small, small))
    >>> len(kvant.Cache(spec=spec))
    3
    """

    layers: tuple[Recipe, ...]

    def with_slack(self, slack: int) -> CacheSpec:
        """The same, but rewinds of at least `slack` tokens are exact."""
        return self.map_layers(lambda layer: replace(layer, slack=max(layer.slack, slack)))

    def map_layers(self, function: Callable[[LayerSpec], LayerSpec]) -> CacheSpec:
        """The same, with that done to whatever attends, inside of groups too."""
        return CacheSpec(tuple(_map_recipe(recipe, LayerSpec, function) for recipe in self.layers))

    @property
    def prunes(self) -> bool:
        """Does some layer let rows go behind a prompt?"""
        return any(layer.prune is not None for layer in iterate_attention(*self.layers))

    def with_checkpoints(self, max_checkpoints: int) -> CacheSpec:
        """The same, but recurrences keep at most so many checkpoints."""

        def set_limit(recipe: RecurrentSpec) -> RecurrentSpec:
            return replace(recipe, max_checkpoints=max_checkpoints)

        return CacheSpec(
            tuple(_map_recipe(recipe, RecurrentSpec, set_limit) for recipe in self.layers)
        )


# What a user may give for a spec: a string of the spec language, one recipe for every layer that
# attends, or the recipes of all layers.
AnySpec = str | LayerSpec | CacheSpec


def iterate_attention(*recipes: Recipe) -> Iterator[LayerSpec]:
    """Those of these recipes that attend, inside of groups too."""
    for recipe in recipes:
        if isinstance(recipe, GroupSpec):
            yield from iterate_attention(*(part for _, part in recipe.parts))
        elif isinstance(recipe, LayerSpec):
            yield recipe


def _map_recipe(recipe: Recipe, recipe_type: type[T], function: Callable[[T], T]) -> Any:
    """The recipe, or its parts, where they are of that kind."""
    if isinstance(recipe, GroupSpec):
        parts = ((name, _map_recipe(part, recipe_type, function)) for name, part in recipe.parts)
        return GroupSpec(tuple(parts))
    return function(recipe) if isinstance(recipe, recipe_type) else recipe
