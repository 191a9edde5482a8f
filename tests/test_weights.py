"""Test packed weights in 16 bits and rounded: outputs, reads, writes, copies, unpacking."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd import forward_ad

import kvant
from kvant import CacheError
from kvant.native import get_library
from kvant.weights import packed_matrix
from kvant.weights import packing as weights
from kvant.weights.packed_weight import PackedWeight
from thin import thin_rows
from unpacked import unpack_copy

IN, OUT = 96, 128
FORMATS = ("raw", "affine8", "affine4")
pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)


class Model(nn.Module):
    """Two layers, one with a bias."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(IN, OUT, dtype=dtype)
        self.down = nn.Linear(OUT, IN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


def make_rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, IN, generator=generator).bfloat16()


def make_model_pair(name: str = "raw", dtype: torch.dtype = torch.bfloat16) -> tuple[Model, Model]:
    """Return a packed model, and before it a dense one with the same values."""
    packed = Model(dtype)
    assert list(kvant.pack(packed, name).layers) == ["up", "down"]
    return unpack_copy(packed), packed


def assert_close(first: Tensor, second: Tensor) -> None:
    """They differ by roundings of sums and of outputs."""
    assert first.dtype == second.dtype and first.shape == second.shape
    assert (first.double() - second.double()).norm() <= 6e-3 * second.double().norm()


def is_packed(model: Any) -> bool:
    return all(isinstance(layer.weight, PackedWeight) for layer in (model.up, model.down))


