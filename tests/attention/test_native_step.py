"""Test decode steps with unchanged requests against append and attend, to the bit."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cache.tagged import assert_same
from kvant import Cache, CapacityError, UnsupportedView, attend
from kvant.cache import merge
from kvant.cache.tokens import commit_tokens, plan_tokens, record_sealed_pages
from kvant.native import capture_requests, get_library
from kvant.page_table import PageTable
from kvant.replay.steps import NativeDecodeStep, StaticNativePageTable

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
SPECS = (
    "raw",
    "affine8",
    "affine8,tail=3",
    "affine4/turbo4,tail=3",
    "fp8,tail=1",
    "raw,window=70,sinks=3",
    "affine8,tail=2,window=70,sinks=3",
    "affine4/fp8,window=70,sinks=3",
)


def make_rows(count: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, count, 32), torch.randn(batch, 2, count, 48)


def make_queries(batch: int = 2, count: int = 1) -> Tensor:
    return torch.randn(batch, 4, count, 32)


def make_filled_cache(text: str, count: int, start: list[int] | None = None) -> Cache:
    torch.manual_seed(1)
    cache = Cache(1, f"{text},prefill=stored")
    cache[0].append(*make_rows(count), start=start)
    return cache


def make_ragged_cache(text: str) -> Cache:
    """Return three sequences of different lengths; two share pages with each other."""
    first, two = make_filled_cache(text, 130), make_filled_cache(text, 63)
    return merge([first.extract(0), two.extract(0), first.extract(1)])


class SteppingPair:
    """A cache that decodes by steps, and a reference cache that appends."""

    def __init__(self, cache: Cache, other: Cache) -> None:
        self.cache, self.other = cache, other
        self.step: NativeDecodeStep | None = None
        self.newest_table: PageTable | None = None  # after the step
        self.new_rows: list[tuple[Tensor, Tensor]] = []

    def token(self, count: int = 1) -> None:
        batch = self.cache.batch
        new, q = make_rows(count, batch), make_queries(batch, count)
        self.new_rows.append(new)  # kept alive, so that the next rows have other addresses
        with self.other.speculation_mode():
            expected = attend(q, self.other[0].append(*new), backend="native")
        (change,) = plan_tokens(self.cache, count, seals=True)
        pages = self.cache[0].make_view(change)
        if self.step is None:
            self.step = NativeDecodeStep.from_view(
                pages, StaticNativePageTable(change, torch.device("cpu"))
            )
        elif count == 1 and change.is_steady and change.old_table is self.newest_table:
            self.step.page_table.advance()
        else:
            assert self.step.rebind(pages) and self.step.page_table.update(change)
        self.newest_table = change.new_table
        assert torch.equal(self.step(q, *new), expected)
        record_sealed_pages(self.cache, [change], self.step.backend)
        commit_tokens(self.cache, self.step.backend)

    def check(self) -> None:
        assert_same(self.cache.snapshot(), self.other.snapshot())
        assert self.cache.stats() == self.other.stats()
        self.cache.state.pools.check()


@pytest.mark.parametrize("text", SPECS)
def test_steps_equal_append_plus_attention(text: str) -> None:
    """Pages are sealed and started and memory grows while the requests of the first token stay."""
    pair = SteppingPair(make_filled_cache(text, 60), make_filled_cache(text, 60))
    requests: list[list[tuple[str, bytes]]] = []
    for _ in range(200):
        requests.append([])
        with capture_requests(lambda request: requests[-1].append(request[:2])):
            pair.token()
    stored = [[r for name, r in request if name == "store"][-1] for request in requests]
    assert len(set(stored)) > 1, "rows that came lie elsewhere each time"
    pair.check()


@pytest.mark.parametrize("text", SPECS)
def test_sequences_of_different_lengths_step_together(text: str) -> None:
    """Some sequences share pages that a step must not write to."""
    pair = SteppingPair(make_ragged_cache(text), make_ragged_cache(text))
    for _ in range(70):
        pair.token()
    pair.check()


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("count", [2, 5, 16])
def test_steps_of_several_tokens_equal_append_plus_attention(text: str, count: int) -> None:
    """Each of them reads the rows that it would read alone, also after a rewind."""
    pair = SteppingPair(make_ragged_cache(text), make_ragged_cache(text))
    draw = random.Random(0)
    for _ in range(40):
        pair.token(count)
        rejected = draw.randrange(count)
        for cache in (pair.cache, pair.other):
            cache.rewind(cache.length - rejected)
    pair.check()


def test_tokens_whose_rows_leave_the_open_pages_are_refused() -> None:
    cache = make_filled_cache("affine8,tail=1,slack=2", 60)
    before = cache.snapshot()
    with pytest.raises(CapacityError, match=r"plan_tokens\(16\): not all of their rows"):
        plan_tokens(cache, 16, seals=True)
    assert_same(cache.snapshot(), before)
    cache.state.pools.check()


def test_steps_inside_padding_write_nothing() -> None:
    pair = SteppingPair(
        make_filled_cache("raw", 2, start=[0, 6]), make_filled_cache("raw", 2, start=[0, 6])
    )
    for _ in range(9):
        pair.token()
    pair.check()


def test_changed_sequences_or_rows_are_not_followed() -> None:
    pair = SteppingPair(make_filled_cache("affine8", 30), make_filled_cache("affine8", 30))
    pair.token()
    assert pair.step is not None
    single = make_filled_cache("affine8", 30).extract(0)
    (change,) = plan_tokens(single)
    assert not pair.step.page_table.update(change)
    other = make_filled_cache("affine4,tail=0", 30)
    (change,) = plan_tokens(other)
    assert not pair.step.rebind(other[0].make_view(change))


def test_unsupported_layers_give_a_reason() -> None:
    cache = make_filled_cache("affine8,select=1:0,tail=1", 200)
    (change,) = plan_tokens(cache, seals=True)
    with pytest.raises(UnsupportedView, match="selects pages"):
        NativeDecodeStep.from_view(
            cache[0].make_view(change), StaticNativePageTable(change, torch.device("cpu"))
        )


def test_clamped_values_are_counted_where_a_step_seals_them() -> None:
    pair = SteppingPair(make_filled_cache("affine8", 60), make_filled_cache("affine8", 60))
    large = [1e6 * row for row in make_rows(1)]
    for cache in (pair.cache, pair.other):
        cache[0].append(*large)
    for _ in range(10):
        pair.token()
    pair.check()
    assert pair.cache.stats()["clamped"] > 0


def test_step_is_the_same_under_python_O() -> None:
    """All keys are equal, so a query gives the mean of all values."""
    code = (
        "import torch; from kvant import Cache; from kvant.cache.tokens import plan_tokens;"
        "from kvant.replay import steps;"
        "keys, values = torch.ones(1, 1, 71, 32), torch.arange(71.0)[:, None].expand(1, 1, 71, 32);"
        "cache = Cache(1, 'raw'); cache[0].append(keys[:, :, :70], values[:, :, :70]);"
        "(change,) = plan_tokens(cache, seals=True); place = steps.StaticNativePageTable(change, "
        "torch.device('cpu'));"
        "step = steps.NativeDecodeStep.from_view(cache[0].make_view(change), place); last = "
        "keys[:, :, 70:];"
        "print(float(step(last, last, values[:, :, 70:].contiguous()).mean()))"
    )
    run = [sys.executable, "-O", "-c", code]
    ran = subprocess.run(run, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(35)
