"""Test values that a format cannot store: bf16 keys of 2.5e5 were silently read back as 65,504."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from kvant import Cache, LayerSpec, Sequences
from kvant.attention import dispatch
from kvant.attention.reference import ReferenceBackend
from kvant.attention.store_rows import count_clamped_values
from kvant.codecs import Affine, Raw
from kvant.codecs.frames import Diagonal
from kvant.contracts import LayerStats
from kvant.retention import KeepAll

FORMATS = ("affine8,tail=0", "affine4,tail=0", "fp8", "turbo4,tail=0", "affine8,rotate")
HUGE = 250000.0


def make_rows(count: int, dim: int = 32, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, 2, count, dim).to(dtype)


def count_clamped(cache: Cache) -> int:
    count: int = cache.stats()["clamped"]
    return count


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_beyond_the_limit_are_counted(text: str, dtype: torch.dtype) -> None:
    cache, keys = Cache(1, text), make_rows(64, dtype=dtype)
    keys[0, 1, 7] = torch.where(keys[0, 1, 7] > 0, 1.0, -1.0) * HUGE  # every channel of a row
    framed = cache.spec.layers[0].keys.frame.transform_rows(keys)  # type: ignore[union-attr]
    cache[0].append(keys, make_rows(64, dtype=dtype))
    assert count_clamped(cache) == int((framed.float().abs() > 65504).sum()) > 0


@pytest.mark.parametrize("backends", [None, [ReferenceBackend()]], ids=["preferred", "reference"])
def test_every_sealing_backend_counts_the_same(
    monkeypatch: pytest.MonkeyPatch, backends: list[ReferenceBackend] | None
) -> None:
    if backends is not None:
        monkeypatch.setattr(dispatch, "BACKENDS", backends)
    whole, single = Cache(1, "affine4,tail=0"), Cache(1, "affine4,tail=0")
    keys, values = make_rows(200), make_rows(200)
    keys[0, :, ::3, 5], values[0, 1, 100] = HUGE, -HUGE
    whole[0].append(keys, values)
    for t in range(200):
        single[0].append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    assert count_clamped(whole) == count_clamped(single) == 2 * 64 + 32  # of 192 sealed rows


def test_largest_storable_values_are_not_counted() -> None:
    cache, keys = Cache(1, "affine8"), make_rows(64)
    keys[..., 0], keys[..., 1] = 65280.0, -65280.0  # the last bfloat16 below the limit
    cache[0].append(keys, keys)
    half = torch.full((1, 2, 64, 32), -65504.0)
    for dtype in (torch.float16, torch.float32):
        cache.reset()
        cache[0].append(half.to(dtype), half.to(dtype))
    assert count_clamped(cache) == 0
    cache.reset()
    keys[0, 0, 0, 0] = 65536.0  # the first above it
    cache[0].append(keys, make_rows(64))
    assert count_clamped(cache) == 1


def test_nan_is_neither_clamped_nor_hides_other_values() -> None:
    cache, keys = Cache(1, "affine8"), make_rows(64)
    keys[0, 0, 3, 0], keys[0, 0, 4, 0], keys[0, 0, 5, 0] = torch.nan, torch.inf, -torch.inf
    cache[0].append(keys, make_rows(64))
    assert count_clamped(cache) == 0
    assert cache[0].read()[0][0, 0, 3:6].isnan().all()
    cache.reset()
    keys[0, 1, 9, 0] = HUGE
    cache[0].append(keys, make_rows(64))
    assert count_clamped(cache) == 1


@pytest.mark.parametrize("text", ["raw", "affine4", "affine8,start=100", "raw/affine8"])
def test_dense_rows_hold_any_value_and_are_not_counted(text: str) -> None:
    """Raw rows, rows of a tail, rows before `start`."""
    cache, keys = Cache(1, text), make_rows(90)
    keys[0, 0, 3] = HUGE
    cache[0].append(keys, make_rows(90))
    assert count_clamped(cache) == 0
    assert torch.equal(cache[0].read()[0], keys)


@pytest.mark.parametrize("padding", [0, 5])
def test_sinks_are_read_dense_and_not_counted(padding: int) -> None:
    cache, keys = Cache(1, "affine8,sinks=4"), make_rows(64 + padding)
    keys[0, 0, padding : padding + 4] = HUGE
    keys[0, 0, :padding] = -HUGE  # in padding, which is not stored
    cache[0].append(keys, make_rows(64 + padding), start=[padding])
    assert count_clamped(cache) == 0
    assert torch.equal(cache[0].read()[0][0, 0, padding : padding + 4], keys[0, 0, padding:][:4])
    cache.reset()
    keys[0, 0, padding + 4, 0] = HUGE
    cache[0].append(keys, make_rows(64 + padding), start=[padding])
    assert count_clamped(cache) == 1


def test_rotation_may_bring_a_value_into_range() -> None:
    """A rotation spreads it over its row, a channel scale divides it: the remedies that the
    warning names.
    """
    keys = make_rows(64)
    keys[0, 0, 7, 3] = HUGE
    channels = Diagonal(((*[1.0] * 3, 0.01, *[1.0] * 28),))
    smooth = LayerSpec(Affine(8, frame=channels), Raw(), KeepAll())
    for spec in ("affine8,rotate", smooth):
        cache = Cache(1, spec)
        cache[0].append(keys, make_rows(64))
        decoded = cache[0].read()[0]
        assert count_clamped(cache) == 0
        assert abs(float(decoded[0, 0, 7, 3]) / float(keys[0, 0, 7, 3]) - 1) < 0.02


def test_recode_counts_changed_sides_once() -> None:
    cache, keys = Cache(1, "raw"), make_rows(130)
    keys[0, 0, 7, :9] = HUGE
    cache[0].append(keys, make_rows(130))
    cache.recode("affine8/raw")
    assert count_clamped(cache) == 9
    cache.recode("affine8/affine4,tail=0")
    assert count_clamped(cache) == 9


@pytest.mark.parametrize("sinks", [4, 70])
def test_recode_does_not_count_sinks(sinks: int) -> None:
    keys = make_rows(200)
    keys[0, 0, :sinks] = HUGE
    keys[0, 0, sinks, :9] = HUGE  # in a row that is no sink
    new = Cache(1, f"affine8,sinks={sinks},tail=0")
    new[0].append(keys, make_rows(200), prefill="stored")
    old = Cache(1, f"raw,sinks={sinks}")
    old[0].append(keys, make_rows(200))
    old.recode(new.spec)
    assert count_clamped(old) == count_clamped(new) == 9


def test_clamping_warns_once_per_cache(caplog: pytest.LogCaptureFixture) -> None:
    cache, keys = Cache(3, "affine8"), make_rows(64)
    keys[0, 0, 7, 2], keys[0, 1, 9, 0] = -HUGE, 70000.0
    with caplog.at_level(logging.WARNING, logger="kvant"):
        for _ in range(2):
            for layer in range(3):
                cache[layer].append(keys, keys)
    assert count_clamped(cache) == 2 * 3 * 2 * 2
    (warning,) = caplog.messages
    for word in ("keys of 249856", "65504", "stats()['clamped']", "raw", "smooth", "rotate"):
        assert word in warning


def test_stats_include_removed_sequences() -> None:
    sequences, keys = Sequences(1, "affine8"), make_rows(64)
    keys[0, 0, 7, 2] = HUGE
    for name in ("a", "b"):
        sequences.append(name, 0, keys, make_rows(64))
    sequences.remove("a")
    assert sequences.stats()["clamped"] == 2


def test_counting_never_synchronizes_the_device() -> None:
    """A GPU counts by itself; a fake tensor fails any call that reads a value."""
    stats = LayerStats()
    for _ in range(2):
        count_clamped_values(Affine(8), torch.empty(1, 2, 64, 32, device="meta"), "keys", stats)
    assert isinstance(stats.clamped_values, Tensor) and stats.clamped_values.device.type == "meta"


def test_device_counters_are_added_up() -> None:
    total = LayerStats(clamped_values=3)
    total.add(LayerStats(clamped_values=torch.tensor(4)))
    assert total.clamped_values == 7 and isinstance(total.clamped_values, int)
