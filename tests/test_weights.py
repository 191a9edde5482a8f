"""Test packed weights: the same bits, less work, no second copy; and unpacking."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd import forward_ad

import kvant
from kvant import CacheError
from kvant.weights import packing as weights
from kvant.weights.packed_matrix import PackedMatrix
from packing import find_unpacked_reasons

IN, OUT = 96, 128


class Model(nn.Module):
    """Two layers, one with a bias."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(IN, OUT, dtype=dtype)
        self.down = nn.Linear(OUT, IN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


REASONS = find_unpacked_reasons(Model)
pytestmark = pytest.mark.skipif(REASONS != "", reason=f"kvant.pack leaves layers: {REASONS}")


def make_rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, IN, generator=generator).bfloat16()


def make_model_pair() -> tuple[Model, Model]:
    """Return a dense model and a packed copy."""
    plain = Model()
    packed = copy.deepcopy(plain)
    assert kvant.pack(packed).layers == ("up", "down")
    return plain, packed


def is_packed(model: Model) -> bool:
    return all(isinstance(layer.weight, weights.PackedWeight) for layer in (model.up, model.down))


INPUTS: dict[str, Tensor] = {
    "one row": make_rows(1, 1),
    "no batch": make_rows(),
    "no row": make_rows(2, 0),
    "16 rows": make_rows(16),
    "500 rows": make_rows(1, 500),
    "four dimensions": make_rows(2, 3, 4),
    "every second row": make_rows(2, 8)[:, ::2],
    "the first row of each": make_rows(3, 8)[:, :1],
    "a part of a row": make_rows(2, 3, 2)[:, :, 0],
    "turned": make_rows(4, 5).transpose(0, 1),
    "one row for all": make_rows(1, 1).expand(2, 7, IN),
}


@pytest.mark.parametrize("name", INPUTS)
@torch.no_grad()
def test_outputs_are_bit_identical(name: str) -> None:
    plain, packed = make_model_pair()
    assert torch.equal(packed(INPUTS[name]), plain(INPUTS[name]))


def test_linear_layers_hold_packed_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = make_model_pair()
    buffers: list[Any] = []
    monkeypatch.setattr(weights, "_make_dense", buffers.append)
    with torch.no_grad():
        assert torch.equal(packed(make_rows(3)), plain(make_rows(3)))
    assert not buffers


def test_unpacking_restores_the_model_s_parameters() -> None:
    model = Model()
    before = dict(model.named_parameters())
    bits = {name: parameter.detach().clone() for name, parameter in before.items()}
    kvant.pack(model)
    assert before["up.weight"].untyped_storage().nbytes() == 0
    assert kvant.unpack(model) == 2
    after = dict(model.named_parameters())
    assert all(
        after[name] is parameter and torch.equal(parameter, bits[name])
        for name, parameter in before.items()
    )
    assert kvant.unpack(model) == 0
    assert set(vars(model.up)) == set(vars(Model().up))


def test_packing_twice_is_packing_once() -> None:
    model = Model()
    first = kvant.pack(model)
    weight = model.up.weight
    assert kvant.pack(model) == first
    assert model.up.weight is weight
    assert str(first) == "2 linear layers packed, 48 KiB" and first.left == {}


def test_names_shapes_and_values_are_unchanged() -> None:
    plain, packed = make_model_pair()
    state_dict = packed.state_dict()
    assert list(state_dict) == list(plain.state_dict())
    assert all(torch.equal(state_dict[name], first) for name, first in plain.state_dict().items())
    assert all(type(first) is Tensor for first in state_dict.values())
    for first, second in zip(plain.parameters(), packed.parameters(), strict=True):
        assert isinstance(second, nn.Parameter) and torch.equal(first, second)
        assert (first.shape, first.dtype, first.nbytes) == (
            second.shape,
            second.dtype,
            second.nbytes,
        )
        assert first.requires_grad == second.requires_grad


