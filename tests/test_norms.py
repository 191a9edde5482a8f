"""Test fused norms: the bits of the model's operators, wherever those would compute."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import kvant
from isas import ISAS, load_or_skip
from kvant.native import get_library
from kvant.weights import norms

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
DIM = 128


def make_norm(
    norm_class: type[nn.Module] = LlamaRMSNorm, dim: int = DIM, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    norm = norm_class(dim, eps=1e-5).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(dim, generator=generator))
    return norm


def fuse_norm(norm: nn.Module) -> nn.Module:
    """Replace the norm and return it."""
    assert kvant.pack(norm).norms == 1 and norms.is_fused(norm)
    return norm


def make_rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (10 * torch.randn(*shape, generator=generator)).to(dtype)


def to_bits(x: Tensor) -> list[int]:
    bits: list[int] = x.detach().contiguous().view(torch.int16).flatten().tolist()
    return bits


@pytest.mark.parametrize("norm_class", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 96, 128, 1024, 2560, 8192, 16384, 32768])
@torch.no_grad()
def test_outputs_are_bit_identical(
    norm_class: type[nn.Module], dtype: torch.dtype, dim: int
) -> None:
    norm = make_norm(norm_class, dim, dtype)
    inputs = [make_rows(1, count, dim, dtype=dtype) for count in (1, 3, 70)]
    inputs.append(torch.full((1, 2, dim), 6e4).to(dtype))  # the mean of squares exceeds float16
    inputs.append(1e-3 * inputs[0])  # eps matters
    plain = [norm(x) for x in inputs]
    fuse_norm(norm)
    assert [to_bits(norm(x)) for x in inputs] == [to_bits(x) for x in plain]


@torch.no_grad()
def test_rows_split_over_threads_are_bit_identical(two_threads: None) -> None:
    norm, x = make_norm(dim=1024), make_rows(500, 1024)
    plain = norm(x)
    assert to_bits(fuse_norm(norm)(x)) == to_bits(plain)


@pytest.mark.parametrize("isa", ISAS)
@torch.no_grad()
def test_every_instruction_set_gives_the_same_bits(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_or_skip(isa, tmp_path)
    monkeypatch.setattr("kvant.native.get_library", lambda: library)
    for dtype in (torch.bfloat16, torch.float16):
        norm, x = make_norm(dim=8192, dtype=dtype), make_rows(1, 30, 8192, dtype=dtype)
        plain = norm(x)
        assert to_bits(fuse_norm(norm)(x)) == to_bits(plain)


@pytest.mark.parametrize("norm_class", [GemmaRMSNorm, Olmo2RMSNorm, nn.RMSNorm, nn.LayerNorm])
def test_norm_with_another_formula_is_not_replaced(norm_class: type[nn.Module]) -> None:
    norm = make_norm(norm_class)
    assert kvant.pack(norm).norms == 0 and not norms.is_fused(norm)


@pytest.mark.parametrize("norm_class", [GemmaRMSNorm, nn.RMSNorm])
def test_norm_is_not_replaced_under_autocast(norm_class: type[nn.Module]) -> None:
    with torch.autocast("cpu"):
        assert kvant.pack(make_norm(norm_class)).norms == 0


class ScaledNorm(LlamaRMSNorm):
    """A norm that multiplies before it rounds: equal while the weight is ones."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


def test_unit_weights_do_not_hide_another_formula() -> None:
    assert kvant.pack(ScaledNorm(DIM).bfloat16()).norms == 0


