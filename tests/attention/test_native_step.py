"""Steps of decoding by requests that stay what they are, against append and attend: to the bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cache.tagged import same
from kvant import Cache, UnsupportedView, attend
from kvant.attention.native.decode_step import NativeDecodeStep, StaticNativePageTable
from kvant.cache import merge
from kvant.native import capture_requests, get_library

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


def rows(count: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, count, 32), torch.randn(batch, 2, count, 48)


def queries(batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 1, 32)


def filled(text: str, count: int, start: list[int] | None = None) -> Cache:
    torch.manual_seed(1)
    cache = Cache(1, f"{text},prefill=stored")
    cache[0].append(*rows(count), start=start)
    return cache


class Stepping:
    """A cache that steps, beside one to which rows are appended."""

    def __init__(self, cache: Cache, other: Cache) -> None:
        self.cache, self.other = cache, other
        self.step: NativeDecodeStep | None = None

    def token(self) -> None:
        batch = self.cache.batch
        new, q = rows(1, batch), queries(batch)
        expected = attend(q, self.other[0].append(*new), backend="native")
        (change,) = self.cache.expect(seals=True)
        pages = self.cache[0].make_view(change)
        if self.step is None:
            self.step = NativeDecodeStep.from_view(
                pages, StaticNativePageTable(change, torch.device("cpu"))
            )
        elif change.is_steady:
            self.step.page_table.advance()
        else:
            assert self.step.rebind(pages) and self.step.page_table.update(change)
        assert torch.equal(self.step(q, *new), expected)
        self.cache[0].record_sealed_pages(change, self.step.backend)
        self.cache.arrive(self.step.backend)

    def check(self) -> None:
        same(self.cache.snapshot(), self.other.snapshot())
        assert self.cache.stats() == self.other.stats()
        self.cache.check()


@pytest.mark.parametrize("text", SPECS)
def test_steps_are_appends_and_attention(text: str) -> None:
    """Pages fall due and begin, and memory grows: the requests are those of the first token."""
    both = Stepping(filled(text, 60), filled(text, 60))
    asked: list[list[tuple[str, bytes]]] = []
    for _ in range(200):
        asked.append([])
        with capture_requests(lambda one: asked[-1].append(one[:2])):
            both.token()
    stored = [[r for name, r in one if name == "store"][-1] for one in asked]
    assert len(set(stored)) > 1, "rows that came lie elsewhere each time"
    both.check()


@pytest.mark.parametrize("text", SPECS)
def test_sequences_of_any_lengths_step_together(text: str) -> None:
    """Some of which share pages that a step may not write to."""
    merged = []
    for _ in range(2):
        one, two = filled(text, 130), filled(text, 63)
        merged.append(merge([one.extract(0), two.extract(0), one.extract(1)]))
    both = Stepping(*merged)
    for _ in range(70):
        both.token()
    both.check()


def test_padding_that_is_still_to_come_writes_nothing() -> None:
    both = Stepping(filled("raw", 2, start=[0, 6]), filled("raw", 2, start=[0, 6]))
    for _ in range(9):
        both.token()
    both.check()


def test_other_sequences_or_rows_are_not_followed() -> None:
    both = Stepping(filled("affine8", 30), filled("affine8", 30))
    both.token()
    assert both.step is not None
    alone = filled("affine8", 30).extract(0)
    (change,) = alone.expect()
    assert not both.step.page_table.update(change)
    other = filled("affine4,tail=0", 30)
    (change,) = other.expect()
    assert not both.step.rebind(other[0].make_view(change))


def test_what_cannot_be_read_so_says_why() -> None:
    cache = filled("affine8,select=1:0,tail=1", 200)
    (change,) = cache.expect(seals=True)
    with pytest.raises(UnsupportedView, match="selects pages"):
        NativeDecodeStep.from_view(
            cache[0].make_view(change), StaticNativePageTable(change, torch.device("cpu"))
        )


def test_values_beyond_a_format_are_counted_where_a_step_seals_them() -> None:
    both = Stepping(filled("affine8", 60), filled("affine8", 60))
    large = [1e6 * row for row in rows(1)]
    for cache in (both.cache, both.other):
        cache[0].append(*large)
    for _ in range(10):
        both.token()
    both.check()
    assert both.cache.stats()["clamped"] > 0


def test_a_step_is_the_same_where_python_leaves_assertions_out() -> None:
    """Keys are alike, so a query finds the mean of all values."""
    code = (
        "import torch; from kvant import Cache;"
        "from kvant.attention.native import decode_step as steps;"
        "keys, values = torch.ones(1, 1, 71, 32), torch.arange(71.0)[:, None].expand(1, 1, 71, 32);"
        "cache = Cache(1, 'raw'); cache[0].append(keys[:, :, :70], values[:, :, :70]);"
        "(change,) = cache.expect(seals=True); place = steps.StaticNativePageTable(change, "
        "torch.device('cpu'));"
        "step = steps.NativeDecodeStep.from_view(cache[0].make_view(change), place); last = "
        "keys[:, :, 70:];"
        "print(float(step(last, last, values[:, :, 70:].contiguous()).mean()))"
    )
    run = [sys.executable, "-O", "-c", code]
    ran = subprocess.run(run, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(35)
