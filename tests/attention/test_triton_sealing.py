"""What the triton backend stores: the bytes of the reference, wherever rows come from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.kernels import DEVICE, GPU, NAME, needed
from attention.rows import odd_rows
from cache.tagged import same
from kvant import Cache
from kvant.attention import store_rows
from kvant.attention.reference import ReferenceBackend
from kvant.attention.triton import TritonBackend, store_pages
from kvant.attention.triton.arguments import next_power_of_2
from kvant.cache import merge
from kvant.cache.advance import advance
from kvant.codecs import Affine, Codebook
from kvant.codecs.packing import tree_sum
from kvant.contracts import Codec, PagedTensors
from kvant.page_table import AppendPlan, LayerGroup, PageTable, Paging
from thin import once

pytestmark = [
    needed,
    pytest.mark.usefixtures("pages_as_on_a_gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and infinity
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODECS: list[Codec] = [
    *(
        Affine(bits, group, corrected=corrected)
        for bits in (8, 4)
        for group in (16, 32, 64, 128)
        for corrected in (True, False)
    ),
    *(Codebook(bits, corrected) for bits in (4, 3, 2) for corrected in (True, False)),
]


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the interpreter takes as long for any number of rows."""
    if not GPU:
        monkeypatch.setattr(store_pages, "ROWS_PER_PROGRAM", 32)


def same_bytes(codec: Codec, rows: Tensor) -> bool:
    """Are pages [B, n, H, P, D] sealed as the codec seals them, from open pages and from rows that
    came just now? Or not at all."""
    rows = rows.to(DEVICE)
    batch, count, heads, page, dim = rows.shape
    came = rows.transpose(1, 2).flatten(2, 3)
    fields = {
        name: torch.zeros(
            (7 + batch * count, heads, page, field.width), dtype=field.dtype, device=DEVICE
        )
        for name, field in codec.fields(dim).items()
    }
    side = PagedTensors(codec, rows.flatten(0, 1).contiguous(), fields, None)
    slots = 5 + torch.randperm(batch * count).numpy()
    which = np.arange(batch * count)
    paged = which % 2 == 0
    seals = np.stack([which // count, slots, which, which % count * page], 1)
    seals[~paged, 2] = -1
    nowhere = PageTable.make_empty(LayerGroup(Paging(page, 0)), [0] * batch)
    change = AppendPlan(nowhere, nowhere, nowhere, count * page, seals=seals)
    if not TritonBackend(NAME, DEVICE.type).store(change, {"keys": came}, {"keys": side}):
        return False
    for name, field in codec.seal(rows.cpu()).items():
        ours = side.sealed[name].cpu()[slots].view(torch.uint8)
        assert torch.equal(ours, field.flatten(0, 1).view(torch.uint8)), name
        assert not side.sealed[name][:5].any()
    return True


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(("codec", "dtype"), once(itertools.product(CODECS, DTYPES)), ids=str)
def test_sealed_bytes_are_those_of_the_codec(codec: Codec, dtype: torch.dtype) -> None:
    for dim in (32, 80):
        even = isinstance(codec, Affine) or dim == 32
        assert same_bytes(codec, odd_rows(dtype, dim)[:, :1]) == even


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(
    "dim",
    [
        pytest.param(dim, marks=[] if dim in (16, 112, 240) else pytest.mark.laws)
        for dim in (16, 48, 64, 96, 112, 128, 240, 256)
    ],
)
def test_so_are_those_of_groups_of_any_width(dim: int) -> None:
    for bits in (8, 4):
        assert same_bytes(Affine(bits, 128), odd_rows(torch.float32, dim)[:, :2])


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(
    "text", ["raw,window=70,sinks=3", "affine8/raw,tail=0", "affine4/turbo3,window=60,sinks=0"]
)
def test_rows_go_where_the_reference_puts_them(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks of all sizes, of sequences of two lengths, and of pages that others hold."""
    stores = TritonBackend(NAME, DEVICE.type), ReferenceBackend()
    found = []
    for backend in stores:
        monkeypatch.setattr(store_rows, "STORE_BACKENDS", [backend])
        torch.manual_seed(1)
        cache = Cache(2, f"{text},prefill=stored")
        append(cache, 70, start=[0, 9])
        append(cache, 20)
        other = cache.extract(1)
        append(other, 3)
        both = merge([cache, other])
        for count in (1, 1, 70, 1):
            append(both, count)
        found += [both.snapshot(), cache.snapshot(), other.snapshot()]
        assert both.stats()["sealed"].keys() <= {backend.name}
        both.check()
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        same(ours, theirs)


def append(cache: Cache, count: int, start: list[int] | None = None) -> None:
    batch = cache.batch or 2
    for layer in cache:
        rows = torch.randn(2, batch, count, 2, 32, device=DEVICE).transpose(2, 3)
        layer.append(*rows, start=start)


def test_what_it_does_not_store_is_left_to_others() -> None:
    """Codecs that it does not know, where pages fall due; rows are written whatever seals them."""
    backend = TritonBackend(NAME, DEVICE.type)
    cache = Cache(1, "fp8,tail=0")
    append(cache, 20)
    storage = cache[0].storage
    rows = {name: torch.randn(2, 2, 64, 32, device=DEVICE) for name in storage.sides}
    few = {name: tensor[:, :, :44] for name, tensor in rows.items()}
    for count, given, written in ((44, few, False), (43, few, True)):
        change = advance(cache[0].page_table, count, cache._tracker.pools[0].copy())
        assert backend.store(change, given, storage.sides) == written
    wide = {name: tensor.double() for name, tensor in few.items()}
    assert not backend.store(change, wide, storage.sides)
    assert not TritonBackend("triton", "cuda" if not GPU else "cpu").store(
        change, few, storage.sides
    )


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_sums_are_in_the_order_of_the_codecs(group: int) -> None:
    """Of numbers so far apart that any other order has another sum."""
    from attention.summing import sums

    for dim in range(16, 257, 16):
        rows = torch.randn(dim, dtype=torch.float64) * 2.0 ** torch.randint(-40, 40, (dim,))
        count = -(-dim // group)
        out = torch.empty(count, dtype=torch.float64, device=DEVICE)
        sums[(1,)](rows.to(DEVICE), out, group, next_power_of_2(count), count, dim)
        assert torch.equal(out.cpu(), torch.cat([tree_sum(part) for part in rows.split(group)]))
