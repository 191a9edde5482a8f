"""The recipe of a cache: frozen values, one per layer. They are also the header of a file.

A recipe holds what a user set; derived values are properties. Recipes allocate nothing. `CHECKS` in
spec/language.py validates their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from kvant.contracts import Codec, Mask, PageSelection
from kvant.lazy import LazyModule
from kvant.retention import Pruning, Retention

if TYPE_CHECKING:
    import torch

    from kvant.page_table import Paging
else:
    torch = LazyModule("torch")  # for typing.get_type_hints

T = TypeVar("T")
DTYPE_NAMES = ("float32", "bfloat16", "float16")  # of dense rows
WeightFormats: TypeAlias = "str | Mapping[str, str]"  # of all layers, or by pattern of names
RAW_WEIGHTS = "raw"  # as they are, in 16 bits
Prefill = Literal["dense", "stored"]  # a prompt chunk reads its own rows dense, or as stored


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
    tail: int | None = None  # newest rows that are read dense; None: the default of the codecs
    slack: int = 16  # tokens by which a rewind is exact
    dense_until: int = 0  # shorter sequences have no sealed pages
    prefill: Prefill = "dense"
    step: int = 1  # rows by which memory grows, rounded up to pages
    capacity: int | None = None  # rows allocated with the first token; more raise an error
    dtype: torch.dtype | None = None  # of dense rows, one of DTYPE_NAMES; None: unchanged
    chunk: int | None = None  # a query sees only its own block of `chunk` positions
    value_dim: int | None = None  # values are the first channels of the keys (MLA)
    select: PageSelection | None = None  # None: a token reads all visible pages
    prune: Pruning | None = None  # None: all visible rows are retained

    @cached_property
    def sides(self) -> Mapping[str, Codec]:
        """The codecs of the stored rows, by name; values may lie inside the keys."""
        if self.value_dim is not None:
            return {"keys": self.keys}
        return {"keys": self.keys, "values": self.values}

    @cached_property
    def exact(self) -> bool:
        """Whether rows are read exactly as appended."""
        return all(codec.exact for codec in self.sides.values())

    @cached_property
    def seals(self) -> bool:
        """Whether pages are sealed.

        Raw layers never seal, because the bytes would be the same, unless pages are selected: the
        selection is among sealed pages.
        """
        return not self.exact or self.select is not None

    @cached_property
    def paging(self) -> Paging:
        from kvant.page_table import Paging

        default_tail = max(codec.tail for codec in self.sides.values())
        tail = default_tail if self.tail is None else self.tail
        return Paging(self.page, tail if self.seals else None, self.dense_until)

    @cached_property
    def mask(self) -> Mask:
        retention = self.retention
        return Mask(window=retention.window, sinks=retention.sinks, chunk=self.chunk)

    @cached_property
    def effective_window(self) -> float:
        """The number of newest rows that are retained; inf: all."""
        window = self.retention.window
        return float("inf") if window is None else window

    @cached_property
    def max_held(self) -> int | None:
        """Upper bound of the rows of a sequence that are held; None: unbounded."""
        retention, limits = self.retention, [] if self.capacity is None else [self.capacity]
        if retention.window is not None:
            limits.append(retention.window + retention.sinks)
        return min(limits, default=None)


@dataclass(frozen=True)
class RecurrentSpec:
    """The recipe of a layer with a recurrent state of fixed shape.

    >>> cache = kvant.Cache(spec=kvant.CacheSpec((kvant.RecurrentSpec(max_checkpoints=4),)))
    >>> cache[0].append(5, {"state": torch.zeros(1, 8, 8)})  # the state after 5 tokens
    >>> cache.length
    5
    """

    max_checkpoints: int = 16


@dataclass(frozen=True)
class GroupSpec:
    """The recipe of a layer with several caches, by name, such as attention and a recurrence.

    >>> layer = kvant.parse("raw", 1).layers[0]
    >>> group = kvant.GroupSpec((("attention", layer), ("state", kvant.RecurrentSpec())))
    >>> cache = kvant.Cache(spec=kvant.CacheSpec((group,)))
    >>> cache[0]["attention"].length
    0
    """

    parts: tuple[tuple[str, LayerSpec | RecurrentSpec], ...]


@dataclass(frozen=True)
class SharedSpec:
    """The recipe of a layer that reads the rows of an earlier layer.

    >>> layer = kvant.parse("raw", 1).layers[0]
    >>> cache = kvant.Cache(spec=kvant.CacheSpec((layer, kvant.SharedSpec(layer=0))))
    >>> cache[1] is cache[0]
    True
    """

    layer: int


@dataclass(frozen=True)
class EmptySpec:
    """The recipe of a layer without a cache here: it needs none, or the model library has it.

    >>> layer = kvant.parse("raw", 1).layers[0]
    >>> cache = kvant.Cache(spec=kvant.CacheSpec((layer, kvant.EmptySpec())))
    >>> len(cache), len(cache.layers)
    (2, 1)
    """


Recipe = LayerSpec | RecurrentSpec | GroupSpec | SharedSpec | EmptySpec
RECIPES_BY_KIND: dict[str, type[Recipe]] = {  # by the name in file headers
    "attention": LayerSpec,
    "recurrent": RecurrentSpec,
    "group": GroupSpec,
    "shared": SharedSpec,
    "empty": EmptySpec,
}


@dataclass(frozen=True)
class CacheSpec:
    """The recipes of all layers.

    >>> exact, small = kvant.parse("raw", 1).layers[0], kvant.parse("affine4", 1).layers[0]
    >>> spec = kvant.CacheSpec((exact, small, small))
    >>> len(kvant.Cache(spec=spec))
    3
    """

    layers: tuple[Recipe, ...]

    def with_slack(self, slack: int) -> CacheSpec:
        """Return the spec with exact rewinds of at least `slack` tokens."""
        return self.map_layers(lambda layer: replace(layer, slack=max(layer.slack, slack)))

    def map_layers(self, function: Callable[[LayerSpec], LayerSpec]) -> CacheSpec:
        """Return the spec with `function` applied to all attention layers, in groups as well."""
        return self._map(LayerSpec, function)

    @property
    def has_window(self) -> bool:
        """Whether a layer drops the rows before a window: a rewind reaches `slack` tokens then."""
        layers = iterate_attention(*self.layers)
        return any(layer.retention.window is not None for layer in layers)

    @property
    def prunes(self) -> bool:
        """Whether a layer prunes rows after a prompt."""
        return any(layer.prune is not None for layer in iterate_attention(*self.layers))

    @property
    def repeats_prompt(self) -> bool:
        """Whether the score of a prune needs a second pass over the prompt."""
        rules = (layer.prune for layer in iterate_attention(*self.layers))
        return any(rule is not None and rule.score.repeats_prompt for rule in rules)

    @property
    def retains_queries(self) -> bool:
        """Whether the newest queries are retained while decoding, for later prunes."""
        rules = [rule for rule in (x.prune for x in iterate_attention(*self.layers)) if rule]
        return any(rule.score.num_queries and rule.score.prunes_during_decode for rule in rules)

    def with_checkpoints(self, max_checkpoints: int) -> CacheSpec:
        """Return the spec with at most `max_checkpoints` per recurrent layer."""
        return self._map(RecurrentSpec, lambda spec: replace(spec, max_checkpoints=max_checkpoints))

    def _map(self, recipe_type: type[T], function: Callable[[T], T]) -> CacheSpec:
        return CacheSpec(tuple(_map_recipe(layer, recipe_type, function) for layer in self.layers))


# A string of the spec language, one recipe for all attention layers, or the recipes of all layers.
AnySpec = str | LayerSpec | CacheSpec


def iterate_attention(*recipes: Recipe) -> Iterator[LayerSpec]:
    """Yield the attention recipes among `recipes`, in groups as well."""
    for recipe in recipes:
        if isinstance(recipe, GroupSpec):
            yield from iterate_attention(*(part for _, part in recipe.parts))
        elif isinstance(recipe, LayerSpec):
            yield recipe


def _map_recipe(recipe: Recipe, recipe_type: type[T], function: Callable[[T], T]) -> Any:
    """Apply `function` to a recipe, or to the parts of a group, of type `recipe_type`."""
    if isinstance(recipe, GroupSpec):
        parts = ((name, _map_recipe(part, recipe_type, function)) for name, part in recipe.parts)
        return GroupSpec(tuple(parts))
    return function(recipe) if isinstance(recipe, recipe_type) else recipe