INPUTS: dict[str, Tensor] = {
    "one row": make_rows(1, 1),
    "no batch": make_rows(),
    "no row": make_rows(2, 0),
    "16 rows": make_rows(16),
    "500 rows": make_rows(1, 500),
    "four dimensions": make_rows(2, 3, 4),
    "every second row": make_rows(2, 8)[:, ::2],
    "a part of a row": make_rows(2, 3, 2)[:, :, 0],
    "turned": make_rows(4, 5).transpose(0, 1),
    "one row for all": make_rows(1, 1).expand(2, 7, IN),
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", INPUTS)
@torch.no_grad()
def test_outputs_are_those_of_dense_weights(name: str, format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    assert_close(packed(INPUTS[name]), plain(INPUTS[name]))


@pytest.mark.parametrize("format_name", FORMATS)
def test_no_dense_copy_is_made(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = make_model_pair(format_name)
    monkeypatch.setattr(packed_matrix.CodedMatrix, "to_dense", None)
    monkeypatch.setattr(PackedWeight, "operand", None)
    with torch.no_grad():
        assert packed(make_rows(3)).isfinite().all()


@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("format_name", FORMATS)
@torch.no_grad()
def test_rows_may_have_another_dtype_than_weights(format_name: str, rows: torch.dtype) -> None:
    plain, packed = make_model_pair(format_name)
    x = make_rows(3)
    assert_close(packed(x.to(rows)), plain.to(rows)(x.to(rows)))


def test_unpacking_restores_the_model_s_parameters() -> None:
    model = Model()
    before = dict(model.named_parameters())
    bits = {name: parameter.detach().clone() for name, parameter in before.items()}
    kvant.pack(model)
    assert kvant.unpack(model) == 2
    after = dict(model.named_parameters())
    assert all(
        after[name] is parameter and torch.equal(parameter, bits[name])
        for name, parameter in before.items()
    )
    assert kvant.unpack(model) == 0
    assert set(vars(model.up)) == set(vars(Model().up))


def test_unpacking_tells_that_weights_stay_rounded() -> None:
    model = Model()
    before = dict(model.named_parameters())
    kvant.pack(model, {"up": "affine8", "down": "affine4"})
    assert before["up.weight"].untyped_storage().nbytes() == 0
    values = model.up.weight.clone()
    with pytest.warns(UserWarning, match="keep their rounded values: 1 to affine8, 1 to affine4"):
        assert kvant.unpack(model) == 2
    assert model.up.weight is before["up.weight"] and torch.equal(model.up.weight, values)


def test_packing_twice_is_packing_once() -> None:
    model = Model()
    first = kvant.pack(model)
    weight = model.up.weight
    assert kvant.pack(model) == first
    assert model.up.weight is weight
    assert str(first) == "2 layers packed, 48 KiB" and first.left == {}


def test_packing_says_what_layers_became() -> None:
    packing = kvant.pack(Model(), {"u*": "affine8", "*": "affine4"})
    assert [layer.format for layer in packing.layers.values()] == ["affine8", "affine4"]
    assert (packing.nbytes_before, packing.nbytes) == (49152, 13824 + 10240)
    assert str(packing) == "2 layers packed, 48 KiB -> 23.5 KiB in affine4, affine8"
    assert [layer.is_rounded for layer in kvant.pack(Model()).layers.values()] == [False, False]


def test_errors_of_outputs_are_measured_on_a_probe() -> None:
    model, x = Model(), make_rows(50)
    dense = copy.deepcopy(model)
    packing = kvant.pack(model, "up=affine8,down=affine4", probe=x)
    errors = [layer.error for layer in packing.layers.values()]
    with torch.no_grad():
        outputs = [layer.up(x) - layer.up.bias for layer in (model, dense)]
    error = (outputs[0] - outputs[1]).float().norm() / outputs[1].float().norm()
    assert errors[0] == pytest.approx(error, rel=0.3) and 0.002 < errors[0] < 0.01
    assert errors[1] is not None and 0.03 < errors[1] < 0.15
    assert str(packing).endswith(f"largest error of outputs {errors[1]:.2g} (down)")
    assert not model.up._forward_pre_hooks
    assert {layer.error for layer in kvant.pack(Model(), probe=x).layers.values()} == {None}


def test_probe_measures_layers_by_the_rows_that_they_get() -> None:
    class Caller(Model):
        """Calls a layer by keyword, and the other with no rows."""

        def forward(self, x: Tensor) -> Tensor:
            self.down(x.new_zeros(0, OUT))
            out: Tensor = self.up(input=x)
            return out

    layers = kvant.pack(Caller(), "affine8", probe=make_rows(5)).layers
    assert layers["down"].error is None
    assert layers["up"].error is not None and 0.002 < layers["up"].error < 0.01


def test_layer_without_outputs_hides_no_error() -> None:
    model = Model()
    nn.init.zeros_(model.up.weight)
    packing = kvant.pack(model, "affine4", probe=make_rows(50))
    assert packing.layers["up"].error == 0.0
    assert str(packing).endswith(" (down)")


def test_packed_model_can_be_rounded_once() -> None:
    model = Model()
    kvant.pack(model)
    weight = model.up.weight.clone()
    assert [layer.format for layer in kvant.pack(model, "affine4").layers.values()] == [
        "affine4"
    ] * 2
    assert kvant.pack(model).layers == kvant.pack(model, "affine4").layers
    with pytest.raises(
        ValueError, match="up is rounded to affine4, not to affine8: load the model"
    ):
        kvant.pack(model, "up=affine8")
    assert 0 < (model.up.weight - weight).norm() < 0.2 * weight.norm()


@pytest.mark.parametrize("format_name", FORMATS)
def test_counted_bytes_of_a_packed_model_are_those_after_packing_again(format_name: str) -> None:
    model = make_tied_pair()[1]
    counted = weights.count_weight_nbytes(model, format_name)
    assert counted == kvant.pack(model, format_name).nbytes
    assert counted == weights.count_weight_nbytes(model)


def test_counting_refuses_what_packing_refuses() -> None:
    _, packed = make_model_pair("affine8")
    with pytest.raises(ValueError, match="up is rounded to affine8, not to affine4"):
        weights.count_weight_nbytes(packed, "affine4")


def test_tied_argument_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="tied= is deprecated"):
        assert len(kvant.pack(Model(), tied=True).layers) == 2


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ("u*=affine8, down=q4", "weights='q4' for 'down': unknown"),
        ("turbo4", "weights='turbo4': unknown; the formats are raw, affine8, affine6"),
        ({"up": "affine9", "*": "raw"}, "weights='affine9' for 'up': unknown"),
        ({"upp": "affine8"}, "no layer matches 'upp'; the layers are up, down, ..."),
        (8, "weights=8: unknown"),
        ("up=affine8,up=affine2", "'up' has two formats: give one"),
    ],
)
def test_unknown_format_or_pattern_is_refused(formats: Any, message: str) -> None:
    model = Model()
    with pytest.raises(ValueError) as error:
        kvant.pack(model, formats)
    assert message in str(error.value) and not weights.is_packed(model)


