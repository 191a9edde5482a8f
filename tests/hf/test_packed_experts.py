"""Test packed experts of mixtures, and GPT-2's transposed layers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

import kvant
from kvant.native import get_library
from kvant.weights.packed_matrix import CodedMatrix
from kvant.weights.packed_weight import PackedWeight
from unpacked import unpack_copy

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
HIDDEN, EXPERTS, TOP = 64, 6, 2
DTYPES = {"raw": torch.bfloat16, "affine8": torch.float32, "affine4": torch.bfloat16}


def make_experts(dtype: torch.dtype, implementation: str = "grouped_mm", width: int = 96) -> Any:
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=width, num_local_experts=EXPERTS)
    config._experts_implementation = implementation
    experts = MixtralExperts(config)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.1)
    return experts.to(dtype)


def make_routed(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN).to(dtype), chosen, torch.rand(tokens, TOP).to(dtype)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    limit = 1e-2 if ours.dtype == torch.bfloat16 else 3e-3
    assert (ours - theirs).double().norm() <= limit * theirs.double().norm()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("format_name", DTYPES)
@torch.no_grad()
def test_experts_compute_as_their_dense_copy(
    format_name: str, implementation: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = DTYPES[format_name]
    experts = make_experts(dtype, implementation)
    packing = kvant.pack(experts, format_name)
    assert {*packing.layers} == {"gate_up_proj", "down_proj"} and not packing.left
    plain, routed = unpack_copy(experts), make_routed(tokens, dtype)
    shapes: list[torch.Size] = []
    decode = CodedMatrix.to_dense

    def count(matrix: CodedMatrix) -> torch.Tensor:
        shapes.append(matrix.shape)
        return decode(matrix)

    monkeypatch.setattr(CodedMatrix, "to_dense", count)
    assert_close(experts(*routed), plain(*routed))
    # Where an implementation asks for values, those of the chosen experts are decoded alone.
    assert all(rows in (2 * 96, HIDDEN) for rows, _ in shapes)
    assert implementation == "batched_mm" or not shapes


@pytest.mark.parametrize("format_name", DTYPES)
def test_unpacked_experts_are_the_module_s_own(format_name: str) -> None:
    experts = make_experts(DTYPES[format_name])
    before = dict(experts.named_parameters())
    values = {name: weight.detach().clone() for name, weight in before.items()}
    packing = kvant.pack(experts, format_name)
    for name, layer in packing.layers.items():
        assert layer.nbytes_before == values[name].nbytes
        assert tuple(getattr(experts, name).shape) == tuple(values[name].shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kvant.unpack(experts)
    for name, weight in experts.named_parameters():
        assert weight is before[name]
        error = (weight - values[name]).double().norm() / values[name].double().norm()
        assert error <= {"raw": 0, "affine8": 0.01, "affine4": 0.1}[format_name]


@pytest.mark.parametrize("format_name", DTYPES)
@torch.no_grad()
def test_experts_are_indexed_like_a_parameter(format_name: str) -> None:
    experts = make_experts(DTYPES[format_name])
    kvant.pack(experts, format_name)
    weight, dense = experts.down_proj, unpack_copy(experts).down_proj
    one = weight[torch.tensor(2)]
    assert isinstance(one, PackedWeight) and torch.equal(one + 0, dense[2] + 0)
    assert torch.equal(weight[-1] + 0, dense[-1] + 0)
    for index in (torch.tensor([0, 3, 0]), slice(1, 3)):
        assert torch.equal(weight[index], dense[index])
    with pytest.raises(IndexError):
        weight[EXPERTS]
    last = weight.transpose(dim0=-1, dim1=-2)
    assert torch.equal(last + 0, dense.transpose(1, 2) + 0)
    assert torch.equal(weight.transpose(1, 2) + 0, dense.transpose(1, 2) + 0)
    assert torch.equal(weight.transpose(0, 1), dense.transpose(0, 1))


def test_gradients_of_experts_are_those_of_dense_weights() -> None:
    experts = make_experts(torch.bfloat16)
    kvant.pack(experts)
    plain, routed = unpack_copy(experts), make_routed(5, torch.bfloat16)
    for module in (experts, plain):
        module(*routed).sum().backward()
    assert torch.equal(experts.down_proj.grad, plain.down_proj.grad)


@torch.no_grad()
def test_experts_may_be_assigned_other_memory() -> None:
    experts = make_experts(torch.bfloat16)
    kvant.pack(experts)
    plain, routed = unpack_copy(experts), make_routed(5, torch.bfloat16)
    for module in (experts, plain):
        module.down_proj.data = module.down_proj.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert experts.down_proj.matrix is experts.down_proj.matrix
    assert_close(experts(*routed), plain(*routed))


def test_experts_that_blocks_cannot_hold_are_left() -> None:
    experts = make_experts(torch.bfloat16, width=80)
    left = kvant.pack(experts, "affine4").left
    assert left["gate_up_proj"] == "of experts whose outputs are no multiple of 64"
    assert left["down_proj"] == "of a width that is no multiple of 32"


@pytest.mark.parametrize("format_name", ["affine8", "affine4"])
@torch.no_grad()
def test_transposed_layers_are_rounded(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Conv1D(192, 96)
    nn.init.normal_(layer.bias)
    assert kvant.pack(layer, format_name).layers[""].is_rounded
    plain, x = unpack_copy(layer), torch.randn(3, 7, 96)
    assert torch.equal(layer.weight + 0, plain.weight + 0) and plain.weight.is_contiguous()
    assert torch.equal(layer.weight[5:9], plain.weight[5:9])
    assert torch.equal(layer.weight.view(-1), plain.weight.view(-1))
    monkeypatch.setattr(CodedMatrix, "to_dense", None)
    assert_close(layer(x), plain(x))
    rows = x.view(-1, 96)
    by_name = torch.addmm(input=layer.bias, mat1=rows, mat2=layer.weight)
    assert torch.equal(by_name, layer(rows))


def test_transposed_layers_of_16_bits_are_left() -> None:
    assert kvant.pack(Conv1D(192, 96).bfloat16()).left == {"": "of class Conv1D"}
