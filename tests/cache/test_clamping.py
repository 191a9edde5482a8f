"""Values that a format cannot store: bf16 keys of 2.5e5 once read back as 65,504 without a word."""

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


def rows(count: int, dim: int = 32, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, 2, count, dim).to(dtype)


def clamped(cache: Cache) -> int:
    count: int = cache.stats()["clamped"]
    return count


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_beyond_the_limit_are_counted(text: str, dtype: torch.dtype) -> None:
    cache, keys = Cache(1, text), rows(64, dtype=dtype)
    keys[0, 1, 7] = torch.where(keys[0, 1, 7] > 0, 1.0, -1.0) * HUGE  # every channel of a row
    framed = cache.spec.layers[0].keys.frame.transform_rows(keys)  # type: ignore[union-attr]
    cache[0].append(keys, rows(64, dtype=dtype))
    assert clamped(cache) == int((framed.float().abs() > 65504).sum()) > 0


@pytest.mark.parametrize("backends", [None, [ReferenceBackend()]], ids=["preferred", "reference"])
def test_whoever_seals_the_count_is_the_same(
    monkeypatch: pytest.MonkeyPatch, backends: list[ReferenceBackend] | None
) -> None:
    if backends is not None:
        monkeypatch.setattr(dispatch, "BACKENDS", backends)
    whole, single = Cache(1, "affine4,tail=0"), Cache(1, "affine4,tail=0")
    keys, values = rows(200), rows(200)
    keys[0, :, ::3, 5], values[0, 1, 100] = HUGE, -HUGE
    whole[0].append(keys, values)
    for t in range(200):
        single[0].append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    assert clamped(whole) == clamped(single) == 2 * 64 + 32  # of 192 rows that were sealed


def test_the_largest_values_that_are_stored_are_not_counted() -> None:
    cache, keys = Cache(1, "affine8"), rows(64)
    keys[..., 0], keys[..., 1] = 65280.0, -65280.0  # the last bfloat16 below the limit
    cache[0].append(keys, keys)
    half = torch.full((1, 2, 64, 32), -65504.0)
    for dtype in (torch.float16, torch.float32):
        cache.reset()
        cache[0].append(half.to(dtype), half.to(dtype))
    assert clamped(cache) == 0
    cache.reset()
    keys[0, 0, 0, 0] = 65536.0  # the first above it
    cache[0].append(keys, rows(64))
    assert clamped(cache) == 1


def test_what_is_no_number_is_not_clamped_and_hides_nothing() -> None:
    cache, keys = Cache(1, "affine8"), rows(64)
    keys[0, 0, 3, 0], keys[0, 0, 4, 0], keys[0, 0, 5, 0] = torch.nan, torch.inf, -torch.inf
    cache[0].append(keys, rows(64))
    assert clamped(cache) == 0
    assert cache[0].read()[0][0, 0, 3:6].isnan().all()
    cache.reset()
    keys[0, 1, 9, 0] = HUGE
    cache[0].append(keys, rows(64))
    assert clamped(cache) == 1


@pytest.mark.parametrize("text", ["raw", "affine4", "affine8,start=100", "raw/affine8"])
def test_dense_rows_hold_any_value_and_are_not_counted(text: str) -> None:
    """Raw rows, those of a tail, those before `start`."""
    cache, keys = Cache(1, text), rows(90)
    keys[0, 0, 3] = HUGE
    cache[0].append(keys, rows(90))
    assert clamped(cache) == 0
    assert torch.equal(cache[0].read()[0], keys)


@pytest.mark.parametrize("padding", [0, 5])
def test_sinks_are_read_dense_and_not_counted(padding: int) -> None:
    cache, keys = Cache(1, "affine8,sinks=4"), rows(64 + padding)
    keys[0, 0, padding : padding + 4] = HUGE
    keys[0, 0, :padding] = -HUGE  # of padding, which is not stored
    cache[0].append(keys, rows(64 + padding), start=[padding])
    assert clamped(cache) == 0
    assert torch.equal(cache[0].read()[0][0, 0, padding : padding + 4], keys[0, 0, padding:][:4])
    cache.reset()
    keys[0, 0, padding + 4, 0] = HUGE
    cache[0].append(keys, rows(64 + padding), start=[padding])
    assert clamped(cache) == 1


def test_a_frame_may_bring_a_value_within_reach() -> None:
    """A rotation spreads it over its row, a channel scale divides it: what the warning names."""
    keys = rows(64)
    keys[0, 0, 7, 3] = HUGE
    channels = Diagonal(((*[1.0] * 3, 0.01, *[1.0] * 28),))
    smooth = LayerSpec(Affine(8, frame=channels), Raw(), KeepAll())
    for spec in ("affine8,rotate", smooth):
        cache = Cache(1, spec)
        cache[0].append(keys, rows(64))
        back = cache[0].read()[0]
        assert clamped(cache) == 0
        assert abs(float(back[0, 0, 7, 3]) / float(keys[0, 0, 7, 3]) - 1) < 0.02


def test_a_recode_counts_too_and_a_side_that_stays_is_not_counted_twice() -> None:
    cache, keys = Cache(1, "raw"), rows(130)
    keys[0, 0, 7, :9] = HUGE
    cache[0].append(keys, rows(130))
    cache.recode("affine8/raw")
    assert clamped(cache) == 9
    cache.recode("affine8/affine4,tail=0")
    assert clamped(cache) == 9


@pytest.mark.parametrize("sinks", [4, 70])
def test_a_recode_does_not_count_sinks_either(sinks: int) -> None:
    keys = rows(200)
    keys[0, 0, :sinks] = HUGE
    keys[0, 0, sinks, :9] = HUGE  # of a row that is no sink
    new = Cache(1, f"affine8,sinks={sinks},tail=0")
    new[0].append(keys, rows(200), prefill="stored")
    old = Cache(1, f"raw,sinks={sinks}")
    old[0].append(keys, rows(200))
    old.recode(new.spec)
    assert clamped(old) == clamped(new) == 9


def test_it_is_said_once_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    cache, keys = Cache(3, "affine8"), rows(64)
    keys[0, 0, 7, 2], keys[0, 1, 9, 0] = -HUGE, 70000.0
    with caplog.at_level(logging.WARNING, logger="kvant"):
        for _ in range(2):
            for layer in range(3):
                cache[layer].append(keys, keys)
    assert clamped(cache) == 2 * 3 * 2 * 2
    (said,) = caplog.messages
    for word in ("keys of 249856", "65504", "stats()['clamped']", "raw", "smooth", "rotate"):
        assert word in said


def test_many_sequences_tell_of_those_that_are_gone_too() -> None:
    sequences, keys = Sequences(1, "affine8"), rows(64)
    keys[0, 0, 7, 2] = HUGE
    for name in ("a", "b"):
        sequences.append(name, 0, keys, rows(64))
    sequences.remove("a")
    assert sequences.stats()["clamped"] == 2


def test_nobody_waits_for_a_device() -> None:
    """A GPU counts by itself; a tensor without values fails whoever asks for one."""
    tally = LayerStats()
    for _ in range(2):
        count_clamped_values(Affine(8), torch.empty(1, 2, 64, 32, device="meta"), "keys", tally)
    assert isinstance(tally.clamped_values, Tensor) and tally.clamped_values.device.type == "meta"


def test_what_a_device_counted_is_added_up() -> None:
    total = LayerStats(clamped_values=3)
    total.add(LayerStats(clamped_values=torch.tensor(4)))
    assert total.clamped_values == 7 and isinstance(total.clamped_values, int)
