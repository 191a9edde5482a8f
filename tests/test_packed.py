"""Products with packed weights: our kernel gives what oneDNN gives, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from isas import ISAS, loaded_for
from kvant import packed_matrix
from kvant.native import NativeLibrary, get_library, multiply_packed
from kvant.packed_matrix import MAX_KERNEL_ROWS, PackedMatrix, SummationOrder, explain_refusal

BLOCK = 64


@pytest.fixture(params=ISAS)
def isa(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NativeLibrary:
    found = loaded_for(request.param, tmp_path)
    monkeypatch.setattr("kvant.native.get_library", lambda: found)
    return found


def blocks(weight: Tensor) -> Tensor:
    """A weight as the kernel reads it: [outs / 64][width / 2][64][2], zeros behind the last."""
    outs, width = weight.shape
    whole = torch.zeros(-(-outs // BLOCK) * BLOCK, width, dtype=weight.dtype)
    whole[:outs] = weight
    return whole.view(-1, BLOCK, width // 2, 2).transpose(1, 2).contiguous()


def product(x: Tensor, weight: Tensor, bias: Tensor | None, part: int) -> Tensor:
    lying = blocks(weight)
    place = lying.data_ptr(), lying.nbytes
    return multiply_packed(x, place, bias, out_features=len(weight), k_block=part)


@pytest.mark.parametrize("outs", [1, 63, 64, 200])
@pytest.mark.parametrize("width", [16, 48, 80])
def test_it_is_the_product(isa: NativeLibrary, outs: int, width: int) -> None:
    """Of whole numbers so small that nothing is rounded."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).bfloat16()

    weight, bias = drawn(outs, width), drawn(outs)
    for rows in range(1, 15):
        x = drawn(rows, width)
        for part in (2, 34, width):
            assert torch.equal(product(x, weight, None, part), x @ weight.T)
            assert torch.equal(product(x, weight, bias, part), x @ weight.T + bias)


@pytest.mark.parametrize(("part", "left"), [(2, 14), (4, 12), (8, 8), (16, 0)])
def test_the_sums_of_parts_are_added(isa: NativeLibrary, part: int, left: int) -> None:
    """2^24 + 1 is rounded to 2^24, so of ones that are added to it one by one none is left."""
    weight = torch.ones(BLOCK, 16).bfloat16()
    weight[:, 0], weight[:, 1] = 2.0**24, 0
    bias = torch.full((BLOCK,), -(2.0**24)).bfloat16()
    ones = torch.ones(1, 16).bfloat16()
    found = product(ones, weight, bias, part)
    assert found.tolist() == [[left] * BLOCK]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def matrix(outs: int = 192, width: int = 640) -> PackedMatrix:
    if (reason := explain_refusal(torch.bfloat16)) is not None:
        pytest.skip(reason)
    return PackedMatrix(drawn(outs, width, seed=1), SummationOrder())


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    calls, own = [], getattr(packed_matrix, name)

    def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return own(*given, **named)

    monkeypatch.setattr(packed_matrix, name, call)
    return calls


@pytest.mark.parametrize(
    ("outs", "width"), [(64, 64), (100, 128), (192, 640), (1024, 1024), (256, 3072), (3000, 208)]
)
@torch.no_grad()
def test_it_is_that_of_onednn(threads: None, outs: int, width: int) -> None:
    one, bias = matrix(outs, width), drawn(outs, seed=2)
    for rows in (*range(1, 9), 16, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1):
        x = drawn(1, rows, width, seed=rows)
        for added in (None, bias):
            assert torch.equal(one.multiply(x, added), one.multiply_by_onednn(x, added))


@pytest.mark.skipif(get_library().isa not in ("amx", "avx512"), reason="needs AVX-512 with BF16")
@torch.no_grad()
def test_few_rows_are_multiplied_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    one = matrix()
    if not one.summation_order.find_k_block(1, one):
        pytest.skip("oneDNN adds in another order here")
    calls = counted(monkeypatch, "multiply_packed")
    one.multiply(drawn(1, 640), None)
    assert len(calls) == 1
    one.multiply(drawn(MAX_KERNEL_ROWS + 1, 640), None)
    assert len(calls) == 1


@torch.no_grad()
def test_an_order_is_tried_once_for_weights_of_a_shape(
    threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = matrix()
    twin = PackedMatrix(drawn(192, 640, seed=3), one.summation_order)
    if one.pointer is None:
        pytest.skip("the kernel does not read these bytes")
    tried = counted(monkeypatch, "_run_trial")
    for x in (drawn(1, 640), drawn(1, 1, 640, seed=4)):
        for each in (one, twin):
            each.multiply(x, None)
    assert [rows for rows, _ in tried] == [1]
    one.multiply(drawn(2, 640), None)
    torch.set_num_threads(1)
    one.multiply(drawn(2, 640), None)
    assert [rows for rows, _ in tried] == [1, 2, 2]


@torch.no_grad()
def test_where_bits_would_be_others_onednn_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the last bit of one output in some thousand."""
    one, own = matrix(1024, 64), packed_matrix.multiply_packed

    def other(x: Tensor, place: tuple[int, int], bias: Tensor | None, **how: int) -> Tensor:
        out = own(x, place, bias, **how)
        if bias is None:
            out.view(-1)[700] = out.view(-1)[700].nextafter(torch.tensor(torch.inf).bfloat16())
        return out

    monkeypatch.setattr(packed_matrix, "multiply_packed", other)
    x = drawn(1, 64)
    assert torch.equal(one.multiply(x, None), one.multiply_by_onednn(x, None))


@torch.no_grad()
def test_a_weight_of_zeros_decides_nothing_for_others(threads: None) -> None:
    one = matrix()
    zeros = PackedMatrix(torch.zeros(192, 640).bfloat16(), one.summation_order)
    assert not zeros.multiply(drawn(1, 640), None).any()
    for seed in range(64):
        x = drawn(1, 640, seed=seed)
        assert torch.equal(one.multiply(x, None), one.multiply_by_onednn(x, None))


@torch.no_grad()
@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_weight_that_tells_nothing_leaves_others_the_kernel(
    threads: None, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = matrix()
    if not matrix().summation_order.find_k_block(1, one):
        pytest.skip("oneDNN adds in another order here")
    same = PackedMatrix(torch.full((192, 640), value).bfloat16(), one.summation_order)
    tried = counted(monkeypatch, "_run_trial")
    for _ in range(3):
        assert same.summation_order.find_k_block(1, same) == 0
    assert len(tried) == 1
    assert one.summation_order.find_k_block(1, one) > 0
    assert same.summation_order.find_k_block(1, same) > 0


@torch.no_grad()
def test_fake_tensors_stay_fake() -> None:
    one, x = matrix(), drawn(1, 640)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(one.multiply(x, None)) is FakeTensor


@torch.no_grad()
def test_a_trace_sees_an_operator() -> None:
    one, x = matrix(), drawn(1, 640)
    traced = make_fx(lambda x: one.multiply(x, None))(x)
    other = drawn(1, 640, seed=5)
    assert torch.equal(traced(other), one.multiply_by_onednn(other, None))
    assert "linear" in traced.code