@pytest.mark.parametrize("format_name", FORMATS)
def test_names_shapes_and_values_are_unchanged(format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    state_dict = packed.state_dict()
    assert list(state_dict) == list(plain.state_dict())
    assert all(torch.equal(state_dict[name], first) for name, first in plain.state_dict().items())
    for first, second in zip(plain.parameters(), packed.parameters(), strict=True):
        assert isinstance(second, nn.Parameter) and torch.equal(first, second)
        assert (first.shape, first.dtype, first.nbytes) == (
            second.shape,
            second.dtype,
            second.nbytes,
        )
        assert first.requires_grad == second.requires_grad


def test_state_dict_loads_into_16_bit_layers() -> None:
    other, (_, packed) = Model(), make_model_pair()
    packed.load_state_dict(other.state_dict())
    assert is_packed(packed)
    with torch.no_grad():
        assert_close(packed(make_rows(3)), other(make_rows(3)))
    kvant.unpack(packed)
    assert torch.equal(packed.up.weight, other.up.weight)


def test_state_dict_is_refused_by_rounded_layers() -> None:
    plain, packed = make_model_pair("affine8")
    with pytest.raises(
        RuntimeError, match=r"of a rounded weight.*call kvant.unpack\(model\) first"
    ):
        packed.load_state_dict(Model().state_dict())
    with torch.no_grad():
        assert_close(packed(make_rows(3)), packed(make_rows(3)))
        assert torch.equal(packed.up.weight, plain.up.weight)


@pytest.mark.parametrize("format_name", FORMATS)
def test_state_dict_is_written_to_files(format_name: str, tmp_path: Path) -> None:
    plain, packed = make_model_pair(format_name)
    state_dict = {name: value.clone() for name, value in packed.state_dict().items()}
    save_file(state_dict, tmp_path / "one.safetensors")
    torch.save(packed.state_dict(), tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(loaded["up.weight"], plain.up.weight)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_copy_is_packed_and_independent(format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    copied = copy.deepcopy(packed)
    assert is_packed(copied)
    if format_name == "raw":
        copied.load_state_dict(Model().state_dict())
    other = unpack_copy(copied)
    assert torch.equal(other.up.weight, plain.up.weight) == (format_name != "raw")
    assert is_packed(packed) and torch.equal(packed.up.weight, plain.up.weight)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_pickled_model_is_dense(format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    reloaded = pickle.loads(pickle.dumps(packed))
    assert type(reloaded.up.weight) is nn.Parameter
    assert torch.equal(reloaded.up.weight, plain.up.weight)


@pytest.mark.parametrize(
    "convert", [nn.Module.float, nn.Module.half, lambda model_: model_.to("meta")]
)
def test_converted_16_bit_weights_are_those_of_the_dense_model(
    convert: Callable[[nn.Module], nn.Module],
) -> None:
    plain, packed = make_model_pair()
    convert(packed)
    convert(plain)
    assert packed.up.weight.dtype == plain.up.weight.dtype
    assert packed.up.weight.is_meta or torch.equal(packed.up.weight, plain.up.weight)
    x = make_rows(2).to(plain.up.weight)
    with torch.no_grad():
        assert x.is_meta or torch.allclose(packed(x), plain(x), rtol=2**-8, atol=2**-8)


def test_converted_model_is_packed_again_if_kernels_read_its_dtype() -> None:
    _, packed = make_model_pair()
    packing = kvant.pack(packed.float())
    assert not packing.layers and packing.left == {"up": "of float32", "down": "of float32"}
    assert type(packed.up.weight) is nn.Parameter
    assert list(kvant.pack(packed.half()).layers) == ["up", "down"]


def test_conversion_of_rounded_weights_is_refused() -> None:
    plain, packed = make_model_pair("affine8")
    with pytest.raises(CacheError, match=r"a conversion of a rounded weight"):
        packed.float()
    assert torch.equal(packed.up.weight, plain.up.weight)


@pytest.mark.parametrize("format_name", FORMATS)
def test_conversion_to_the_same_dtype_keeps_it_packed(format_name: str) -> None:
    _, packed = make_model_pair(format_name)
    assert is_packed(packed.bfloat16().cpu().to("cpu", torch.bfloat16).eval())


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda weight: weight.add_(1),
    "data": lambda weight: weight.data.mul_(2),
    "data, other values": lambda weight: weight.data.copy_(torch.zeros(OUT, IN)),
    "data, another": lambda weight: setattr(weight, "data", torch.zeros(OUT, IN).bfloat16()),
    "copy": lambda weight: weight.copy_(torch.zeros(OUT, IN)),
    "a row": lambda weight: weight.__setitem__(0, 1.0),
    "an optimizer": lambda weight: torch._foreach_add_([weight], 1.0),
    "out": lambda weight: torch.neg(torch.ones(OUT, IN).bfloat16(), out=weight),
}


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_writes_reach_16_bit_weights(name: str) -> None:
    plain, packed = make_model_pair()
    for model in (plain, packed):
        WRITES[name](model.up.weight)
    assert torch.equal(packed.up.weight, plain.up.weight)
    assert_close(packed(make_rows(2)), plain(make_rows(2)))


@pytest.mark.parametrize("name", [*WRITES, "the address"])
@torch.no_grad()
def test_writes_to_rounded_weights_are_refused(name: str) -> None:
    plain, packed = make_model_pair("affine8")
    with pytest.raises(CacheError, match=r"kvant\.unpack\(model\) first"):
        (WRITES | {"the address": torch.Tensor.data_ptr})[name](packed.up.weight)
    assert torch.equal(packed.up.weight, plain.up.weight)
    assert_close(packed(make_rows(2)), plain(make_rows(2)))


@torch.no_grad()
def test_rows_of_rounded_weights_are_taken_by_number() -> None:
    layer = nn.Linear(96, 128)
    kvant.pack(layer, "affine8")
    dense = layer.weight + 0
    for index in (torch.tensor([-1, 5]), slice(3, 9), torch.tensor([[0, 1], [2, -128]])):
        assert torch.equal(layer.weight[index], dense[index])
    assert torch.equal(layer.weight.transpose(dim0=0, dim1=1), dense.t())
    assert torch.equal(
        nn.functional.linear(input=dense, weight=layer.weight, bias=layer.bias), layer(dense)
    )
    with pytest.raises(IndexError):
        layer.weight[torch.tensor([128])]


def test_memory_of_a_16_bit_weight_may_be_freed() -> None:
    layer = nn.Linear(96, 128).bfloat16()
    kvant.pack(layer)
    layer.weight.data = torch.empty(0)
    assert layer.weight.numel() == 0


@torch.no_grad()
def test_memory_of_a_16_bit_weight_may_move_within_its_storage() -> None:
    plain, packed = make_model_pair()
    weight: Any = packed.up.weight
    packed(make_rows(2))
    weight.share_memory_()
    assert_close(packed(make_rows(2)), plain(make_rows(2)))
    assert weight.matrix.struct.raw == packed_matrix.DenseMatrix(weight.original).struct.raw
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight: fewer than outputs"):
        packed(make_rows(2))


@torch.no_grad()
def test_width_that_kernels_cannot_read_is_left_to_torch() -> None:
    plain, packed = make_model_pair()
    for width in (90, 0):
        x = make_rows(2)[:, :width].contiguous()
        for model in (plain, packed):
            model.up.weight.data = model.up.weight.data[:, :width].contiguous()
        assert torch.equal(packed.up(x), plain.up(x))


def test_weight_may_be_replaced_by_one_of_another_shape() -> None:
    layer = nn.Sequential(nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16))
    kvant.pack(layer)
    layer(make_rows(1))
    weight: Any = layer[0].weight
    weight.data = weight.data[: OUT // 2]
    assert layer(make_rows(1)).shape == (1, OUT // 2)
    layer[0].float()
    assert weight.matrix.tensor.dtype == torch.float32  # the memory of 16 bits is free
    assert_close(layer(make_rows(2).float()), make_rows(2).float() @ weight.T)


def test_copies_of_rounded_weights_keep_their_settings() -> None:
    model = Model()
    kvant.pack(model, "affine8")
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in copy.deepcopy(model).parameters())


def test_refused_rounding_changes_nothing() -> None:
    model = Model()
    kvant.pack(model, {"down": "affine8"})
    with pytest.raises(ValueError, match="down is rounded to affine8, not to affine4"):
        kvant.pack(model, "affine4")
    assert not model.up.weight.is_rounded  # type: ignore[union-attr]


@pytest.mark.parametrize("format_name", FORMATS)
@torch.no_grad()
def test_packed_weight_can_be_copied_into_others(format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    mean = torch.zeros(OUT, IN, dtype=torch.bfloat16)
    mean.add_(packed.up.weight).mul_(packed.up.weight)
    assert torch.equal(mean, plain.up.weight * plain.up.weight)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("training", [False, True])
def test_gradients_equal_those_of_dense_weights(training: bool, format_name: str) -> None:
    grads = []
    for model in make_model_pair(format_name):
        x = make_rows(3).requires_grad_()
        model.train(training)(x).square().sum().backward()
        grads.append([x.grad, *(first.grad for first in unpack_copy(model).parameters())])
        grads[-1] = [x.grad, *(first.grad for first in model.parameters())]
    for first, second in zip(*grads, strict=True):
        assert first is not None and torch.equal(first, second)


def test_optimizer_created_before_trains_the_model() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kvant.pack(model)
    model(make_rows(3)).sum().backward()
    before = model.up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.up.weight, before)
    plain = unpack_copy(model)
    with torch.no_grad():
        assert_close(model(make_rows(2)), plain(make_rows(2)))


class TiedModel(nn.Module):
    """An embedding and an output layer that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(OUT, IN, dtype=torch.bfloat16)
        self.head = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(tokens))
        return out


TOKENS = torch.arange(7)


def make_tied_pair(name: str = "raw") -> tuple[TiedModel, TiedModel]:
    packed = TiedModel()
    assert list(kvant.pack(packed, name).layers) == ["head"]
    assert packed.head.weight is packed.words.weight
    return unpack_copy(packed), packed


@pytest.mark.parametrize("format_name", FORMATS)
@torch.no_grad()
def test_tied_weight_is_kept_once(format_name: str) -> None:
    plain, packed = make_tied_pair(format_name)
    assert_close(packed(TOKENS), plain(TOKENS))
    assert torch.equal(packed.words(TOKENS[None]), plain.words(TOKENS[None]))
    names = [[name for name, _ in weights.named_weights(model)] for model in (plain, packed)]
    assert names == [["words.weight"], ["words.weight"]]
    assert plain.head.weight is plain.words.weight


@pytest.mark.parametrize(
    ("formats", "expected"),
    [("words=affine8,*=affine4", "affine8"), ("words=raw,head=affine4", "raw")],
)
def test_first_pattern_that_matches_a_layer_of_a_tied_weight_counts(
    formats: str, expected: str
) -> None:
    model, other = TiedModel(), TiedModel()
    nbytes = weights.count_weight_nbytes(model, expected)
    assert weights.count_weight_nbytes(model, formats) == nbytes
    assert kvant.pack(model, formats).layers == kvant.pack(other, expected).layers


@pytest.mark.parametrize("format_name", FORMATS)
@torch.no_grad()
def test_embedding_without_a_layer_is_rounded_but_not_packed_in_16_bits(format_name: str) -> None:
    model = nn.Sequential(nn.Embedding(OUT, IN, dtype=torch.bfloat16), Model())
    packing = kvant.pack(model, format_name)
    assert ("0" in packing.layers) == (format_name != "raw") and not packing.left
    plain = unpack_copy(model)
    assert_close(model(TOKENS), plain(TOKENS))
    with pytest.raises(IndexError):
        model[0](torch.tensor([OUT]))


@torch.no_grad()
def test_writes_to_the_embedding_reach_the_layer() -> None:
    plain, packed = make_tied_pair()
    for model in (plain, packed):
        model.words.weight[3] = 2.0
    assert_close(packed(TOKENS), plain(TOKENS))
    weight = packed.head.weight
    assert torch.equal(torch.add(weight, other=weight), 2 * plain.head.weight)
    copied = copy.deepcopy(packed)
    assert copied.head.weight is copied.words.weight
    copied.words.weight.data = plain.words.weight.detach() * 2
    assert_close(copied.head(make_rows(2)), 2 * plain.head(make_rows(2)))
    assert_close(packed(TOKENS), plain(TOKENS))


@torch.no_grad()
def test_pickled_tied_weight_stays_tied() -> None:
    plain, packed = make_tied_pair()
    reloaded = pickle.loads(pickle.dumps(packed))
    assert reloaded.head.weight is reloaded.words.weight
    assert torch.equal(reloaded(TOKENS), plain(TOKENS))


class ScaledEmbedding(nn.Embedding):
    """An embedding with a scale, as in some families."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3.0 * super().forward(tokens)


@pytest.mark.parametrize("format_name", FORMATS)
def test_tied_weight_may_belong_to_several_embeddings_of_any_class(format_name: str) -> None:
    model = TiedModel()
    model.others = ScaledEmbedding(OUT, IN, _weight=model.words.weight)
    model.others.weight = model.words.weight
    assert list(kvant.pack(model, format_name).layers) == ["head"]
    assert model.others.weight is model.head.weight
    assert torch.equal(model.others(TOKENS), 3.0 * model.words(TOKENS))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_created_in_inference_mode_pack(tied: bool, format_name: str) -> None:
    with torch.inference_mode():
        model: Any = TiedModel() if tied else Model()
    packing = kvant.pack(model, format_name)
    assert packing.left == {}
    x = TOKENS if tied else make_rows(2)
    with torch.no_grad():
        assert_close(model(x), unpack_copy(model)(x))


@pytest.mark.parametrize("format_name", FORMATS)
def test_tied_weight_gradient_sums_both_uses(format_name: str) -> None:
    grads = []
    for model in make_tied_pair(format_name):
        model(TOKENS).square().sum().backward()
        grads.append(model.words.weight.grad)
    assert grads[0] is not None and grads[1] is not None
    assert torch.allclose(grads[0].float(), grads[1].float(), rtol=2**-6)


def test_tensors_without_an_address_are_skipped() -> None:
    model = Model()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert list(kvant.pack(model, "affine8").layers) == ["up", "down"]


@pytest.mark.parametrize("format_name", FORMATS)
def test_hooks_are_called_and_may_read_the_weight(format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    for model in (plain, packed):
        model.up.register_forward_hook(lambda module, args, out: out + module.weight[:, 0])
    with torch.no_grad():
        assert_close(packed(make_rows(2)), plain(make_rows(2)))


@pytest.mark.parametrize("format_name", FORMATS)
def test_weight_packed_in_inference_mode_works_outside(format_name: str) -> None:
    model = Model()
    with torch.inference_mode():
        kvant.pack(model, format_name)
        inside = model(make_rows(2))
    with torch.no_grad():
        assert torch.equal(model(make_rows(2)), inside)
    model(make_rows(2)).sum().backward()
    assert model.up.weight.grad is not None


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_autocast_computes_as_with_dense_weights(dtype: torch.dtype, format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    with torch.autocast("cpu", dtype=dtype):
        for x in (make_rows(2), make_rows(2).float()):
            assert_close(packed(x), plain(x))


@pytest.mark.parametrize("format_name", FORMATS)
@torch.no_grad()
def test_a_transform_computes_with_dense_weights(format_name: str) -> None:
    plain, packed = make_model_pair(format_name)
    assert torch.equal(torch.vmap(packed)(make_rows(3, 2)), torch.vmap(plain)(make_rows(3, 2)))


# torch uses it internally
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("format_name", FORMATS)
@torch.no_grad()
def test_tangents_equal_those_of_dense_weights(format_name: str) -> None:
    tangents = []
    for model in make_model_pair(format_name):
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(make_rows(2), torch.ones(2, IN).bfloat16()))
            tangents.append(forward_ad.unpack_dual(out).tangent)
    assert torch.equal(*tangents)


BIASES: dict[str, Tensor] = {
    "every second": torch.randn(2 * OUT).bfloat16()[::2],
    "one for all": torch.randn(1).bfloat16().expand(OUT),
    "a single one": torch.randn(1).bfloat16(),
    "a number": torch.randn(()).bfloat16(),
    "a row": torch.randn(1, OUT).bfloat16(),
    "one a row": torch.randn(3, OUT).bfloat16(),
    "int32": torch.ones(OUT, dtype=torch.int32),
    "too short": torch.randn(OUT // 2).bfloat16(),
    "too long": torch.randn(2 * OUT).bfloat16(),
    "a column": torch.randn(OUT, 1).bfloat16(),
    "meta": torch.randn(OUT, device="meta").bfloat16(),
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", BIASES)
@torch.no_grad()
def test_bias_replaced_after_packing_is_added_or_refused_like_torch(
    name: str, format_name: str
) -> None:
    plain, packed = make_model_pair(format_name)
    plain.up.bias = packed.up.bias = nn.Parameter(BIASES[name], requires_grad=False)
    for x in (make_rows(3), make_rows(2, 3), make_rows(0)):
        try:
            expected = plain.up(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                packed.up(x)
        else:
            assert_close(packed.up(x), expected)


@torch.no_grad()
def test_bias_of_another_class_is_left_to_torch() -> None:
    class Bias(nn.Parameter):
        """A bias whose numbers have no known address."""

    plain, packed = make_model_pair()
    bias = Bias(plain.up.bias.detach())
    plain.up.bias = packed.up.bias = bias
    assert not packed_matrix.can_multiply(make_rows(1), packed.up.weight.matrix, bias)  # type: ignore[union-attr]
    assert torch.equal(packed.up(make_rows(1)), plain.up(make_rows(1)))


@pytest.mark.parametrize("format_name", FORMATS)
def test_default_device_changes_nothing(format_name: str) -> None:
    model, x = Model(), make_rows(1)
    with torch.device("meta"):
        assert list(kvant.pack(model, format_name).layers) == ["up", "down"]
        with torch.no_grad():
            inside = model(x)
        dense = model.up.weight.clone()
    assert torch.equal(dense, unpack_copy(model).up.weight)
    with torch.no_grad():
        assert torch.equal(model(x), inside)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it when it resumes
@pytest.mark.parametrize(
    ("backend", "format_name"), thin_rows(product(["eager", "aot_eager"], FORMATS))
)
def test_a_compiled_model_computes_the_same(backend: str, format_name: str) -> None:
    """Linear layers run outside of the compiled graph."""
    torch.compiler.reset()
    plain, packed = make_model_pair(format_name)
    compiled = torch.compile(packed, backend=backend)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            assert_close(compiled(make_rows(2)), plain(make_rows(2)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_decoding_a_weight_is_not_compiled() -> None:
    """Below a deep stack a compiler would exceed the limit of recursion in what it calls."""
    torch.compiler.reset()
    functions = []

    def record(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        functions.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    model = make_model_pair("affine4")[1]

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        out: torch.Tensor = model(x)
        return out

    torch.compile(run, backend=record)(make_rows(2)).sum().backward()
    assert "sin" in functions
    assert not [name for name in functions if "and" in name or "shift" in name]


def test_float32_weights_are_rounded_but_not_packed_in_32_bits() -> None:
    plain, packed = make_model_pair("affine8", torch.float32)
    x = torch.randn(3, IN)
    with torch.no_grad():
        assert torch.allclose(packed(x), plain(x), rtol=1e-3, atol=1e-3)
    assert set(kvant.pack(Model(torch.float32)).left.values()) == {"of float32"}


SCRIPT = """
import ctypes, json, sys
import torch, kvant
from torch import nn
from kvant.bench.harness import read_resident_nbytes, reset_resident_peak

torch.set_num_threads(1)
SIZE, LAYERS = 2048, 16

def layer():
    return nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)

kvant.pack(layer(), sys.argv[1])  # what the first takes for good
model = nn.Sequential(*(layer() for _ in range(LAYERS)))
before = reset_resident_peak()
packing = kvant.pack(model, sys.argv[1])
peak = read_resident_nbytes("VmHWM") - before
ctypes.CDLL(None).malloc_trim(0)
rest = read_resident_nbytes("VmRSS") - before
report = {"layers": len(packing.layers), "nbytes": packing.nbytes, "peak": peak, "rest": rest}
print(json.dumps(report))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no mark to set back")
@pytest.mark.parametrize(
    ("format_name", "bits"),
    [("raw", 16), pytest.param("affine8", 9, marks=pytest.mark.laws), ("affine4", 5)],
)
def test_packing_makes_no_second_copy_of_the_model(format_name: str, bits: int) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, format_name], capture_output=True, text=True, check=True
    )
    report = json.loads(process.stdout)
    dense = report["layers"] * 2048 * 2048 * 2
    assert report["layers"] == 16 and report["nbytes"] == dense * bits / 16
    assert report["rest"] < report["nbytes"] - dense + dense / 32, report
    assert report["peak"] < dense / 2, report  # a few layers: freed memory is fragmented