def test_state_dict_loads_into_packed_layers() -> None:
    other, (_, packed) = Model(), make_model_pair()
    packed.load_state_dict(other.state_dict())
    assert is_packed(packed)
    with torch.no_grad():
        assert torch.equal(packed(make_rows(3)), other(make_rows(3)))
    kvant.unpack(packed)
    assert torch.equal(packed.up.weight, other.up.weight)


def test_state_dict_is_written_to_files(tmp_path: Path) -> None:
    plain, packed = make_model_pair()
    save_file(packed.state_dict(), tmp_path / "one.safetensors")
    torch.save(packed.state_dict(), tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt")
    assert torch.equal(loaded["up.weight"], plain.up.weight)


def test_a_copy_is_packed_and_independent() -> None:
    plain, packed = make_model_pair()
    copied = copy.deepcopy(packed)
    assert is_packed(copied)
    copied.load_state_dict(Model().state_dict())
    kvant.unpack(copied)
    assert is_packed(packed)
    kvant.unpack(packed)
    assert torch.equal(packed.up.weight, plain.up.weight)


def test_a_pickled_model_is_dense() -> None:
    plain, packed = make_model_pair()
    reloaded = pickle.loads(pickle.dumps(packed))
    assert type(reloaded.up.weight) is nn.Parameter
    assert torch.equal(reloaded.up.weight, plain.up.weight)


@pytest.mark.parametrize(
    "convert", [nn.Module.float, nn.Module.half, lambda model_: model_.to("meta")]
)
def test_dtype_conversion_unpacks(convert: Callable[[nn.Module], nn.Module]) -> None:
    plain, packed = make_model_pair()
    convert(packed)
    convert(plain)
    assert (
        type(packed.up.weight) is nn.Parameter and packed.up.weight.dtype == plain.up.weight.dtype
    )
    assert packed.up.weight.is_meta or torch.equal(packed.up.weight, plain.up.weight)


def test_conversion_to_the_same_dtype_keeps_it_packed() -> None:
    _, packed = make_model_pair()
    assert is_packed(packed.bfloat16().cpu().to("cpu", torch.bfloat16).eval())


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda weight: weight.add_(1),
    "data": lambda weight: weight.data.mul_(2),
    "data, other values": lambda weight: weight.data.copy_(torch.zeros(OUT, IN)),
    "data, another": lambda weight: setattr(weight, "data", torch.zeros(OUT, IN)),
    "a row": lambda weight: weight.__setitem__(0, 1.0),
    "an optimizer": lambda weight: torch._foreach_add_([weight], 1.0),
    "out": lambda weight: torch.neg(torch.zeros(OUT, IN).bfloat16(), out=weight),
    "the address": lambda weight: weight.data_ptr(),
}


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_writing_to_a_packed_weight_is_refused(name: str) -> None:
    plain, packed = make_model_pair()
    with pytest.raises(CacheError, match=r"kvant\.unpack\(model\) first"):
        WRITES[name](packed.up.weight)
    assert torch.equal(packed(make_rows(2)), plain(make_rows(2)))


@torch.no_grad()
def test_packed_weight_can_be_copied_into_others() -> None:
    plain, packed = make_model_pair()
    mean = torch.zeros(OUT, IN, dtype=torch.bfloat16)
    mean.add_(packed.up.weight).mul_(packed.up.weight)
    assert torch.equal(mean, plain.up.weight * plain.up.weight)


@pytest.mark.parametrize("training", [False, True])
def test_gradients_equal_those_of_dense_weights(training: bool) -> None:
    grads = []
    for model in make_model_pair():
        x = make_rows(3).requires_grad_()
        model.train(training)(x).square().sum().backward()
        kvant.unpack(model)
        grads.append([x.grad, *(first.grad for first in model.parameters())])
    for first, second in zip(*grads, strict=True):
        assert first is not None and torch.equal(first, second)


