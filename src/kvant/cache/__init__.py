"""The cache of a model: one state a layer, all at one committed length.

`cache.length` is what every layer holds. Verbs act on all layers or on none, and on the committed
tokens: what a forward that died left behind is taken back first. A layer that shares the rows of
another is the same state, listed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvant.contracts import Follower, LayerState, Snapshot, Tiles
from kvant.errors import CacheError, RewindError
from kvant.layers import Group, Together, attending, build, check_reach, succeeding, within
from kvant.recipes import AnySpec, CacheSpec, EmptySpec, SharedSpec
from kvant.refusals import Refusals
from kvant.spec import as_spec, check_fitted, words


class Cache(Refusals):
    """Keys and values, or whatever its layers remember, of one batch of sequences."""

    def __init__(
        self,
        num_layers: int | None = None,
        spec: AnySpec = "raw",
        *,
        tiles: Tiles | None = None,
        states: Mapping[int, LayerState] | None = None,
    ) -> None:
        """`spec` is a string of the spec language, one recipe for all layers, or one a layer.

        `states` are memories that exist already, by layer; the others are built from the spec.
        """
        full, given = check_fitted(as_spec(spec, num_layers)), states or {}
        own = {
            str(index): given[index] if index in given else build(recipe, tiles)
            for index, recipe in enumerate(full.layers)
            if not isinstance(recipe, SharedSpec | EmptySpec)
        }
        self._hold(full, tiles, Group(own))

    def _hold(self, spec: CacheSpec, tiles: Tiles | None, states: Group) -> None:
        self.spec = spec
        self.tiles = tiles
        self._states = states  # by the number of the layer that has one of its own
        self._recoded: list[dict[str, Any]] = []  # each recode: where, from what, to what
        self._ledger = Together(states.leaves(), states.followers())
        self.layers: dict[int, LayerState] = {}  # those that remember something
        for index, recipe in enumerate(spec.layers):
            if isinstance(recipe, SharedSpec):
                self.layers[index] = self.layers[recipe.layer]
            elif not isinstance(recipe, EmptySpec):
                self.layers[index] = states[str(index)]

    def __getitem__(self, layer: int) -> LayerState:
        index = range(len(self))[layer]
        if index not in self.layers:
            raise ValueError(f"layer {index} remembers nothing: the spec gives it no memory")
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.spec.layers)

    def __iter__(self) -> Iterator[LayerState]:
        """The states of the layers that remember something; a shared one comes twice."""
        return iter(self.layers.values())

    def __repr__(self) -> str:
        return f"Cache({len(self)} layers, length {self.length}, {self.nbytes} bytes)"

    @property
    def followers(self) -> list[Follower]:
        """The states that a host changes in place."""
        return self._states.followers()

    @property
    def changes(self) -> int:
        """Grows with all that may change `nbytes`: who remembers it need not ask the layers."""
        return self._ledger.changes

    @property
    def length(self) -> int:
        """Tokens that every layer has seen."""
        return self._ledger.length

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        return self._states.batch

    @property
    def held(self) -> int:
        """Rows that reading returns, of the layer that holds most."""
        return self._states.held

    @property
    def max_held(self) -> int | None:
        """What `held` never passes; None where only memory is the limit."""
        return self._states.max_held

    @property
    def capacity(self) -> int | None:
        """The length that no layer passes; None where only memory is the limit."""
        return self._states.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated; what layers share counts once."""
        return self._states.nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of rows that are there."""
        return self._states.nbytes_used

    def nbytes_after(self, coming: int, spec: AnySpec | None = None) -> int:
        """Bytes allocated after so many more tokens, recoded to `spec` first where one is given.

        Before the first rows nobody knows how large they are: 0. Checkpoints are not foreseen.
        """
        full = self.spec if spec is None else succeeding(self.spec, self._asked(spec))
        length, parts = self._settled().length + coming, self._states.parts
        return sum(
            state.nbytes_after(length, full.layers[int(name)]) for name, state in parts.items()
        )

    @property
    def whole(self) -> bool:
        """Has no forward reached some of the layers and not the others?"""
        return self._ledger.whole

    @property
    def interrupted(self) -> bool:
        """Is a verb to be brought to its end, which the next append or verb does?"""
        return self._ledger.unfinished is not None

    def reached(self, layer: int) -> bool:
        """Has the forward under way this layer's rows? One more append begins a new forward."""
        return any(id(leaf) in self._ledger.forward.arrived for leaf in self[layer].leaves())

    def rollback(self) -> None:
        """Take back what a forward left that died before it reached every layer."""
        self._settled()

    def reachable(self, to: int) -> int:
        """The longest length <= `to` that every layer can go back to."""
        return self._settled().reachable(min(to, self.length))

    def rewind(self, to: int) -> None:
        """Go back to length `to`; every layer, or an error and none."""
        states, to = self._settled(), operator.index(to)
        if not 0 <= to <= self.length or states.reachable(to) != to:
            for index, state in self.layers.items():
                check_reach(state, to, f"layer {index}: ")
            raise RewindError(f"length {to}: {states.reachable(to)} is the longest all can reach")
        self._ledger.each("rewind", lambda state: state.rewind(to), length=to)

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens, or all there are; how many that was."""
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        self._settled()
        dropped = min(count, self.length)
        self.rewind(self.length - dropped)
        return dropped

    def checkpoint(self) -> None:
        """Make the present length one that recurrent layers can come back to."""
        self._settled().checkpoint()

    def snapshot(self) -> Snapshot:
        """A copy of all that is remembered, to `restore` from."""
        return self.exposed().copied()

    def exposed(self) -> Snapshot:
        """A snapshot that may share memory with the cache: to be read before anything else."""
        return self._settled().exposed()

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds; every layer, or an error and none."""
        with self._ledger.staged("restore"):
            self._states.restore(snapshot)

    def fork(self) -> Cache:
        """A second cache with the same tokens, independent of this one from now on."""
        twin = Cache.__new__(Cache)
        twin._hold(self.spec, self.tiles, self._settled().fork())
        twin._recoded = list(self._recoded)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def select(self, index: Sequence[int] | Tensor) -> None:
        """Keep these sequences of the batch, in this order, with repeats if there are any."""
        self._settled()
        chosen, batch = torch.as_tensor(index).cpu(), self.batch
        fits = chosen.ndim == 1 and not (chosen.is_floating_point() or chosen.is_complex())
        fits = fits and chosen.dtype != torch.bool and all(0 <= i < batch for i in chosen.tolist())
        if not fits or (batch and not len(chosen)):
            said = f"sequences {chosen.tolist()} of a batch of {batch}"
            raise ValueError(f"{said}: numbers from 0 to {batch - 1} are needed")
        chosen = chosen.long()  # of 8 bits, they would be taken for a mask
        self._ledger.once("select", lambda state: state.select(chosen))

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

    def move(self, device: torch.device | str) -> None:
        """Lie in the memory of another device, the same otherwise."""
        self._settled().move(torch.empty(0, device=device).device)

    @contextmanager
    def speculating(self) -> Iterator[None]:
        """Within, a chunk may be drafts: it is read as one token after the other would be."""
        self._ledger.speculating = True
        try:
            yield
        finally:
            self._ledger.speculating = False

    def widen(self, slack: int) -> None:
        """From now on, let rewinds of so many tokens be exact."""
        spec = self.spec.widened(slack)
        self._ledger.each(
            "widen", lambda state: state.widen(slack), then=partial(setattr, self, "spec", spec)
        )

    def recode(self, spec: AnySpec) -> None:
        """Store the same tokens by another spec; every layer, or an error and none.

        A CacheSpec says it of each layer. One recipe for all goes to those that attend, and leaves
        them what follows from the model (see `within`).
        """
        asked = check_fitted(self._asked(spec))
        full, states = succeeding(self.spec, asked), self._settled()
        told = {"length": self.length, "from": words(self.spec), "nbytes_before": self.nbytes}
        # All of the new memory is there before any of the old one goes, or an error halfway could
        # not be undone. So the peak is old + new, and the scratch of a few pages of one layer.
        with self._ledger.staged("recode", partial(setattr, self, "spec", full)):
            for name, state in states.parts.items():
                try:
                    state.recode(full.layers[int(name)])
                except (CacheError, ValueError) as error:
                    raise type(error)(f"layer {name}: {error}") from error
        self._recoded.append(told | {"to": words(full), "nbytes_after": self.nbytes})

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self._ledger.anew("reset", lambda state: state.reset())

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._ledger.anew("clear", lambda state: state.clear())

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, in numbers."""
        tally = self._states.tally
        allocated, used = self.nbytes, self.nbytes_used
        return {
            "sequences": self.batch,
            "length": self.length,
            "held": self.held,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "appends": tally.appends,
            "rewinds_exact": tally.rewinds_exact,
            "rewinds_decoded": tally.rewinds_decoded,
            "abandoned": self._ledger.abandoned,
            "recodes": len(self._recoded),
            "recoded": [dict(told) for told in self._recoded],
            "attended": dict(tally.attended),
            "sealed": dict(tally.sealed),
            "clamped": tally.clamped,
        }

    def _settled(self) -> Group:
        """The states, without what an abandoned forward left in them."""
        self._ledger.rollback()
        return self._states

    def _asked(self, spec: AnySpec) -> CacheSpec:
        """One recipe a layer, from one for each or one for all that attend."""
        if isinstance(spec, CacheSpec) and len(spec.layers) == len(self):
            return as_spec(spec, len(self))
        places = attending(self.spec)
        told = as_spec(spec, len(places) or 1).layers  # read even where it concerns nobody
        by_layer = dict(enumerate(self.spec.layers)) | dict(zip(places, told, strict=False))
        full = CacheSpec(tuple(by_layer.values()))
        return full if isinstance(spec, CacheSpec) else within(self.spec, full)
