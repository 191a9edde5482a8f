"""Norms in one pass: the bits of the operators of a model, wherever those would compute."""

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
from isas import ISAS, loaded_for
from kvant import norms
from kvant.native import get_library

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
DIM = 128


def made(
    kind: type[nn.Module] = LlamaRMSNorm, dim: int = DIM, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    norm = kind(dim, eps=1e-5).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(dim, generator=generator))
    return norm


def fused(norm: nn.Module) -> nn.Module:
    """It, which is so from now on."""
    assert kvant.pack(norm).norms == 1 and norms.is_fused(norm)
    return norm


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (10 * torch.randn(*shape, generator=generator)).to(dtype)


def bits(x: Tensor) -> list[int]:
    found: list[int] = x.detach().contiguous().view(torch.int16).flatten().tolist()
    return found


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 96, 128, 1024, 2560, 8192, 16384, 32768])
@torch.no_grad()
def test_outputs_are_the_same_to_the_bit(
    kind: type[nn.Module], dtype: torch.dtype, dim: int
) -> None:
    norm = made(kind, dim, dtype)
    given = [rows(1, count, dim, dtype=dtype) for count in (1, 3, 70)]
    given.append(torch.full((1, 2, dim), 6e4).to(dtype))  # the mean of squares is beyond float16
    given.append(1e-3 * given[0])  # eps counts
    plain = [norm(x) for x in given]
    fused(norm)
    assert [bits(norm(x)) for x in given] == [bits(x) for x in plain]


@torch.no_grad()
def test_rows_that_threads_share_are_the_same(threads: None) -> None:
    norm, x = made(dim=1024), rows(500, 1024)
    plain = norm(x)
    assert bits(fused(norm)(x)) == bits(plain)


@pytest.mark.parametrize("isa", ISAS)
@torch.no_grad()
def test_every_instruction_set_gives_the_same(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = loaded_for(isa, tmp_path)
    monkeypatch.setattr("kvant.native.get_library", lambda: found)
    for dtype in (torch.bfloat16, torch.float16):
        norm, x = made(dim=8192, dtype=dtype), rows(1, 30, 8192, dtype=dtype)
        plain = norm(x)
        assert bits(fused(norm)(x)) == bits(plain)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, Olmo2RMSNorm, nn.RMSNorm, nn.LayerNorm])
def test_a_norm_of_another_formula_is_left(kind: type[nn.Module]) -> None:
    norm = made(kind)
    assert kvant.pack(norm).norms == 0 and not norms.is_fused(norm)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, nn.RMSNorm])
def test_it_is_left_within_autocast_too(kind: type[nn.Module]) -> None:
    with torch.autocast("cpu"):
        assert kvant.pack(made(kind)).norms == 0


class Scaled(LlamaRMSNorm):
    """Multiplies before it rounds: the same while the weight is ones."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


def test_ones_do_not_hide_another_formula() -> None:
    assert kvant.pack(Scaled(DIM).bfloat16()).norms == 0


class Backwards(LlamaRMSNorm):
    """Adds the squares in another order, which few numbers of 16 bits show."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.flip(-1)).flip(-1)


def test_another_order_of_sums_is_seen() -> None:
    norm = Backwards(DIM).bfloat16()
    assert kvant.pack(norm).norms == 0


