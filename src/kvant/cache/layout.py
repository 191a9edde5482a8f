"""The layout of a cache: which layers store rows, which store states, and what they share.

A spec has one recipe per layer. A layer that stores rows or states of its own is a leaf; a layer
that stores both has two leaves. Attention leaves with equal parameters form a layer group, which
has one page table:

    spec.layers    0: affine8    1: affine8    2: affine8,window=64    3: rows of layer 1
    leaves         "0"           "1"           "2"                     (none)
    group          0             0             1

A layout is immutable. A recode replaces it; forks share it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvant.attention import select_tiles
from kvant.contracts import Fields, LayerStats, View, ViewSelection
from kvant.page_table import LayerGroup, PageTable
from kvant.pages.pool import CachePools
from kvant.pages.storage import Geometry, Storage, TileSelector
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, RecurrentSpec


@dataclass(frozen=True)
class AttentionLeaf:
    """One leaf that stores rows: its recipe, and its indices in a `CacheState`."""

    name: str  # layer number, or number/part for a GroupSpec
    spec: LayerSpec
    group: int  # index of its layer group
    index: int  # among the leaves that kvant stores, of both kinds
    select_tiles: TileSelector | None = None  # None: the default of the device

    def make_storage(self, geometry: Geometry) -> Storage:
        """Return empty tensors for rows of this geometry."""
        return Storage(self.spec, geometry, self.select_tiles or select_tiles)

    @cached_property
    def has_frame(self) -> bool:
        """Whether rows are transformed before they are stored."""
        return not all(codec.frame.is_identity for codec in self.spec.sides.values())

    @cached_property
    def has_per_head_tables(self) -> bool:
        return has_per_head_tables(self.spec)

    def make_view(
        self,
        pools: CachePools,
        storage: Storage,
        page_table: PageTable,
        stats: LayerStats,
        backend: str | None = None,
        *,
        new_rows: Fields | None = None,
        new_rows_dense: bool = False,
    ) -> View:
        """Return the view of the rows in `page_table`, for attention."""
        keys = storage.sides["keys"]
        values = storage.sides.get("values", keys)
        width = self.spec.value_dim or values.dim
        selection = None
        if self.spec.select is not None:
            slot_versions = pools[self.group].sealed.slot_versions
            selection = ViewSelection(self.spec.select, slot_versions)
        heads = keys.heads * page_table.tables_per_sequence
        return View(
            *(keys, values, new_rows, page_table, new_rows_dense, self.spec.mask),
            *(page_table.batch, heads, width, stats, backend, selection),
        )


@dataclass(frozen=True)
class RecurrentLeaf:
    """One leaf that stores recurrent states: its recipe, and its indices in a `CacheState`."""

    name: str
    spec: RecurrentSpec
    history: int  # index in `CacheState.histories`
    index: int  # among the leaves that kvant stores, of both kinds


Leaf = AttentionLeaf | RecurrentLeaf


@dataclass(frozen=True, eq=False)
class CacheLayout:
    """The leaves of a cache, and the layer groups of its attention leaves.

    A leaf's name is also its name in cache files.
    """

    layer_groups: tuple[LayerGroup, ...]
    leaf_groups: tuple[int | None, ...]  # group of each leaf index; None: a recurrent leaf
    spec: CacheSpec = field(default_factory=lambda: CacheSpec(()))
    names: tuple[str, ...] = ()  # of all leaves, in order; the model stores the states of some
    leaves: Mapping[str, Leaf] = field(default_factory=dict)  # by name, only those kvant stores
    select_tiles: TileSelector | None = None

    @classmethod
    def from_spec(
        cls,
        spec: CacheSpec,
        external_names: Container[str] = (),
        select_tiles: TileSelector | None = None,
    ) -> CacheLayout:
        """Return the layout of a spec; the model stores the states of `external_names`."""
        recipes = dict(iterate_leaves(spec))
        stored = {name: recipe for name, recipe in recipes.items() if name not in external_names}
        groups = [
            make_layer_group(recipe, index) if isinstance(recipe, LayerSpec) else None
            for index, recipe in enumerate(stored.values())
        ]
        layer_groups = tuple(group for group in dict.fromkeys(groups) if group is not None)
        leaves: dict[str, Leaf] = {}
        num_histories = 0
        for index, ((name, recipe), group) in enumerate(zip(stored.items(), groups, strict=True)):
            if isinstance(recipe, LayerSpec):
                assert group is not None
                leaves[name] = AttentionLeaf(
                    name, recipe, layer_groups.index(group), index, select_tiles
                )
            else:
                leaves[name] = RecurrentLeaf(name, recipe, num_histories, index)
                num_histories += 1
        leaf_groups = tuple(
            None if group is None else layer_groups.index(group) for group in groups
        )
        return cls(layer_groups, leaf_groups, spec, tuple(recipes), leaves, select_tiles)

    def replace_spec(self, spec: CacheSpec) -> CacheLayout:
        """Return the layout of another spec for the same layers."""
        external_names = [name for name in self.names if name not in self.leaves]
        return CacheLayout.from_spec(spec, external_names, self.select_tiles)

    @cached_property
    def attention(self) -> tuple[AttentionLeaf, ...]:
        return tuple(leaf for leaf in self.leaves.values() if isinstance(leaf, AttentionLeaf))

    @cached_property
    def attention_by_name(self) -> Mapping[str, AttentionLeaf]:
        return {leaf.name: leaf for leaf in self.attention}

    @cached_property
    def recurrent(self) -> tuple[RecurrentLeaf, ...]:
        return tuple(leaf for leaf in self.leaves.values() if isinstance(leaf, RecurrentLeaf))

    @cached_property
    def prunes(self) -> bool:
        return any(group.pruning is not None for group in self.layer_groups)

    @cached_property
    def capacity(self) -> int | None:
        """The maximum length of a sequence, which its smallest group sets; None: unbounded."""
        limits = [group.capacity for group in self.layer_groups]
        return min((limit for limit in limits if limit is not None), default=None)


def iterate_leaves(spec: CacheSpec) -> Iterator[tuple[str, LayerSpec | RecurrentSpec]]:
    """Yield the recipe of each leaf of a spec, with its name in files."""
    for index, recipe in enumerate(spec.layers):
        if isinstance(recipe, GroupSpec):
            yield from ((f"{index}/{name}", part) for name, part in recipe.parts)
        elif isinstance(recipe, LayerSpec | RecurrentSpec):
            yield str(index), recipe


def make_layer_group(spec: LayerSpec, leaf: int | None = None) -> LayerGroup:
    """Return the group of a layer; layers with equal groups share one page table.

    A layer with a page table per head has a group of its own; its leaf index makes it unique.
    """
    per_head_layer = leaf if has_per_head_tables(spec) else None
    window, sinks = spec.retention.window, spec.retention.sinks
    limits = window, sinks, spec.slack, spec.step, spec.capacity
    return LayerGroup(spec.paging, *limits, spec.prune, per_head_layer)


def has_per_head_tables(spec: LayerSpec) -> bool:
    """Return whether each key head has pages of its own: heads retain different rows."""
    return spec.prune is not None and spec.prune.adaptive
