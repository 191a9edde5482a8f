"""Test products with packed weights: the kernel gives the bits of oneDNN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from isas import ISAS, load_or_skip
from kvant.native import NativeLibrary, get_library, multiply_packed
from kvant.weights import packed_matrix
from kvant.weights.packed_matrix import (
    MAX_KERNEL_ROWS,
    PackedMatrix,
    SummationOrder,
    explain_refusal,
)

BLOCK = 64


@pytest.fixture(params=ISAS)
def isa(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NativeLibrary:
    library = load_or_skip(request.param, tmp_path)
    monkeypatch.setattr("kvant.native.get_library", lambda: library)
    return library


def pack_blocks(weight: Tensor) -> Tensor:
    """Pack a weight like the kernel: [outs / 64][width / 2][64][2], zeros after the last."""
    outs, width = weight.shape
    whole = torch.zeros(-(-outs // BLOCK) * BLOCK, width, dtype=weight.dtype)
    whole[:outs] = weight
    return whole.view(-1, BLOCK, width // 2, 2).transpose(1, 2).contiguous()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, part: int) -> Tensor:
    lying = pack_blocks(weight)
    place = lying.data_ptr(), lying.nbytes
    return multiply_packed(x, place, bias, out_features=len(weight), k_block=part)


@pytest.mark.parametrize("outs", [1, 63, 64, 200])
@pytest.mark.parametrize("width", [16, 48, 80])
def test_packed_product_matches(isa: NativeLibrary, outs: int, width: int) -> None:
    """Whole numbers so small that nothing is rounded."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).bfloat16()

    weight, bias = draw(outs, width), draw(outs)
    for rows in range(1, 15):
        x = draw(rows, width)
        for part in (2, 34, width):
            assert torch.equal(multiply(x, weight, None, part), x @ weight.T)
            assert torch.equal(multiply(x, weight, bias, part), x @ weight.T + bias)


@pytest.mark.parametrize(("part", "left"), [(2, 14), (4, 12), (8, 8), (16, 0)])
def test_partial_sums_are_added(isa: NativeLibrary, part: int, left: int) -> None:
    """2^24 + 1 is rounded to 2^24, so ones added one by one would be lost."""
    weight = torch.ones(BLOCK, 16).bfloat16()
    weight[:, 0], weight[:, 1] = 2.0**24, 0
    bias = torch.full((BLOCK,), -(2.0**24)).bfloat16()
    ones = torch.ones(1, 16).bfloat16()
    product = multiply(ones, weight, bias, part)
    assert product.tolist() == [[left] * BLOCK]


def draw_weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_matrix(outs: int = 192, width: int = 640) -> PackedMatrix:
    if (reason := explain_refusal(torch.bfloat16)) is not None:
        pytest.skip(reason)
    return PackedMatrix(draw_weights(outs, width, seed=1), SummationOrder())


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    calls, original = [], getattr(packed_matrix, name)

    def call(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return original(*args, **named)

    monkeypatch.setattr(packed_matrix, name, call)
    return calls


@pytest.mark.parametrize(
    ("outs", "width"), [(64, 64), (100, 128), (192, 640), (1024, 1024), (256, 3072), (3000, 208)]
)
@torch.no_grad()
def test_packed_product_has_the_bits_of_onednn(two_threads: None, outs: int, width: int) -> None:
    packed, bias = make_matrix(outs, width), draw_weights(outs, seed=2)
    for rows in (*range(1, 9), 16, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1):
        x = draw_weights(1, rows, width, seed=rows)
        for added in (None, bias):
            assert torch.equal(packed.multiply(x, added), packed.multiply_by_onednn(x, added))


@pytest.mark.skipif(get_library().isa not in ("amx", "avx512"), reason="needs AVX-512 with BF16")
@torch.no_grad()
def test_few_rows_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make_matrix()
    if not packed.summation_order.find_k_block(1, packed):
        pytest.skip("oneDNN adds in another order here")
    calls = count_calls(monkeypatch, "multiply_packed")
    packed.multiply(draw_weights(1, 640), None)
    assert len(calls) == 1
    packed.multiply(draw_weights(MAX_KERNEL_ROWS + 1, 640), None)
    assert len(calls) == 1


@torch.no_grad()
def test_summation_order_is_probed_once_per_weight_shape(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = make_matrix()
    second = PackedMatrix(draw_weights(192, 640, seed=3), packed.summation_order)
    if packed.pointer is None:
        pytest.skip("the kernel does not read these bytes")
    tried = count_calls(monkeypatch, "_run_trial")
    for x in (draw_weights(1, 640), draw_weights(1, 1, 640, seed=4)):
        for each in (packed, second):
            each.multiply(x, None)
    assert [rows for rows, _ in tried] == [1]
    packed.multiply(draw_weights(2, 640), None)
    torch.set_num_threads(1)
    packed.multiply(draw_weights(2, 640), None)
    assert [rows for rows, _ in tried] == [1, 2, 2]


@torch.no_grad()
def test_onednn_computes_where_bits_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the last bit of one output in some thousand."""
    packed, original = make_matrix(1024, 64), packed_matrix.multiply_packed

    def other(x: Tensor, place: tuple[int, int], bias: Tensor | None, **options: int) -> Tensor:
        out = original(x, place, bias, **options)
        if bias is None:
            out.view(-1)[700] = out.view(-1)[700].nextafter(torch.tensor(torch.inf).bfloat16())
        return out

    monkeypatch.setattr(packed_matrix, "multiply_packed", other)
    x = draw_weights(1, 64)
    assert torch.equal(packed.multiply(x, None), packed.multiply_by_onednn(x, None))


@torch.no_grad()
def test_zero_weight_decides_nothing_for_others(two_threads: None) -> None:
    packed = make_matrix()
    zeros = PackedMatrix(torch.zeros(192, 640).bfloat16(), packed.summation_order)
    assert not zeros.multiply(draw_weights(1, 640), None).any()
    for seed in range(64):
        x = draw_weights(1, 640, seed=seed)
        assert torch.equal(packed.multiply(x, None), packed.multiply_by_onednn(x, None))


@torch.no_grad()
@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_uninformative_weight_leaves_others_the_kernel(
    two_threads: None, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = make_matrix()
    if not make_matrix().summation_order.find_k_block(1, packed):
        pytest.skip("oneDNN adds in another order here")
    same = PackedMatrix(torch.full((192, 640), value).bfloat16(), packed.summation_order)
    tried = count_calls(monkeypatch, "_run_trial")
    for _ in range(3):
        assert same.summation_order.find_k_block(1, same) == 0
    assert len(tried) == 1
    assert packed.summation_order.find_k_block(1, packed) > 0
    assert same.summation_order.find_k_block(1, same) > 0


@torch.no_grad()
def test_fake_tensors_stay_fake() -> None:
    packed, x = make_matrix(), draw_weights(1, 640)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(packed.multiply(x, None)) is FakeTensor


@torch.no_grad()
def test_trace_sees_an_operator() -> None:
    packed, x = make_matrix(), draw_weights(1, 640)
    traced = make_fx(lambda x: packed.multiply(x, None))(x)
    other = draw_weights(1, 640, seed=5)
    assert torch.equal(traced(other), packed.multiply_by_onednn(other, None))
    assert "linear" in traced.code
