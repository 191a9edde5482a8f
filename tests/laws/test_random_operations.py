"""Test random operations on a cache against a list of rows. Every row carries its position."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvant import Cache, CapacityError, RewindError, attend, load, merge, save
from kvant.cache import PagedLayer
from kvant.contracts import View
from kvant.retention import Retention
from laws.cases import FOREIGN

SPECS = (
    "raw",
    "raw,window=50,sinks=3,slack=5",
    "raw,capacity=400,step=1",
    "affine8,tail=0",
    "affine4,tail=7,sinks=2",
    "affine8v4,window=130,sinks=2,slack=20",
    "affine4,window=20,sinks=0,tail=40",
    "raw/affine8,start=90",
    f"{FOREIGN},window=70,sinks=2,tail=9",
)
LAYERS, DIM = 2, 16


class Life(RuleBasedStateMachine):
    """`tags` holds the expected rows of each sequence; constant rows survive an affine format."""

    @initialize(spec=st.sampled_from(SPECS), batch=st.integers(1, 2))
    def begin(self, spec: str, batch: int) -> None:
        self.cache = Cache(LAYERS, spec)
        self.batch = batch
        self.tags: list[list[int]] = [[] for _ in range(batch)]
        self.next_tag = self.back = 0  # distance from the maximum length
        self.kept: list[tuple[Cache, list[list[int]], int]] = []

    def rows(self, tags: list[list[int]]) -> torch.Tensor:
        return torch.tensor(tags).float()[:, None, :, None].expand(-1, 2, -1, DIM)

    @rule(count=st.integers(1, 150), died_at=st.integers(0, LAYERS))
    def append(self, count: int, died_at: int) -> None:
        """Run a forward; sometimes one that fails after `died_at` layers first."""
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
        self.back = max(0, self.back - count)
        self.tags = [old + new for old, new in zip(self.tags, fresh, strict=True)]

    @rule(count=st.integers(1, 5), refused=st.lists(st.integers(0, 5), min_size=4, max_size=4))
    def draft(self, count: int, refused: list[int]) -> None:
        """Append a chunk of drafts: each sees what it would see alone.

        Each sequence refuses its own number of the last ones.
        """
        if self.cache.capacity is not None and self.cache.length + count > self.cache.capacity:
            return
        drafts = [[(self.next_tag + i) % 2000 for i in range(count)] for _ in self.tags]
        rows, tags = self.rows(drafts), self.tags
        with self.cache.speculation_mode():
            views = [self.cache[layer].append(rows, rows) for layer in range(LAYERS)]
        self.tags = [old + new for old, new in zip(tags, drafts, strict=True)]
        for layer, view in zip(self.cache, views, strict=True):
            assert mean_visible_tags(view, count) == [
                pytest.approx(each, rel=1e-4, abs=1e-3)
                for each in expected_means(layer.spec.retention, self.tags, count)
            ]
        num_kept = [max(0, count - n) for n in refused[: self.batch]]
        self.tags = [old + new[:n] for old, new, n in zip(tags, drafts, num_kept, strict=True)]
        self.cache.rewind_each([len(kept) for kept in self.tags])
        self.back = max(0, self.back - count) + count - min(num_kept)
        self.next_tag += count

    @rule(num_rewound=st.integers(0, 200))
    def rewind(self, num_rewound: int) -> None:
        length = self.cache.length - num_rewound
        if length < 0 or self.cache.reachable(length) != length:
            with pytest.raises(RewindError):
                self.cache.rewind(length)
            assert self.cache.length == max(map(len, self.tags))
            return
        self.cache.rewind(length)
        self.go_back(num_rewound)

    def go_back(self, count: int) -> None:
        """Rewind all sequences by equal counts, or to their start."""
        self.back += count
        self.tags = [tags[: max(0, len(tags) - count)] for tags in self.tags]

    @rule(num_rewound=st.integers(0, 5))
    def short_rewind_is_always_possible(self, num_rewound: int) -> None:
        """All specs here have a slack of 5 or more, counted from the maximum length."""
        before = self.cache.length
        count = min(before, num_rewound, max(0, 5 - self.back))
        assert self.cache.trim(count) == count
        self.go_back(count)

    @rule(mode=st.sampled_from(["fork", "snapshot", "file"]))
    def copy(self, mode: str) -> None:
        """Continue with the copy; the original must stay unchanged from now on."""
        copy = {"fork": self.cache.fork, "snapshot": self.by_snapshot, "file": self.by_file}[mode]()
        self.keep(copy)

    def keep(self, following: Cache) -> None:
        self.kept = [*self.kept[-1:], (self.cache, self.tags, self.back)]
        self.cache = following

    @precondition(lambda self: self.kept and all(map(len, self.tags)) and self.batch < 4)
    @rule()
    def merge(self) -> None:
        """Merge with the sequences of an older cache, which may have diverged."""
        other, tags, kept_distance = self.kept[-1]
        if not all(map(len, tags)) or self.batch + len(tags) > 4:
            return
        self.keep(merge([self.cache, other]))
        self.tags, self.batch = self.tags + tags, self.batch + len(tags)
        self.back = max(self.back, kept_distance)

    @precondition(lambda self: self.cache.length)
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, self.batch - 1))
        self.keep(self.cache.extract(index))
        self.tags, self.batch = [self.tags[index]], 1

    @precondition(lambda self: self.cache.length and self.batch > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, self.batch - 1))
        self.cache.remove(index)
        self.tags = [tags for i, tags in enumerate(self.tags) if i != index]
        self.batch -= 1

    def by_snapshot(self) -> Cache:
        restored = Cache(None, self.cache.spec)
        restored.restore(self.cache.snapshot())
        return restored

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
        self.back = 0

    @invariant()
    def holds_what_it_should(self) -> None:
        for cache, tags, _ in [(self.cache, self.tags, 0), *self.kept]:
            cache.state.pools.check()
            for layer in cache:
                assert isinstance(layer, PagedLayer)
                check_layer(layer, tags)


def check_layer(layer: PagedLayer, tags: list[list[int]]) -> None:
    length = max(map(len, tags))
    assert layer.length == length
    if length == 0:
        return
    keys, values = layer.read()
    positions = layer.positions()
    retention = layer.spec.retention
    for sequence, expected in enumerate(tags):
        count = len(expected)
        first = 0 if retention.window is None else max(0, count - retention.window)
        row_positions = positions[sequence].tolist()
        expected_positions = set(range(first, count)) | set(range(min(retention.sinks, count)))
        assert expected_positions <= set(row_positions) <= {-1, *range(count)}
        tags_read = keys[sequence, 0, :, 0].tolist()
        assert [tag for tag, p in zip(tags_read, row_positions, strict=True) if p >= 0] == [
            expected[p] for p in row_positions if p >= 0
        ]
        assert torch.equal(keys[sequence], values[sequence])
    (expected_,) = expected_means(retention, tags, 1)
    assert mean_visible_tags(layer.view(), 1) == [pytest.approx(expected_, rel=1e-4, abs=1e-3)]


def mean_visible_tags(view: View, count: int) -> list[list[float]]:
    """Return the mean of the rows that the newest tokens see, by equal scores, per token."""
    zeros = torch.zeros(view.batch, 2, count, DIM)
    values: list[list[float]] = attend(zeros, view)[:, 0, :, 0].mT.tolist()
    return values


def expected_means(retention: Retention, tags: list[list[int]], count: int) -> list[list[float]]:
    """Return the expected means by the rule; nothing before the first token of a sequence."""
    values: list[list[float]] = []
    for num_rewound in range(count, 0, -1):
        values.append([])
        for expected in tags:
            query = len(expected) - num_rewound
            visible = {p for p in range(query + 1) if query - p < (retention.window or query + 1)}
            visible |= set(range(min(retention.sinks, query + 1)))
            values[-1].append(sum(expected[p] for p in visible) / max(1, len(visible)))
    return values


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=25)


@pytest.mark.laws
def test_ten_thousand_operations() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    many = settings(max_examples=400, stateful_step_count=50)  # over 10,000 operations
    run_state_machine_as_test(Life, settings=many)
