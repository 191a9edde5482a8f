"""Packed weights: the same outputs to the bit, less work, no second copy; and all of it undone."""

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
from kvant import CacheError, weights
from kvant.packed_matrix import PackedMatrix
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


def rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, IN, generator=generator).bfloat16()


def twins() -> tuple[Model, Model]:
    """One as it is and one packed."""
    plain = Model()
    packed = copy.deepcopy(plain)
    assert kvant.pack(packed).layers == ("up", "down")
    return plain, packed


def is_packed(model: Model) -> bool:
    return all(isinstance(one.weight, weights.PackedWeight) for one in (model.up, model.down))


INPUTS: dict[str, Tensor] = {
    "one row": rows(1, 1),
    "no batch": rows(),
    "no row": rows(2, 0),
    "16 rows": rows(16),
    "500 rows": rows(1, 500),
    "four dimensions": rows(2, 3, 4),
    "every second row": rows(2, 8)[:, ::2],
    "the first row of each": rows(3, 8)[:, :1],
    "a part of a row": rows(2, 3, 2)[:, :, 0],
    "turned": rows(4, 5).transpose(0, 1),
    "one row for all": rows(1, 1).expand(2, 7, IN),
}


@pytest.mark.parametrize("name", INPUTS)
@torch.no_grad()
def test_outputs_are_the_same_to_the_bit(name: str) -> None:
    plain, packed = twins()
    assert torch.equal(packed(INPUTS[name]), plain(INPUTS[name]))


def test_linear_layers_read_packed_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = twins()
    made: list[Any] = []
    monkeypatch.setattr(weights, "_make_dense", made.append)
    with torch.no_grad():
        assert torch.equal(packed(rows(3)), plain(rows(3)))
    assert not made


def test_a_model_has_its_own_parameters_back_after_unpacking() -> None:
    model = Model()
    before = dict(model.named_parameters())
    bits = {name: one.detach().clone() for name, one in before.items()}
    kvant.pack(model)
    assert before["up.weight"].untyped_storage().nbytes() == 0
    assert kvant.unpack(model) == 2
    after = dict(model.named_parameters())
    assert all(after[name] is one and torch.equal(one, bits[name]) for name, one in before.items())
    assert kvant.unpack(model) == 0
    assert set(vars(model.up)) == set(vars(Model().up))


def test_packing_twice_is_packing_once() -> None:
    model = Model()
    first = kvant.pack(model)
    held = model.up.weight
    assert kvant.pack(model) == first
    assert model.up.weight is held
    assert str(first) == "2 linear layers packed, 48 KiB" and first.left == {}


def test_names_shapes_and_values_are_those_of_before() -> None:
    plain, packed = twins()
    given = packed.state_dict()
    assert list(given) == list(plain.state_dict())
    assert all(torch.equal(given[name], one) for name, one in plain.state_dict().items())
    assert all(type(one) is Tensor for one in given.values())
    for one, other in zip(plain.parameters(), packed.parameters(), strict=True):
        assert isinstance(other, nn.Parameter) and torch.equal(one, other)
        assert (one.shape, one.dtype, one.nbytes) == (other.shape, other.dtype, other.nbytes)
        assert one.requires_grad == other.requires_grad


def test_another_state_is_loaded_into_packed_layers() -> None:
    other, (_, packed) = Model(), twins()
    packed.load_state_dict(other.state_dict())
    assert is_packed(packed)
    with torch.no_grad():
        assert torch.equal(packed(rows(3)), other(rows(3)))
    kvant.unpack(packed)
    assert torch.equal(packed.up.weight, other.up.weight)