def test_optimizer_created_before_trains_the_unpacked_model() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(make_rows(3)).sum().backward()
    kvant.pack(model)
    kvant.unpack(model)
    before = model.up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.up.weight, before)


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


def make_tied_pair() -> tuple[TiedModel, TiedModel]:
    plain = TiedModel()
    packed = copy.deepcopy(plain)
    packing = kvant.pack(packed, tied=True)
    assert str(packing) == "1 linear layer packed, 24 KiB, 24 KiB of it beside an embedding"
    return plain, packed


@torch.no_grad()
def test_tied_weight_is_packed_next_to_its_embedding() -> None:
    plain, packed = make_tied_pair()
    assert isinstance(packed.head.weight, weights.PackedWeight)
    assert torch.equal(packed(TOKENS), plain(TOKENS))
    words = packed.words.weight
    assert kvant.unpack(packed) == 1
    assert packed.head.weight is packed.words.weight is words
    assert torch.equal(words, plain.words.weight)


@torch.no_grad()
def test_writes_to_the_embedding_reach_the_layer() -> None:
    plain, packed = make_tied_pair()
    for model in (plain, packed):
        model.words.weight[3] = 2.0
    assert torch.equal(packed(TOKENS), plain(TOKENS))
    weight = packed.head.weight
    assert torch.equal(torch.add(weight, other=weight), 2 * plain.head.weight)
    copied = copy.deepcopy(packed)
    assert torch.equal(copied(TOKENS), plain(TOKENS))
    assert torch.equal(packed.head.weight.data, packed.words.weight)
    for model in (plain, copied):
        model.head.weight.mul_(2.0)
    assert torch.equal(copied(TOKENS), plain(TOKENS))
    copied = copy.deepcopy(packed)
    copied.words.weight.data = plain.words.weight.detach().clone()
    assert torch.equal(copied(TOKENS), plain(TOKENS))
    assert not torch.equal(copied(TOKENS), packed(TOKENS))


@torch.no_grad()
def test_state_dict_loads_into_a_tied_weight() -> None:
    other, (_, packed) = TiedModel(), make_tied_pair()
    packed.load_state_dict(other.state_dict())
    assert torch.equal(packed(TOKENS), other(TOKENS))
    assert isinstance(packed.head.weight, weights.PackedWeight) and packed.head.weight.is_current
    assert torch.equal(packed.words.weight, other.words.weight)


def test_tied_weight_is_listed_once() -> None:
    plain, packed = make_tied_pair()
    named = [[name for name, _ in weights.named_weights(model)] for model in (plain, packed)]
    assert named == [["words.weight"], ["words.weight"]]
    stored = [model.untyped_storage().data_ptr() for model in packed.state_dict().values()]
    assert len(stored) == 2 and len(set(stored)) == 1


@torch.no_grad()
def test_pickled_tied_weight_stays_tied() -> None:
    plain, packed = make_tied_pair()
    reloaded = pickle.loads(pickle.dumps(packed))
    assert reloaded.head.weight is reloaded.words.weight
    assert torch.equal(reloaded(TOKENS), plain(TOKENS))


class ScaledEmbedding(nn.Embedding):
    """An embedding with a scale, as in some families."""


def test_tied_weight_may_belong_to_several_embeddings_of_any_class() -> None:
    model = TiedModel()
    model.others = ScaledEmbedding(OUT, IN, _weight=model.words.weight)
    model.others.weight = model.words.weight
    assert kvant.pack(model, tied=True).layers == ("head",)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_created_in_inference_mode_pack(tied: bool) -> None:
    with torch.inference_mode():
        model: Any = TiedModel() if tied else Model()
        expected = model(TOKENS if tied else make_rows(2))
    packing = kvant.pack(model, tied=tied)
    assert packing.left == ({"head": "tied"} if tied else {})
    with torch.no_grad():
        assert torch.equal(model(TOKENS if tied else make_rows(2)), expected)


