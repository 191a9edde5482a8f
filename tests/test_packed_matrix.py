"""Test products with weights in 16 bits and as codes, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear

import kvant.native
from isas import ISAS, load_or_skip
from kvant.native import NativeLibrary, get_library
from kvant.weights.packed_matrix import (
    NUM_FITS,
    CodedMatrix,
    DenseMatrix,
    WeightMatrix,
    can_multiply,
    explain_unreadable,
    find_part_columns,
    multiply,
)
from kvant.weights.packing import WEIGHT_CODECS

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
SHAPES = ((192, 576), (100, 96), (1, 64), (65, 3072))
FORMATS = ("bfloat16", "float16", *WEIGHT_CODECS)
# Relative errors: rows as numbers of 15 bits, and the rounding of outputs.
BOUNDS = {torch.float32: 4e-4, torch.bfloat16: 4.3e-3, torch.float16: 9e-4}
EXACT_BOUND = 2e-6  # of sums in float32
COUNTS = (1, 2, 3, 5, 16, 32, 33, 70)


@pytest.fixture(scope="module", params=ISAS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeLibrary:
    return load_or_skip(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def every_isa(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvant.native, "get_library", lambda: library)


def draw_weight(num_outputs: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.05 * torch.randn(num_outputs, width, generator=generator)


def make_matrix(name: str, num_outputs: int, width: int) -> WeightMatrix:
    weight = draw_weight(num_outputs, width)
    if name in WEIGHT_CODECS:
        return CodedMatrix.encode(weight, WEIGHT_CODECS[name])
    return DenseMatrix(weight.to(getattr(torch, name)))


def draw_rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def compute_error(y: Tensor, expected: Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.usefixtures("every_isa")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
def test_products_are_those_of_float64(name: str, num_outputs: int, width: int) -> None:
    """For any number of rows, with and without a bias, in each dtype of rows."""
    matrix = make_matrix(name, num_outputs, width)
    dense = matrix.to_dense().double()
    for dtype, bound in BOUNDS.items():
        if isinstance(matrix, DenseMatrix) and dtype == torch.float32:
            bound = EXACT_BOUND
        rows = draw_rows(max(COUNTS), width, dtype)
        bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(2)).to(dtype)
        expected = rows.double() @ dense.T + bias.double()
        for count in COUNTS:
            y = multiply(rows[:count], matrix, bias)
            assert y.dtype == dtype and y.shape == (count, num_outputs)
            assert compute_error(y, expected[:count]) < bound, count
        assert compute_error(multiply(rows, matrix, None), rows.double() @ dense.T) < bound


@pytest.mark.usefixtures("every_isa")
@pytest.mark.parametrize("name", FORMATS)
def test_result_of_a_row_does_not_depend_on_other_rows(name: str) -> None:
    matrix = make_matrix(name, 192, 1152)
    rows = draw_rows(32, 1152, torch.bfloat16)
    expected = torch.cat([multiply(row[None], matrix, None) for row in rows])
    for count in (2, 3, 7, 16, 32):
        assert torch.equal(multiply(rows[:count], matrix, None), expected[:count])


@pytest.mark.usefixtures("every_isa")
@pytest.mark.parametrize("count", [1, 8, 64])
def test_errors_are_at_most_those_of_torch(count: int) -> None:
    matrix = DenseMatrix(draw_weight(512, 1024).bfloat16())
    x, dense = draw_rows(count, 1024, torch.bfloat16), matrix.to_dense()
    expected = x.double() @ dense.double().T
    error = compute_error(multiply(x, matrix, None), expected)
    assert error <= 1.01 * compute_error(linear(x, dense), expected)


@pytest.mark.usefixtures("every_isa")
@pytest.mark.parametrize("name", ["bfloat16", "affine4"])
def test_rows_may_begin_between_pairs(name: str) -> None:
    matrix = make_matrix(name, 100, 96)
    rows = draw_rows(40, 96, torch.bfloat16)
    moved = torch.empty(1 + rows.numel(), dtype=rows.dtype)[1:].view(rows.shape).copy_(rows)
    assert torch.equal(multiply(moved, matrix, None), multiply(rows, matrix, None))


def test_more_rows_than_are_multiplied_together() -> None:
    for name in ("bfloat16", "affine8"):
        matrix = make_matrix(name, 70, 64)
        rows = draw_rows(1030, 64, torch.float32)
        expected = rows.double() @ matrix.to_dense().double().T
        assert compute_error(multiply(rows, matrix, None), expected) < BOUNDS[torch.float32]


@pytest.mark.parametrize("name", FORMATS)
def test_threads_share_any_number_of_outputs(name: str) -> None:
    threads = torch.get_num_threads()
    try:
        for num_outputs in (1, 33, 64, 200):
            matrix = make_matrix(name, num_outputs, 256)
            x = draw_rows(50, 256, torch.float32)
            outputs = []
            for torch_threads in (1, 3):
                torch.set_num_threads(torch_threads)
                outputs.append([multiply(x[:count], matrix, None) for count in (1, 50)])
            assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", WEIGHT_CODECS)
@pytest.mark.parametrize(("num_outputs", "width"), [*SHAPES, (2500, 64)])
def test_decoded_codes_are_those_of_the_codec(name: str, num_outputs: int, width: int) -> None:
    codec, weight = WEIGHT_CODECS[name], draw_weight(num_outputs, width)
    matrix = CodedMatrix.encode(weight, codec)
    expected = codec.open(codec.seal(weight, num_fits=NUM_FITS))
    assert torch.equal(matrix.to_dense(), expected)
    fitted_once = codec.open(codec.seal(weight))
    assert (expected - weight).norm() <= (fitted_once - weight).norm()
    rows = torch.tensor([[0, num_outputs - 1], [num_outputs // 2, 0]])
    assert torch.equal(matrix.take_rows(rows), expected[rows])
    assert matrix.take_rows(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, width)
    for row in (-1, num_outputs):
        with pytest.raises(IndexError, match="index out of range"):
            matrix.take_rows(torch.tensor([row]))


@pytest.mark.parametrize("name", WEIGHT_CODECS)
def test_bytes_are_those_of_codes_and_scales(name: str) -> None:
    matrix = CodedMatrix.encode(draw_weight(128, 256), WEIGHT_CODECS[name])
    assert matrix.nbytes == 128 * 256 * WEIGHT_CODECS[name].bits // 8 + 128 * 256 // 32 * 4


def test_parts_divide_the_width() -> None:
    assert [find_part_columns(width) for width in (32, 576, 1024, 896, 352, 11008)] == [
        *(32, 192, 256, 224, 32, 256)
    ]


def test_nonfinite_rows_give_nan_in_their_own_outputs() -> None:
    for name in FORMATS:
        matrix = make_matrix(name, 100, 96)
        rows = draw_rows(5, 96, torch.float32)
        rows[2, 7] = torch.inf
        y = multiply(rows, matrix, None)
        assert y[[0, 1, 3, 4]].isfinite().all() and not y[2].isfinite().any()


def test_unsupported_operands_are_left_to_torch() -> None:
    matrix, x = make_matrix("bfloat16", 100, 96), torch.randn(2, 96)
    assert can_multiply(x, matrix, None) and can_multiply(x[0], matrix, torch.zeros(100))
    others: list[tuple[Any, Any]] = [
        (x.double(), None),
        (x[:, :64], None),
        (x.to("meta"), None),
        (x, torch.zeros(99)),
        (x, torch.zeros(100).double()),
        (x, torch.zeros(200)[::2]),
        (x, torch.zeros(1).expand(100)),
    ]
    assert not any(can_multiply(rows, matrix, bias) for rows, bias in others)
    assert not can_multiply(x[:, :90], make_matrix("bfloat16", 100, 90), None)
    assert explain_unreadable(torch.Size((10, 100))) == "of a width that is no multiple of 32"


def test_tracing_sees_torch_operators() -> None:
    matrix, x = make_matrix("bfloat16", 100, 96), torch.randn(2, 96).bfloat16()
    with FakeTensorMode() as mode:
        assert not can_multiply(mode.from_tensor(x), matrix, None)
    seen: list[bool] = []

    def product(x: Tensor) -> Tensor:
        seen.append(can_multiply(x, matrix, None))
        return x

    make_fx(product)(x)
    assert seen == [False]
