"""Test that tiles rearrange bytes and change nothing else."""

from __future__ import annotations

import pytest
import torch

from cache.tiled import Tiled, make_tiled_cache
from kvant import Cache, attend, load, save


@pytest.mark.parametrize("shape", [(64, 32), (2, 3, 64, 8), (16, 4), (1, 2, 128, 20)])
@pytest.mark.parametrize("tiles", [Tiled(), Tiled(8, 2), Tiled(64, 4), Tiled(1, 1)], ids=str)
def test_unpack_is_the_inverse_of_pack(shape: tuple[int, ...], tiles: Tiled) -> None:
    field = torch.randint(0, 256, shape, dtype=torch.uint8)
    packed = tiles.pack("keys.codes", field)
    assert packed.shape == field.shape
    assert torch.equal(tiles.unpack("keys.codes", packed), field)
    assert torch.equal(packed.flatten().sort().values, field.flatten().sort().values)


def test_tile_interleaves_a_few_values_of_each_row() -> None:
    field = torch.arange(4).view(4, 1) * 10 + torch.arange(4)  # row r, value v: 10 r + v
    packed = Tiled(rows=2, width=2).pack("keys.codes", field).flatten().tolist()
    first = [0, 1, 10, 11, 2, 3, 12, 13]  # rows 0 and 1: values 0 and 1, then 2 and 3
    assert packed == first + [20 + n for n in first]


@pytest.mark.parametrize("shape", [(15, 4), (16, 3), (1, 5)])
def test_field_not_divisible_into_tiles_stays_plain(shape: tuple[int, int]) -> None:
    field = torch.arange(shape[0] * shape[1]).view(shape)
    assert Tiled().pack("keys.codes", field) is field
    assert Tiled().unpack("keys.codes", field) is field


def test_every_page_is_tiled_the_same_way() -> None:
    field = torch.randint(0, 256, (3, 2, 64, 8), dtype=torch.uint8)
    one_by_one = torch.stack([Tiled().pack("keys.codes", page) for page in field])
    assert torch.equal(Tiled().pack("keys.codes", field), one_by_one)


@pytest.mark.parametrize("text", ["affine8", "affine4", "turbo3", "affine8,window=70,sinks=4"])
def test_snapshots_and_files_hold_canonical_rows(text: str, tmp_path) -> None:
    plain, tiled = Cache(1, text), make_tiled_cache(1, text, Tiled())
    keys, values = torch.randn(2, 2, 2, 300, 32)
    for cache in (plain, tiled):
        cache[0].append(keys[:, :, :200], values[:, :, :200])
        cache[0].append(keys[:, :, 200:], values[:, :, 200:])
    a, b = plain.snapshot(), tiled.snapshot()
    assert a.tensors.keys() == b.tensors.keys()
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    save(tiled, tmp_path / "tiled")
    loaded = load(tmp_path / "tiled")
    q = torch.randn(2, 4, 1, 32)
    outs = [attend(q, cache[0].view(), backend="reference") for cache in (plain, tiled, loaded)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_pool_memory_is_tiled() -> None:
    """Otherwise the test above could not fail."""
    plain, tiled = (make_tiled_cache(1, "affine8", tiles) for tiles in (Tiled(1, 1), Tiled()))
    rows = torch.randn(1, 1, 64, 32)
    views = [cache[0].append(rows, rows, prefill="stored") for cache in (plain, tiled)]
    codes = [view.keys.sealed["codes"][:1] for view in views]
    assert not torch.equal(codes[0], codes[1])
    assert torch.equal(Tiled().unpack("keys.codes", codes[1]), codes[0])


def test_a_snapshot_of_plain_pages_restores_into_tiles() -> None:
    plain, tiled = Cache(1, "affine4"), make_tiled_cache(1, "affine4", Tiled())
    rows = torch.randn(1, 2, 300, 32)
    plain[0].append(rows, rows)
    tiled.restore(plain.snapshot())
    assert all(map(torch.equal, plain[0].read(), tiled[0].read()))
    assert tiled.nbytes_used == plain.nbytes_used