def test_tied_weight_gradient_sums_both_uses() -> None:
    grads = []
    for model in make_tied_pair():
        model(TOKENS).square().sum().backward()
        kvant.unpack(model)
        grads.append(model.words.weight.grad)
    assert grads[0] is not None and grads[1] is not None
    assert torch.allclose(grads[0].float(), grads[1].float(), rtol=2**-6)


def test_conversion_of_a_tied_weight_is_refused() -> None:
    plain, packed = make_tied_pair()
    with pytest.raises(CacheError, match=r"a conversion of a packed weight: call kvant.unpack"):
        packed.float()
    kvant.unpack(packed)
    packed.float()
    assert packed.head.weight is packed.words.weight
    with torch.no_grad():
        assert torch.equal(packed(TOKENS), plain.float()(TOKENS))


def test_weight_is_left_dense_if_bits_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another summation order changes one value in some thousand."""
    times, calls = PackedMatrix.multiply, []

    def other(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        out = times(matrix, x, bias)
        calls.append(x)
        if len(calls) == 40:
            out[0, 0] = out[0, 0].nextafter(torch.tensor(torch.inf).bfloat16())
        return out

    monkeypatch.setattr(PackedMatrix, "multiply", other)
    packing = kvant.pack(Model())
    assert (packing.layers, packing.left) == (("down",), {"up": "of other bits when packed"})


def test_tensors_without_an_address_are_skipped() -> None:
    model = Model()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert kvant.pack(model).layers == ("up", "down")


@pytest.mark.parametrize("inference", [False, True])
def test_trial_runs_like_a_forward_without_gradients(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients oneDNN uses other kernels, which may round differently."""
    calls, same = [], weights._gives_same_bits

    def record_trial(layer: nn.Linear, matrix: PackedMatrix) -> bool:
        calls.append(torch.is_grad_enabled())
        return same(layer, matrix)

    monkeypatch.setattr(weights, "_gives_same_bits", record_trial)
    with torch.inference_mode(inference):
        kvant.pack(Model())
    assert calls == [False, False]


def test_hooks_are_called_and_may_read_the_weight() -> None:
    plain, packed = make_model_pair()
    for model in (plain, packed):
        model.up.register_forward_hook(lambda module, args, out: out + module.weight[:, 0])
    with torch.no_grad():
        assert torch.equal(packed(make_rows(2)), plain(make_rows(2)))


def test_weight_packed_in_inference_mode_works_and_unpacks_outside() -> None:
    plain = Model()
    packed = copy.deepcopy(plain)
    with torch.inference_mode():
        kvant.pack(packed)
        assert torch.equal(packed(make_rows(2)), plain(make_rows(2)))
    assert torch.equal(packed(make_rows(2)), plain(make_rows(2)))
    with torch.inference_mode():
        kvant.unpack(packed)
    packed(make_rows(2)).sum().backward()
    assert packed.up.weight.grad is not None


def test_rows_of_another_dtype_are_refused_as_before() -> None:
    plain, packed = make_model_pair()
    messages = []
    for model in (plain, packed):
        with torch.no_grad(), pytest.raises(RuntimeError) as error:
            model(make_rows(2).float())
        messages.append(str(error.value))
    assert "dtype" in messages[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_autocast_computes_as_with_dense_weights(dtype: torch.dtype) -> None:
    plain, packed = make_model_pair()
    with torch.autocast("cpu", dtype=dtype):
        for x in (make_rows(2), make_rows(2).float()):
            out = packed(x)
            assert out.dtype == dtype and torch.equal(out, plain(x))


@torch.no_grad()
def test_a_transform_computes_with_dense_weights() -> None:
    plain, packed = make_model_pair()
    assert torch.equal(torch.vmap(packed)(make_rows(3, 2)), torch.vmap(plain)(make_rows(3, 2)))


# torch uses it internally
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@torch.no_grad()
def test_tangents_equal_those_of_dense_weights() -> None:
    tangents = []
    for model in make_model_pair():
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(make_rows(2), torch.ones(2, IN).bfloat16()))
            tangents.append(forward_ad.unpack_dual(out).tangent)
    assert torch.equal(*tangents)