def test_a_state_is_written_to_files(tmp_path: Path) -> None:
    plain, packed = twins()
    save_file(packed.state_dict(), tmp_path / "one.safetensors")
    torch.save(packed.state_dict(), tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    assert torch.equal(found["up.weight"], plain.up.weight)


def test_a_copy_is_packed_and_independent() -> None:
    plain, packed = twins()
    copied = copy.deepcopy(packed)
    assert is_packed(copied)
    copied.load_state_dict(Model().state_dict())
    kvant.unpack(copied)
    assert is_packed(packed)
    kvant.unpack(packed)
    assert torch.equal(packed.up.weight, plain.up.weight)


def test_a_pickled_model_is_dense() -> None:
    plain, packed = twins()
    again = pickle.loads(pickle.dumps(packed))
    assert type(again.up.weight) is nn.Parameter
    assert torch.equal(again.up.weight, plain.up.weight)


@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.half, lambda one: one.to("meta")])
def test_a_conversion_unpacks(convert: Callable[[nn.Module], nn.Module]) -> None:
    plain, packed = twins()
    convert(packed)
    convert(plain)
    assert (
        type(packed.up.weight) is nn.Parameter and packed.up.weight.dtype == plain.up.weight.dtype
    )
    assert packed.up.weight.is_meta or torch.equal(packed.up.weight, plain.up.weight)


def test_a_conversion_to_what_it_is_leaves_it_packed() -> None:
    _, packed = twins()
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
    plain, packed = twins()
    with pytest.raises(CacheError, match=r"kvant\.unpack\(model\) first"):
        WRITES[name](packed.up.weight)
    assert torch.equal(packed(rows(2)), plain(rows(2)))


