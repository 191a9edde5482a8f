"""The cache of a model: one state a layer, all at one committed length.

`cache.length` is what every layer holds. Verbs act on all layers or on none, and on the committed
tokens: what a forward that died left behind is taken back first. A layer that shares the rows of
another is the same state, listed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvant.contracts import (
    LayerState,
    Snapshot,
    Tally,
    Tiles,
)
from kvant.errors import RewindError, SpecError
from kvant.layers import Together, agreed, build, joined, leaves, restore_all, split
from kvant.recipes import CacheSpec, LayerSpec, SharedSpec
from kvant.spec import as_spec


class Cache:
    """Keys and values, or whatever its layers remember, of one batch of sequences."""

    def __init__(
        self,
        num_layers: int | None = None,
        spec: str | LayerSpec | CacheSpec = "raw",
        *,
        tiles: Tiles | None = None,
    ) -> None:
        """`spec` is a string of the spec language, one recipe for all layers, or one a layer."""
        if num_layers is None and not isinstance(spec, CacheSpec):
            raise SpecError("num_layers is needed: only a CacheSpec says how many layers there are")
        count = (
            len(spec.layers) if isinstance(spec, CacheSpec) and num_layers is None else num_layers
        )
        self.spec = as_spec(spec, count or 0)
        self.tiles = tiles
        recipes = [r for r in self.spec.layers if not isinstance(r, SharedSpec)]
        self._with([build(recipe, tiles) for recipe in recipes])

    def _with(self, states: list[LayerState]) -> Cache:
        """Take these as the states of the recipes that have one of their own, in order."""
        fresh = iter(states)
        self.layers: list[LayerState] = []
        for index, recipe in enumerate(self.spec.layers):
            if not isinstance(recipe, SharedSpec):
                self.layers.append(next(fresh))
            elif 0 <= recipe.layer < index:
                self.layers.append(self.layers[recipe.layer])
            else:
                raise SpecError(f"layer {index} shares {recipe.layer}: an earlier one is needed")
        self._own = states
        self._ledger = Together([leaf for state in states for leaf in leaves(state)])
        return self

    def __getitem__(self, layer: int) -> LayerState:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerState]:
        return iter(self.layers)

    def __repr__(self) -> str:
        return f"Cache({len(self)} layers, length {self.length}, {self.nbytes} bytes)"

    @property
    def length(self) -> int:
        """Tokens that every layer holds, or has seen and let go."""
        return min((state.length for state in self._own), default=0)

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        return max((state.batch for state in self._own), default=0)

    @property
    def held(self) -> int:
        """Rows stored: of the layer that stores most."""
        return max((state.held for state in self._own), default=0)

    @property
    def max_held(self) -> int | None:
        """What `held` never passes; None where only memory is the limit."""
        limits = [state.max_held for state in self._own]
        return None if None in limits else max((limit or 0 for limit in limits), default=0)

    @property
    def capacity(self) -> int | None:
        """The length that no layer passes; None where only memory is the limit."""
        recipes = [r for r in self.spec.layers if isinstance(r, LayerSpec)]
        return min((r.capacity for r in recipes if r.capacity is not None), default=None)

    @property
    def nbytes(self) -> int:
        """Bytes allocated; what layers share counts once."""
        return sum(state.nbytes for state in self._own)

    @property
    def nbytes_used(self) -> int:
        """Bytes of rows that are there."""
        return sum(state.nbytes_used for state in self._own)

    def reachable(self, to: int) -> int:
        """The longest length <= `to` that every layer can go back to."""
        self._ledger.rollback()
        return agreed(self._own, min(to, self.length))

    def rewind(self, to: int) -> None:
        """Go back to length `to`; every layer, or an error and none."""
        self._ledger.rollback()
        if not 0 <= to <= self.length or self.reachable(to) != to:
            stuck = [i for i, s in enumerate(self.layers) if s.reachable(to) != to]
            raise RewindError(
                f"length {to} cannot be reached from {self.length}: layer "
                f"{stuck[0] if stuck else 0} can go back to {self.reachable(to)} at the longest"
            )
        for state in self._own:
            state.rewind(to)

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens, or all there are; how many that was."""
        self._ledger.rollback()
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        dropped = min(count, self.length)
        self.rewind(self.length - dropped)
        return dropped

    def checkpoint(self) -> None:
        """Make the present length one that recurrent layers can come back to."""
        self._ledger.rollback()
        for state in self._own:
            state.checkpoint()

    def snapshot(self) -> Snapshot:
        """A copy of all that is remembered, to `restore` from."""
        exposed = self.exposed()
        copies = {name: tensor.clone() for name, tensor in exposed.tensors.items()}
        return Snapshot(copies, exposed.numbers)

    def exposed(self) -> Snapshot:
        """A snapshot that may share memory with the cache: to be read before anything else."""
        self._ledger.rollback()
        return joined({str(i): state.exposed() for i, state in enumerate(self._own)})

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds; every layer, or an error and none."""
        self._ledger.rollback()
        pieces = split(snapshot, [str(i) for i in range(len(self._own))])
        restore_all([(state, pieces[str(i)]) for i, state in enumerate(self._own)])
        for state in self._own:
            state.commit()

    def fork(self) -> Cache:
        """A second cache with the same tokens, independent of this one from now on."""
        self._ledger.rollback()
        return Cache(None, self.spec, tiles=self.tiles)._with([s.fork() for s in self._own])

    def select(self, index: Sequence[int] | Tensor) -> None:
        """Keep these sequences of the batch, in this order, with repeats if there are any."""
        self._ledger.rollback()
        chosen = torch.as_tensor(index, dtype=torch.int64).cpu()
        fits = chosen.ndim == 1 and all(0 <= i < self.batch for i in chosen.tolist())
        if not fits or (self.batch and not len(chosen)):
            raise ValueError(f"sequences {chosen.tolist()} of a batch of {self.batch}")
        for state in self._own:
            state.select(chosen)

    def repeat(self, count: int) -> None:
        """Every sequence `count` times, one after the other."""
        if count < 1:
            raise ValueError(f"repeat({count}): 1 or more times")
        self.select(torch.arange(self.batch).repeat_interleave(count))

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """As many sequences as now, each taken from where `index` says: a step of beam search."""
        if len(index) != self.batch:
            raise ValueError(f"reorder with {len(index)} sequences of a batch of {self.batch}")
        self.select(index)

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self._ledger.rollback()
        for state in self._own:
            state.reset()

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._ledger.rollback()
        for state in self._own:
            state.clear()

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, in numbers."""
        total = Tally()
        for state in self._own:
            total.add(state.tally)
        allocated, used = self.nbytes, self.nbytes_used
        return {
            "sequences": self.batch,
            "length": self.length,
            "held": self.held,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "appends": total.appends,
            "rewinds_exact": total.rewinds_exact,
            "rewinds_decoded": total.rewinds_decoded,
            "abandoned": self._ledger.abandoned,
            "attended": dict(Counter(total.attended)),
            "sealed": dict(Counter(total.sealed)),
        }
