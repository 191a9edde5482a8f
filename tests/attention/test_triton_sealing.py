"""Test pages stored by the triton backend: the bytes of the reference, from any source of rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.kernels import DEVICE, GPU, NAME, needed
from attention.rows import make_hard_rows
from cache.tagged import assert_same
from kvant import Cache
from kvant.attention import store_rows
from kvant.attention.reference import ReferenceBackend
from kvant.attention.triton import TritonBackend, store_pages
from kvant.attention.triton.arguments import next_power_of_2
from kvant.cache import merge
from kvant.codecs import Affine, Codebook
from kvant.codecs.packing import tree_sum
from kvant.contracts import Codec, PagedTensors
from kvant.page_table import AppendPlan, LayerGroup, PageTable, Paging
from kvant.pages.advance import advance
from thin import thin_rows

pytestmark = [
    needed,
    pytest.mark.usefixtures("gpu_page_layout"),
    # the interpreter warns of NaN and infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
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
    """The time of an interpreter program does not depend on the number of rows."""
    if not GPU:
        monkeypatch.setattr(store_pages, "ROWS_PER_PROGRAM", 32)


def seals_same_bytes(codec: Codec, rows: Tensor) -> bool:
    """Whether pages [B, n, H, P, D] are sealed like the codec seals them.

    Covers open pages and new rows; None if the backend cannot seal them.
    """
    rows = rows.to(DEVICE)
    batch, count, heads, page, dim = rows.shape
    num_new = rows.transpose(1, 2).flatten(2, 3)
    fields = {
        name: torch.zeros(
            (7 + batch * count, heads, page, field.width), dtype=field.dtype, device=DEVICE
        )
        for name, field in codec.fields(dim).items()
    }
    side = PagedTensors(codec, rows.flatten(0, 1).contiguous(), fields, None)
    slots = 5 + torch.randperm(batch * count).numpy()
    index = np.arange(batch * count)
    paged = index % 2 == 0
    seals = np.stack([index // count, slots, index, index % count * page], 1)
    seals[~paged, 2] = -1
    nowhere = PageTable.make_empty(LayerGroup(Paging(page, 0)), [0] * batch)
    change = AppendPlan(nowhere, nowhere, nowhere, count * page, seals=seals)
    if not TritonBackend(NAME, DEVICE.type).store(change, {"keys": num_new}, {"keys": side}):
        return False
    for name, field in codec.seal(rows.cpu()).items():
        ours = side.sealed[name].cpu()[slots].view(torch.uint8)
        assert torch.equal(ours, field.flatten(0, 1).view(torch.uint8)), name
        assert not side.sealed[name][:5].any()
    return True


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(("codec", "dtype"), thin_rows(itertools.product(CODECS, DTYPES)), ids=str)
def test_sealed_bytes_equal_those_of_the_codec(codec: Codec, dtype: torch.dtype) -> None:
    for dim in (32, 80):
        even = isinstance(codec, Affine) or dim == 32
        assert seals_same_bytes(codec, make_hard_rows(dtype, dim)[:, :1]) == even


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(
    "dim",
    [
        pytest.param(dim, marks=[] if dim in (16, 112, 240) else pytest.mark.laws)
        for dim in (16, 48, 64, 96, 112, 128, 240, 256)
    ],
)
def test_sealed_bytes_equal_those_of_the_codec_for_any_group_width(dim: int) -> None:
    for bits in (8, 4):
        assert seals_same_bytes(Affine(bits, 128), make_hard_rows(torch.float32, dim)[:, :2])


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(
    "text", ["raw,window=70,sinks=3", "affine8/raw,tail=0", "affine4/turbo3,window=60,sinks=0"]
)
def test_rows_are_stored_where_the_reference_stores_them(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of all sizes, sequences of two lengths, and pages shared with others."""
    stores = TritonBackend(NAME, DEVICE.type), ReferenceBackend()
    results = []
    for backend in stores:
        monkeypatch.setattr(store_rows, "STORE_BACKENDS", [backend])
        torch.manual_seed(1)
        cache = Cache(2, f"{text},prefill=stored")
        append(cache, 70, start=[0, 9])
        append(cache, 20)
        other = cache.extract(1)
        append(other, 3)
        merged = merge([cache, other])
        for count in (1, 1, 70, 1):
            append(merged, count)
        results += [merged.snapshot(), cache.snapshot(), other.snapshot()]
        assert merged.stats()["sealed"].keys() <= {backend.name}
        merged.state.pools.check()
    for ours, theirs in zip(results[:3], results[3:], strict=True):
        assert_same(ours, theirs)


def append(cache: Cache, count: int, start: list[int] | None = None) -> None:
    batch = cache.batch or 2
    for layer in cache:
        rows = torch.randn(2, batch, count, 2, 32, device=DEVICE).transpose(2, 3)
        layer.append(*rows, start=start)


def test_unsupported_layers_are_left_to_other_backends() -> None:
    """Pages of unknown codecs are sealed elsewhere; rows are written in any case."""
    backend = TritonBackend(NAME, DEVICE.type)
    cache = Cache(1, "fp8,tail=0")
    append(cache, 20)
    storage = cache[0].storage
    rows = {name: torch.randn(2, 2, 64, 32, device=DEVICE) for name in storage.sides}
    part_of_rows = {name: tensor[:, :, :44] for name, tensor in rows.items()}
    for count, sides, written in ((44, part_of_rows, False), (43, part_of_rows, True)):
        change = advance(cache[0].page_table, count, cache.state.pools[0].copy())
        assert backend.store(change, sides, storage.sides) == written
    float32_result = {name: tensor.double() for name, tensor in part_of_rows.items()}
    assert not backend.store(change, float32_result, storage.sides)
    assert not TritonBackend("triton", "cuda" if not GPU else "cpu").store(
        change, part_of_rows, storage.sides
    )


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_sums_follow_the_order_of_the_codecs(group: int) -> None:
    """The numbers differ so much in size that any other order gives another sum."""
    from attention.summing import sums

    for dim in range(16, 257, 16):
        rows = torch.randn(dim, dtype=torch.float64) * 2.0 ** torch.randint(-40, 40, (dim,))
        count = -(-dim // group)
        out = torch.empty(count, dtype=torch.float64, device=DEVICE)
        sums[(1,)](rows.to(DEVICE), out, group, next_power_of_2(count), count, dim)
        assert torch.equal(out.cpu(), torch.cat([tree_sum(part) for part in rows.split(group)]))
