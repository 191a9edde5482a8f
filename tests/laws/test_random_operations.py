"""Random lives of a cache against a list of rows. Every row carries its own position."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvant import Cache, CapacityError, RewindError, attend, load, save
from kvant.contracts import Retention, View
from kvant.layers import Attention

SPECS = (
    "raw",
    "raw,window=50,sinks=3,slack=5",
    "raw,capacity=400,step=1",
    "affine8,tail=0",
    "affine4,tail=7,sinks=2",
    "affine8v4,window=130,sinks=2,slack=20",
    "affine4,window=20,tail=40",
    "raw/affine8,start=90",
)
LAYERS, DIM = 2, 16


class Life(RuleBasedStateMachine):
    """`tags` holds what each sequence's rows should say; constant rows survive an affine format."""

    @initialize(spec=st.sampled_from(SPECS), batch=st.integers(1, 2))
    def begin(self, spec: str, batch: int) -> None:
        self.cache = Cache(LAYERS, spec)
        self.batch = batch
        self.tags: list[list[int]] = [[] for _ in range(batch)]
        self.next_tag = self.furthest = 0
        self.kept: list[tuple[Cache, list[list[int]]]] = []

    def rows(self, tags: list[list[int]]) -> torch.Tensor:
        return torch.tensor(tags).float()[:, None, :, None].expand(-1, 2, -1, DIM)

    @rule(count=st.integers(1, 150), died_at=st.integers(0, LAYERS))
    def append(self, count: int, died_at: int) -> None:
        """A forward; sometimes one that dies after `died_at` layers first."""
        fresh = [[(self.next_tag + i) % 2000 for i in range(count)] for _ in self.tags]
        rows, length = self.rows(fresh), self.cache.length
        if self.cache.capacity is not None and length + count > self.cache.capacity:
            with pytest.raises(CapacityError):
                self.cache[0].append(rows, rows)
            assert self.cache.length == length
            return
        if died_at < LAYERS:
            for layer in range(died_at):
                self.cache[layer].append(rows + 7, rows + 7)
            assert self.cache.length == length
        for layer in range(LAYERS):
            self.cache[layer].append(rows, rows)
        self.next_tag += count
        self.furthest = max(self.furthest, self.cache.length)
        self.tags = [old + new for old, new in zip(self.tags, fresh, strict=True)]

    @rule(count=st.integers(1, 5), taken=st.integers(0, 5))
    def draft(self, count: int, taken: int) -> None:
        """A chunk of drafts, of which the first are taken: each sees what it would see alone."""
        if self.cache.capacity is not None and self.cache.length + count > self.cache.capacity:
            return
        drafts = [[(self.next_tag + i) % 2000 for i in range(count)] for _ in self.tags]
        rows, tags = self.rows(drafts), self.tags
        with self.cache.speculating():
            views = [self.cache[layer].append(rows, rows) for layer in range(LAYERS)]
        self.tags = [old + new for old, new in zip(tags, drafts, strict=True)]
        for layer, view in zip(self.cache, views, strict=True):
            assert means(view, count) == [
                pytest.approx(each, rel=1e-4, abs=1e-3)
                for each in seen_means(layer.spec.retention, self.tags, count)
            ]
        self.furthest = max(self.furthest, self.cache.length)
        refused = max(0, count - taken)
        assert self.cache.trim(refused) == refused
        self.next_tag += count
        self.tags = [old + new[: count - refused] for old, new in zip(tags, drafts, strict=True)]

    @rule(back=st.integers(0, 200))
    def rewind(self, back: int) -> None:
        to = self.cache.length - back
        if to < 0 or self.cache.reachable(to) != to:
            with pytest.raises(RewindError):
                self.cache.rewind(to)
            assert self.cache.length == len(self.tags[0])
            return
        self.cache.rewind(to)
        self.tags = [tags[:to] for tags in self.tags]

    @rule(back=st.integers(0, 5))
    def short_rewind_is_always_possible(self, back: int) -> None:
        """All specs here keep a slack of 5 or more, counted from the furthest length."""
        before = self.cache.length
        to = min(before, max(before - back, self.furthest - 5, 0))
        assert self.cache.trim(before - to) == before - to
        self.tags = [tags[:to] for tags in self.tags]

    @rule(how=st.sampled_from(["fork", "snapshot", "file"]))
    def copy(self, how: str) -> None:
        """Go on with the copy; the original must stay as it is from now on."""
        twin = {"fork": self.cache.fork, "snapshot": self.by_snapshot, "file": self.by_file}[how]()
        self.kept = [*self.kept[-1:], (self.cache, self.tags)]
        self.cache = twin

    def by_snapshot(self) -> Cache:
        twin = Cache(None, self.cache.spec)
        twin.restore(self.cache.snapshot())
        return twin

    def by_file(self) -> Cache:
        with tempfile.TemporaryDirectory() as folder:
            save(self.cache, Path(folder) / "cache")
            return load(Path(folder) / "cache")

    @precondition(lambda self: self.cache.length)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        index = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=3))
        self.cache.select(index)
        self.tags, self.batch = [self.tags[i] for i in index], len(index)

    @rule(free=st.booleans())
    def forget(self, free: bool) -> None:
        self.cache.clear() if free else self.cache.reset()
        self.tags = [[] for _ in self.tags]
        self.furthest = 0

    @invariant()
    def holds_what_it_should(self) -> None:
        for cache, tags in [(self.cache, self.tags), *self.kept]:
            for layer in cache:
                assert isinstance(layer, Attention)
                check(layer, tags)


def check(layer: Attention, tags: list[list[int]]) -> None:
    length = len(tags[0])
    assert layer.length == length
    if length == 0:
        return
    keys, values = layer.read()
    positions = layer.positions()
    retention = layer.spec.retention
    first = 0 if retention.window is None else max(0, length - retention.window)
    for sequence, expected in enumerate(tags):
        held = positions[sequence].tolist()
        assert set(range(first, length)) | set(range(min(retention.sinks, length))) <= set(held)
        assert keys[sequence, 0, :, 0].tolist() == [expected[p] for p in held]
        assert torch.equal(keys[sequence], values[sequence])
    (told,) = seen_means(retention, tags, 1)
    assert means(layer.view(), 1) == [pytest.approx(told, rel=1e-4, abs=1e-3)]


def means(view: View, count: int) -> list[list[float]]:
    """What the newest tokens see: with equal scores, the mean of it, a list a token."""
    zeros = torch.zeros(len(view.start), 2, count, DIM)
    told: list[list[float]] = attend(zeros, view)[:, 0, :, 0].mT.tolist()
    return told


def seen_means(retention: Retention, tags: list[list[int]], count: int) -> list[list[float]]:
    """What the rule says that they see."""
    length, told = len(tags[0]), []
    for query in range(length - count, length):
        seen = {p for p in range(query + 1) if query - p < (retention.window or length)}
        seen |= set(range(min(retention.sinks, query + 1)))
        told.append([sum(expected[p] for p in seen) / len(seen) for expected in tags])
    return told


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.laws
def test_ten_thousand_operations() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    many = settings(max_examples=400, stateful_step_count=50)  # well over 10,000 operations
    run_state_machine_as_test(Life, settings=many)