@torch.no_grad()
def test_a_bias_of_another_class_is_not_read_by_address() -> None:
    class Bias(nn.Parameter):
        """A bias whose numbers have no known address."""

    plain, packed = make_model_pair()
    bias = Bias(plain.up.bias.detach())
    plain.up.bias = packed.up.bias = bias
    assert not packed.up.weight.matrix.find_kernel_k_block(make_rows(1), bias)  # type: ignore[union-attr]
    assert torch.equal(packed(make_rows(1)), plain(make_rows(1)))


BIASES: dict[str, Tensor] = {
    "every second": torch.randn(2 * OUT).bfloat16()[::2],
    "one for all": torch.randn(1).bfloat16().expand(OUT),
    "a single one": torch.randn(1).bfloat16(),
    "a number": torch.randn(()).bfloat16(),
    "a row": torch.randn(1, OUT).bfloat16(),
    "one a row": torch.randn(3, OUT).bfloat16(),
    "float32": torch.randn(OUT),
    "float16": torch.randn(OUT).half(),
    "int32": torch.ones(OUT, dtype=torch.int32),
    "too short": torch.randn(OUT // 2).bfloat16(),
    "too long": torch.randn(2 * OUT).bfloat16(),
    "a column": torch.randn(OUT, 1).bfloat16(),
    "meta": torch.randn(OUT, device="meta").bfloat16(),
}


@pytest.mark.parametrize("name", BIASES)
@torch.no_grad()
def test_bias_replaced_after_packing_is_added_or_refused_like_torch(name: str) -> None:
    """oneDNN reads as many adjacent numbers as there are outputs, whatever the bias is."""
    plain, packed = make_model_pair()
    plain.up.bias = packed.up.bias = nn.Parameter(BIASES[name], requires_grad=False)
    for x in (make_rows(3), make_rows(2, 3), make_rows(0)):
        try:
            expected = plain.up(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                packed.up(x)
        else:
            assert torch.equal(packed.up(x), expected)


def test_default_device_changes_nothing() -> None:
    plain, x = Model(), make_rows(1)
    packed = copy.deepcopy(plain)
    with torch.device("meta"):
        assert kvant.pack(packed).layers == ("up", "down")
        assert torch.equal(packed(x), plain(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it when it resumes
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_computes_the_same(backend: str) -> None:
    """Linear layers run outside of the compiled graph."""
    torch.compiler.reset()
    plain, packed = make_model_pair()
    compiled = torch.compile(packed, backend=backend)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            assert torch.equal(compiled(make_rows(2)), plain(make_rows(2)))


SCRIPT = """
import ctypes, json
import torch, kvant
from torch import nn
from kvant.bench.harness import read_resident_nbytes, reset_resident_peak

torch.set_num_threads(1)
SIZE, LAYERS = 2048, 16

def layer():
    return nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)

kvant.pack(layer())  # what the first takes for good
model = nn.Sequential(*(layer() for _ in range(LAYERS)))
before = reset_resident_peak()
packing = kvant.pack(model)
peak = read_resident_nbytes("VmHWM") - before
ctypes.CDLL(None).malloc_trim(0)
rest = read_resident_nbytes("VmRSS") - before
report = {"layers": len(packing.layers), "nbytes": packing.nbytes, "peak": peak, "rest": rest}
print(json.dumps(report))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no mark to set back")
def test_packing_makes_no_second_copy_of_the_model() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    report = json.loads(process.stdout)
    assert report["nbytes"] == report["layers"] * 2048 * 2048 * 2 == 16 * 8 * 2**20
    assert report["rest"] < report["nbytes"] / 32, report
    assert report["peak"] < report["nbytes"] / 2, report  # a few layers: freed memory is fragmented