class ReversedSumNorm(LlamaRMSNorm):
    """A norm that adds squares in another order, which few 16-bit numbers reveal."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.flip(-1)).flip(-1)


def test_another_summation_order_is_detected() -> None:
    norm = ReversedSumNorm(DIM).bfloat16()
    assert kvant.pack(norm).norms == 0


@torch.no_grad()
def test_gated_norm_is_not_replaced() -> None:
    norm, x = BambaRMSNormGated(DIM, DIM).bfloat16(), make_rows(2, DIM)
    plain = norm(x), norm(x, x)
    assert kvant.pack(norm).norms == 0
    assert torch.equal(norm(x), plain[0]) and torch.equal(norm(x, x), plain[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_not_replaced(dtype: torch.dtype) -> None:
    assert kvant.pack(make_norm(dtype=dtype)).norms == 0


@pytest.mark.parametrize("dim", [24, 32768 + 32])
def test_other_widths_are_not_replaced(dim: int) -> None:
    assert kvant.pack(make_norm(dim=dim)).norms == 0


OTHERWISE = {
    "turned": make_rows(DIM, 3).T,
    "every second": make_rows(2, 8, DIM)[:, ::2],
    "float32": make_rows(2, DIM).float(),
    "no row": make_rows(0, DIM),
    "one row": make_rows(DIM),
}


@pytest.mark.parametrize("name", OTHERWISE)
@torch.no_grad()
def test_strided_rows_use_the_original_norm(name: str) -> None:
    norm, x = make_norm(), OTHERWISE[name]
    plain = norm(x)
    out = fuse_norm(norm)(x)
    assert out.dtype == plain.dtype and torch.equal(out, plain)


def test_gradients_are_unchanged() -> None:
    norm, x = make_norm(), make_rows(3, DIM).requires_grad_()
    norm(x).sum().backward()
    before = x.grad, norm.weight.grad
    fuse_norm(norm)
    x.grad = norm.weight.grad = None
    norm(x).sum().backward()
    assert torch.equal(x.grad, before[0]) and torch.equal(norm.weight.grad, before[1])


@torch.no_grad()
def test_weight_writes_apply() -> None:
    norm, x = make_norm(), make_rows(3, DIM)
    other = copy.deepcopy(norm)
    fuse_norm(norm)
    for norm_ in (norm, other):
        norm_.weight.mul_(3)
        norm_.variance_epsilon = 0.5
    assert torch.equal(norm(x), other(x))
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(norm.to(dtype)(x.to(dtype)), other.to(dtype)(x.to(dtype)))


@torch.no_grad()
def test_replaced_weight_applies() -> None:
    norm, x = fuse_norm(make_norm()), make_rows(3, 24)
    norm.weight = nn.Parameter(torch.full((24,), 2.0).bfloat16())
    assert torch.equal(norm(x), type(norm).forward(norm, x))
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert torch.equal(norm(x), type(norm).forward(norm, x))


@torch.no_grad()
def test_signature_is_unchanged() -> None:
    norm, x = make_norm(), make_rows(3, DIM)
    plain = norm(x)
    assert torch.equal(fuse_norm(norm)(hidden_states=x), plain)
    with pytest.raises(TypeError, match="positional"):
        norm(x, x)


@torch.no_grad()
def test_transforms_and_compilers_see_operators() -> None:
    norm, x = make_norm(), make_rows(4, DIM)
    plain = norm(x)
    fuse_norm(norm)
    assert torch.equal(torch.vmap(norm)(x), plain)
    with pytest.warns(DeprecationWarning, match="trace"):
        script = torch.jit.trace(norm, x)
    assert torch.equal(script(x + 1), norm(x + 1))
    assert torch.equal(torch.compile(norm, backend="eager")(x), plain)
    traced = torch.fx.experimental.proxy_tensor.make_fx(norm)(x)
    assert torch.equal(traced(x), plain)


def test_hooks_are_called() -> None:
    norm, calls = fuse_norm(make_norm()), []
    norm.register_forward_hook(lambda *args: calls.append(args[2].shape))
    with torch.no_grad():
        norm(make_rows(3, DIM))
    assert calls == [(3, DIM)]


def test_patched_forward_is_left_alone() -> None:
    norm = make_norm()
    norm.forward = theirs = lambda x: x  # type: ignore[method-assign]
    assert kvant.pack(norm).norms == 0
    kvant.unpack(norm)
    assert norm.forward is theirs


def test_unpacking_leaves_no_trace() -> None:
    norm = make_norm()
    before = set(vars(norm))
    assert kvant.pack(norm) == kvant.pack(norm)
    assert "norms fused: 1" in str(kvant.pack(norm))
    kvant.unpack(norm)
    assert set(vars(norm)) == before


@torch.no_grad()
def test_copy_has_its_own_weight() -> None:
    norm, x = fuse_norm(make_norm()), make_rows(2, DIM)
    copied = copy.deepcopy(norm)
    plain = norm(x)
    norm.weight.zero_()
    assert norms.is_fused(copied) and torch.equal(copied(x), plain)


def test_pickled_norm_needs_no_kvant(tmp_path: Path) -> None:
    norm, x = fuse_norm(make_norm()), make_rows(2, DIM)
    with torch.no_grad():
        plain = norm(x)
    fuse_norm(pickle.loads(pickle.dumps(norm)))
    assert b"kvant" not in pickle.dumps(norm)
    (tmp_path / "norm").write_bytes(pickle.dumps((norm, x, plain)))
    code = (
        "import pickle, sys, torch; norm, x, plain = pickle.load(open(sys.argv[1], 'rb'));"
        "assert torch.equal(norm(x), plain) and 'kvant' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "norm")], check=True)