@torch.no_grad()
def test_a_packed_weight_is_written_into_others() -> None:
    plain, packed = twins()
    mean = torch.zeros(OUT, IN, dtype=torch.bfloat16)
    mean.add_(packed.up.weight).mul_(packed.up.weight)
    assert torch.equal(mean, plain.up.weight * plain.up.weight)


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_dense_weights(training: bool) -> None:
    found = []
    for model in twins():
        x = rows(3).requires_grad_()
        model.train(training)(x).square().sum().backward()
        kvant.unpack(model)
        found.append([x.grad, *(one.grad for one in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and torch.equal(one, other)


def test_an_optimizer_from_before_trains_the_unpacked_model() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(rows(3)).sum().backward()
    kvant.pack(model)
    kvant.unpack(model)
    before = model.up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.up.weight, before)


class Tied(nn.Module):
    """Words, and a layer that says how likely each is, by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(OUT, IN, dtype=torch.bfloat16)
        self.head = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(tokens))
        return out


TOKENS = torch.arange(7)


def tied_twins() -> tuple[Tied, Tied]:
    plain = Tied()
    packed = copy.deepcopy(plain)
    told = kvant.pack(packed, tied=True)
    assert str(told) == "1 linear layer packed, 24 KiB, 24 KiB of it beside an embedding"
    return plain, packed


@torch.no_grad()
def test_a_tied_weight_is_packed_beside_its_embedding() -> None:
    plain, packed = tied_twins()
    assert isinstance(packed.head.weight, weights.PackedWeight)
    assert torch.equal(packed(TOKENS), plain(TOKENS))
    words = packed.words.weight
    assert kvant.unpack(packed) == 1
    assert packed.head.weight is packed.words.weight is words
    assert torch.equal(words, plain.words.weight)


@torch.no_grad()
def test_what_is_written_to_the_embedding_is_what_the_layer_reads() -> None:
    plain, packed = tied_twins()
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
def test_another_state_is_loaded_into_a_tied_weight() -> None:
    other, (_, packed) = Tied(), tied_twins()
    packed.load_state_dict(other.state_dict())
    assert torch.equal(packed(TOKENS), other(TOKENS))
    assert isinstance(packed.head.weight, weights.PackedWeight) and packed.head.weight.is_current
    assert torch.equal(packed.words.weight, other.words.weight)


def test_a_tied_weight_is_one_weight_to_those_who_name_it() -> None:
    plain, packed = tied_twins()
    named = [[name for name, _ in weights.named_weights(one)] for one in (plain, packed)]
    assert named == [["words.weight"], ["words.weight"]]
    stored = [one.untyped_storage().data_ptr() for one in packed.state_dict().values()]
    assert len(stored) == 2 and len(set(stored)) == 1


@torch.no_grad()
def test_a_pickled_tied_weight_is_still_one() -> None:
    plain, packed = tied_twins()
    again = pickle.loads(pickle.dumps(packed))
    assert again.head.weight is again.words.weight
    assert torch.equal(again(TOKENS), plain(TOKENS))


class Scaled(nn.Embedding):
    """As those of some families."""


def test_a_tied_weight_may_be_of_several_embeddings_of_any_class() -> None:
    model = Tied()
    model.others = Scaled(OUT, IN, _weight=model.words.weight)
    model.others.weight = model.words.weight
    assert kvant.pack(model, tied=True).layers == ("head",)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_were_made_in_inference_mode(tied: bool) -> None:
    with torch.inference_mode():
        model: Any = Tied() if tied else Model()
        expected = model(TOKENS if tied else rows(2))
    told = kvant.pack(model, tied=tied)
    assert told.left == ({"head": "tied"} if tied else {})
    with torch.no_grad():
        assert torch.equal(model(TOKENS if tied else rows(2)), expected)


def test_gradients_of_a_tied_weight_are_those_of_both_its_uses() -> None:
    found = []
    for model in tied_twins():
        model(TOKENS).square().sum().backward()
        kvant.unpack(model)
        found.append(model.words.weight.grad)
    assert found[0] is not None and found[1] is not None
    assert torch.allclose(found[0].float(), found[1].float(), rtol=2**-6)


def test_a_conversion_of_a_tied_weight_is_refused() -> None:
    plain, packed = tied_twins()
    with pytest.raises(CacheError, match=r"a conversion of a packed weight: kvant.unpack"):
        packed.float()
    kvant.unpack(packed)
    packed.float()
    assert packed.head.weight is packed.words.weight
    with torch.no_grad():
        assert torch.equal(packed(TOKENS), plain.float()(TOKENS))


def test_nothing_is_packed_whose_bits_would_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One value in some thousand, as another order of sums gives it."""
    times, calls = PackedMatrix.multiply, []

    def other(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        out = times(matrix, x, bias)
        calls.append(x)
        if len(calls) == 40:
            out[0, 0] = out[0, 0].nextafter(torch.tensor(torch.inf).bfloat16())
        return out

    monkeypatch.setattr(PackedMatrix, "multiply", other)
    told = kvant.pack(Model())
    assert (told.layers, told.left) == (("down",), {"up": "of other bits when packed"})


def test_tensors_without_an_address_are_passed_over() -> None:
    model = Model()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert kvant.pack(model).layers == ("up", "down")


@pytest.mark.parametrize("inference", [False, True])
def test_a_trial_computes_as_a_forward_without_gradients_does(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them oneDNN takes other kernels, which may round otherwise."""
    made, same = [], weights._gives_same_bits

    def watched(layer: nn.Linear, matrix: PackedMatrix) -> bool:
        made.append(torch.is_grad_enabled())
        return same(layer, matrix)

    monkeypatch.setattr(weights, "_gives_same_bits", watched)
    with torch.inference_mode(inference):
        kvant.pack(Model())
    assert made == [False, False]


def test_hooks_are_called_and_may_read_the_weight() -> None:
    plain, packed = twins()
    for model in (plain, packed):
        model.up.register_forward_hook(lambda module, given, out: out + module.weight[:, 0])
    with torch.no_grad():
        assert torch.equal(packed(rows(2)), plain(rows(2)))


def test_what_is_packed_in_inference_mode_is_used_and_unpacked_outside() -> None:
    plain = Model()
    packed = copy.deepcopy(plain)
    with torch.inference_mode():
        kvant.pack(packed)
        assert torch.equal(packed(rows(2)), plain(rows(2)))
    assert torch.equal(packed(rows(2)), plain(rows(2)))
    with torch.inference_mode():
        kvant.unpack(packed)
    packed(rows(2)).sum().backward()
    assert packed.up.weight.grad is not None


def test_rows_of_another_dtype_are_refused_as_ever() -> None:
    plain, packed = twins()
    said = []
    for model in (plain, packed):
        with torch.no_grad(), pytest.raises(RuntimeError) as error:
            model(rows(2).float())
        said.append(str(error.value))
    assert "dtype" in said[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_autocast_computes_as_with_dense_weights(dtype: torch.dtype) -> None:
    plain, packed = twins()
    with torch.autocast("cpu", dtype=dtype):
        for x in (rows(2), rows(2).float()):
            out = packed(x)
            assert out.dtype == dtype and torch.equal(out, plain(x))


@torch.no_grad()
def test_a_transform_computes_with_dense_weights() -> None:
    plain, packed = twins()
    assert torch.equal(torch.vmap(packed)(rows(3, 2)), torch.vmap(plain)(rows(3, 2)))


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated"
)  # of what torch makes it with
@torch.no_grad()
def test_tangents_are_those_of_dense_weights() -> None:
    found = []
    for model in twins():
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(rows(2), torch.ones(2, IN).bfloat16()))
            found.append(forward_ad.unpack_dual(out).tangent)
    assert torch.equal(*found)


@torch.no_grad()
def test_a_bias_of_another_class_is_not_read_by_address() -> None:
    class Bias(nn.Parameter):
        """Nobody knows where its numbers lie."""

    plain, packed = twins()
    bias = Bias(plain.up.bias.detach())
    plain.up.bias = packed.up.bias = bias
    assert not packed.up.weight.matrix.find_kernel_k_block(rows(1), bias)  # type: ignore[union-attr]
    assert torch.equal(packed(rows(1)), plain(rows(1)))


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
def test_another_bias_behind_a_pack_is_added_or_refused_as_torch_does(name: str) -> None:
    """oneDNN reads as many numbers as there are outputs, one behind the other, whatever it gets."""
    plain, packed = twins()
    plain.up.bias = packed.up.bias = nn.Parameter(BIASES[name], requires_grad=False)
    for x in (rows(3), rows(2, 3), rows(0)):
        try:
            expected = plain.up(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                packed.up(x)
        else:
            assert torch.equal(packed.up(x), expected)


def test_another_default_device_changes_nothing() -> None:
    plain, x = Model(), rows(1)
    packed = copy.deepcopy(plain)
    with torch.device("meta"):
        assert kvant.pack(packed).layers == ("up", "down")
        assert torch.equal(packed(x), plain(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it where it resumes
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_computes_the_same(backend: str) -> None:
    """Linear layers are beside what is compiled."""
    torch.compiler.reset()
    plain, packed = twins()
    compiled = torch.compile(packed, backend=backend)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            assert torch.equal(compiled(rows(2)), plain(rows(2)))


SCRIPT = """
import ctypes, json
import torch, kvant
from torch import nn
from kvant.bench.clock import read_resident_nbytes, reset_resident_peak

torch.set_num_threads(1)
SIZE, LAYERS = 2048, 16

def layer():
    return nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)

kvant.pack(layer())  # what the first takes for good
model = nn.Sequential(*(layer() for _ in range(LAYERS)))
before = reset_resident_peak()
told = kvant.pack(model)
peak = read_resident_nbytes("VmHWM") - before
ctypes.CDLL(None).malloc_trim(0)
rest = read_resident_nbytes("VmRSS") - before
print(json.dumps({"layers": len(told.layers), "nbytes": told.nbytes, "peak": peak, "rest": rest}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no mark to set back")
def test_no_second_copy_is_made_of_the_model() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert told["nbytes"] == told["layers"] * 2048 * 2048 * 2 == 16 * 8 * 2**20
    assert told["rest"] < told["nbytes"] / 32, told
    assert told["peak"] < told["nbytes"] / 2, told  # a few layers: what was freed lies in pieces