@torch.no_grad()
def test_a_norm_that_takes_a_gate_is_left() -> None:
    norm, x = BambaRMSNormGated(DIM, DIM).bfloat16(), rows(2, DIM)
    plain = norm(x), norm(x, x)
    assert kvant.pack(norm).norms == 0
    assert torch.equal(norm(x), plain[0]) and torch.equal(norm(x, x), plain[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left(dtype: torch.dtype) -> None:
    assert kvant.pack(made(dtype=dtype)).norms == 0


@pytest.mark.parametrize("dim", [24, 32768 + 32])
def test_other_widths_are_left(dim: int) -> None:
    assert kvant.pack(made(dim=dim)).norms == 0


OTHERWISE = {
    "turned": rows(DIM, 3).T,
    "every second": rows(2, 8, DIM)[:, ::2],
    "float32": rows(2, DIM).float(),
    "no row": rows(0, DIM),
    "one row": rows(DIM),
}


@pytest.mark.parametrize("name", OTHERWISE)
@torch.no_grad()
def test_rows_that_lie_otherwise_are_normed_as_before(name: str) -> None:
    norm, x = made(), OTHERWISE[name]
    plain = norm(x)
    out = fused(norm)(x)
    assert out.dtype == plain.dtype and torch.equal(out, plain)


def test_gradients_are_those_of_before() -> None:
    norm, x = made(), rows(3, DIM).requires_grad_()
    norm(x).sum().backward()
    before = x.grad, norm.weight.grad
    fused(norm)
    x.grad = norm.weight.grad = None
    norm(x).sum().backward()
    assert torch.equal(x.grad, before[0]) and torch.equal(norm.weight.grad, before[1])


@torch.no_grad()
def test_what_is_written_to_the_weight_counts() -> None:
    norm, x = made(), rows(3, DIM)
    other = copy.deepcopy(norm)
    fused(norm)
    for one in (norm, other):
        one.weight.mul_(3)
        one.variance_epsilon = 0.5
    assert torch.equal(norm(x), other(x))
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(norm.to(dtype)(x.to(dtype)), other.to(dtype)(x.to(dtype)))


@torch.no_grad()
def test_a_weight_that_is_another_one_counts() -> None:
    norm, x = fused(made()), rows(3, 24)
    norm.weight = nn.Parameter(torch.full((24,), 2.0).bfloat16())
    assert torch.equal(norm(x), type(norm).forward(norm, x))
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert torch.equal(norm(x), type(norm).forward(norm, x))


@torch.no_grad()
def test_it_takes_what_it_took() -> None:
    norm, x = made(), rows(3, DIM)
    plain = norm(x)
    assert torch.equal(fused(norm)(hidden_states=x), plain)
    with pytest.raises(TypeError, match="positional"):
        norm(x, x)


@torch.no_grad()
def test_transforms_and_compilers_see_operators() -> None:
    norm, x = made(), rows(4, DIM)
    plain = norm(x)
    fused(norm)
    assert torch.equal(torch.vmap(norm)(x), plain)
    with pytest.warns(DeprecationWarning, match="trace"):
        script = torch.jit.trace(norm, x)
    assert torch.equal(script(x + 1), norm(x + 1))
    assert torch.equal(torch.compile(norm, backend="eager")(x), plain)
    traced = torch.fx.experimental.proxy_tensor.make_fx(norm)(x)
    assert torch.equal(traced(x), plain)


def test_hooks_are_called() -> None:
    norm, seen = fused(made()), []
    norm.register_forward_hook(lambda *args: seen.append(args[2].shape))
    with torch.no_grad():
        norm(rows(3, DIM))
    assert seen == [(3, DIM)]


def test_a_forward_of_somebody_else_stays() -> None:
    norm = made()
    norm.forward = theirs = lambda x: x  # type: ignore[method-assign]
    assert kvant.pack(norm).norms == 0
    kvant.unpack(norm)
    assert norm.forward is theirs


def test_unpacking_leaves_nothing() -> None:
    norm = made()
    before = set(vars(norm))
    assert kvant.pack(norm) == kvant.pack(norm)
    assert "norms fused: 1" in str(kvant.pack(norm))
    kvant.unpack(norm)
    assert set(vars(norm)) == before


@torch.no_grad()
def test_a_copy_has_its_own_weight() -> None:
    norm, x = fused(made()), rows(2, DIM)
    copied = copy.deepcopy(norm)
    plain = norm(x)
    norm.weight.zero_()
    assert norms.is_fused(copied) and torch.equal(copied(x), plain)


def test_a_pickled_one_needs_no_kvant(tmp_path: Path) -> None:
    norm, x = fused(made()), rows(2, DIM)
    with torch.no_grad():
        plain = norm(x)
    fused(pickle.loads(pickle.dumps(norm)))
    assert b"kvant" not in pickle.dumps(norm)
    (tmp_path / "norm").write_bytes(pickle.dumps((norm, x, plain)))
    code = (
        "import pickle, sys, torch; norm, x, plain = pickle.load(open(sys.argv[1], 'rb'));"
        "assert torch.equal(norm(x), plain) and 'kvant' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "norm")], check=True)
