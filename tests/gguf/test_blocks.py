"""Test that blocks of GGUF tensors become codes with the values that the gguf package decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvant.codecs.affine import Affine
from kvant.gguf.blocks import CODED_TYPES
from kvant.gguf.file import TENSOR_TYPES
from kvant.native import get_library
from kvant.weights.packed_matrix import CodedMatrix, multiply

gguf = pytest.importorskip("gguf", reason="pip install 'kvant[gguf]'")
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
HALF_ULP = 2**-11  # of a float16
NUM_ROWS, WIDTH = 70, 512


def draw_blocks(name: str, num_rows: int, width: int) -> np.ndarray[Any, Any]:
    """Return rows of random blocks whose 16-bit floats are small."""
    kind = gguf.GGMLQuantizationType[name]
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (num_rows, width // values * nbytes), dtype=np.uint8)
    blocks = rows.reshape(-1, nbytes)
    for at in HALVES.get(name, (0,)):
        floats = 0.01 * rng.standard_normal(len(blocks))
        blocks[:, at : at + 2] = floats.astype("<f2").view(np.uint8).reshape(-1, 2)
    return rows


def make_matrix(name: str, rows: np.ndarray[Any, Any]) -> CodedMatrix:
    coded = CODED_TYPES[name]
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]

    def read(first: int, stop: int) -> dict[str, torch.Tensor]:
        groups = coded.split(rows[first:stop].reshape(-1, nbytes))
        fields = {"codes": groups.codes, "scale": groups.scale, "bias": groups.bias}
        return {
            key: torch.from_numpy(np.ascontiguousarray(values)).view(stop - first, -1)
            for key, values in fields.items()
            if values is not None
        }

    shape = torch.Size((len(rows), WIDTH))
    return CodedMatrix.from_codes(shape, torch.float32, Affine(coded.bits, coded.group), read)


@pytest.mark.parametrize("name", CODED_TYPES)
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    """Exact, or within half a unit of the last place of a 16-bit scale and of a bias."""
    rows = draw_blocks(name, NUM_ROWS, WIDTH)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    values = make_matrix(name, rows).to_dense().numpy()
    if name in EXACT:
        assert np.array_equal(values, expected)
        return
    groups = expected.reshape(NUM_ROWS, -1, CODED_TYPES[name].group)
    scale_bound = 2 ** CODED_TYPES[name].bits * np.ptp(groups, axis=-1, keepdims=True)
    bound = HALF_ULP * (scale_bound + np.abs(groups).max(-1, keepdims=True))
    assert np.all(np.abs(values.reshape(groups.shape) - groups) <= bound)
    assert np.linalg.norm(values - expected) < 3e-4 * np.linalg.norm(expected)


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
@pytest.mark.parametrize("name", CODED_TYPES)
def test_products_are_those_of_the_values(name: str) -> None:
    matrix = make_matrix(name, draw_blocks(name, NUM_ROWS, WIDTH))
    for count in (1, 5, 40):
        x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
        expected = x.double() @ matrix.to_dense().double().T
        assert (multiply(x, matrix, None) - expected).norm() < 4e-4 * expected.norm()


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for number, layout in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (layout.name, layout[1:])
