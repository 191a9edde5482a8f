"""One recurrent layer of a cache: it stores a copy of its state after each forward."""

from __future__ import annotations

import operator
from dataclasses import replace

from kvant.cache.holder import StateHolder
from kvant.cache.layout import RecurrentLeaf
from kvant.cache.recurrent import (
    EMPTY_STATE,
    RecurrentBase,
    RecurrentState,
    StateHistory,
    copy_in_stored_dtype,
    get_shapes,
    get_stored_dtype,
)
from kvant.contracts import Fields, LayerStats
from kvant.platform.torch_runtime import is_transforming, make_transform_error
from kvant.recipes import RecurrentSpec


class RecurrentLayer(RecurrentBase):
    """One recurrent layer of a cache."""

    def __init__(self, holder: StateHolder, name: str) -> None:
        self.holder = holder
        self.name = name

    @property
    def leaf(self) -> RecurrentLeaf:
        """The recipe of this layer, and its indices in a `CacheState`."""
        leaf = self.holder.state.layout.leaves[self.name]
        assert isinstance(leaf, RecurrentLeaf)
        return leaf

    @property
    def spec(self) -> RecurrentSpec:
        return self.leaf.spec

    @property
    def stats(self) -> LayerStats:
        return self.holder.stats[self.name]

    @property
    def history(self) -> StateHistory:
        return self.holder.get_history(self.leaf)

    @property
    def length(self) -> int:
        """The number of tokens that the current state has processed."""
        return self.history.current.length

    def nbytes_after_append(self, count: int, tensors: Fields) -> int:
        """Return the bytes allocated after an append with the same arguments."""
        _check_append(count, tensors)
        self._check_shapes(tensors)
        stored_tensors = {
            name: tensor.to("meta", get_stored_dtype(tensor.dtype))
            for name, tensor in tensors.items()
        }
        # An append frees the current state, except tensors that a checkpoint shares with it.
        checkpoint_nbytes = replace(self.history, current=EMPTY_STATE).nbytes
        return checkpoint_nbytes + sum(tensor.nbytes for tensor in stored_tensors.values())

    def append(self, count: int, state: Fields) -> None:
        """Store a copy of the state after `count` more tokens."""
        if is_transforming():
            raise make_transform_error("append")
        count = _check_append(count, state)
        leaf, holder = self.leaf, self.holder
        with holder.lock:
            forward = holder.begin_append(leaf.index, count)
            self._check_shapes(state)
            forward.check_batch(next((tensor.shape[0] for tensor in state.values()), 0))
            tensors = {name: copy_in_stored_dtype(tensor) for name, tensor in state.items()}
            history = self.history
            current = RecurrentState(history.current.length + count, tensors)
            self.stats.appends += 1
            history = replace(history, current=current)
            holder.commit_layer(forward, leaf.index, (leaf.history, history))

    def _check_shapes(self, tensors: Fields) -> None:
        old = get_shapes(self.history.current.tensors)
        if self.length and get_shapes(tensors) != old:
            raise ValueError(f"state {get_shapes(tensors)} for a layer of {old}")


def _check_append(count: int, tensors: Fields) -> int:
    """Return the number of tokens; refuse a state that could not be restored from a file."""
    count = operator.index(count)
    if count < 0:
        raise ValueError(f"append of {count} tokens: 0 or more")
    if any("/" in name or not name for name in tensors):
        raise ValueError(f"state {list(tensors)}: names without / are needed")
    batches = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors.values()}
    if len(batches) > 1 or 0 in batches:
        raise ValueError(f"state {get_shapes(tensors)}: [batch, ...] with one batch size is needed")
    return count
