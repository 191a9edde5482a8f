"""Test the native rotation against torch, to the bit, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from frames.turned import dtypes, make_hard_rows, rotate_with_torch, to_bits
from isas import ISAS, load_or_skip
from kvant import native
from kvant.codecs.frames import Rotation
from kvant.native import NativeLibrary, can_rotate, get_library

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 240, 256)


@pytest.fixture(scope="module", params=ISAS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeLibrary:
    return load_or_skip(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def every_isa(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "get_library", lambda: library)


def assert_same_as_torch(x: Tensor, threads: tuple[int, ...] = (1,)) -> None:
    assert can_rotate(x)
    for act in (Rotation(3).transform_rows, Rotation(3).restore_outputs):
        theirs = rotate_with_torch(act, x)
        for count in threads:
            torch.set_num_threads(count)
            ours = act(x)
            torch.set_num_threads(1)
            assert ours.is_contiguous() and ours.dtype == x.dtype and ours.shape == x.shape
            assert torch.equal(to_bits(ours), to_bits(theirs))


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.usefixtures("every_isa")
def test_rows_equal_those_of_torch(dim: int, dtype: torch.dtype) -> None:
    x = make_hard_rows(dtype, dim)
    assert x[1, 2].count_nonzero() > 0
    assert_same_as_torch(x)
    assert_same_as_torch(x[:, :, 3:4])
    assert_same_as_torch(x[:, :, :0])
    wide_rows = torch.cat([x, x], -1)
    assert_same_as_torch(wide_rows[:, 1:, ::2, dim // 2 : dim // 2 + dim])
    assert_same_as_torch(x.transpose(1, 2))
    assert_same_as_torch(x[:, :1].expand(-1, 4, -1, -1))


@dtypes
@pytest.mark.usefixtures("every_isa")
def test_prompt_is_rotated_by_any_number_of_threads(dtype: torch.dtype) -> None:
    for dim, heads in ((128, 2), (80, 1)):
        assert_same_as_torch(
            torch.randn(1, 3000, heads, dim).to(dtype).transpose(1, 2), threads=(1, 2, 5)
        )


def test_unsupported_rows_are_left_to_torch() -> None:
    x = torch.randn(1, 2, 3, 64)
    assert can_rotate(x)
    unsupported = [
        x.double(),
        x[0],
        x[None],
        x[..., :20],
        x[..., ::2],
        x.to("meta"),
        x.requires_grad_(),
    ]
    unsupported += [torch.randn(1, 1, 1, 272), torch.nn.Parameter(x)]
    assert not any(can_rotate(other) for other in unsupported)
    with torch.no_grad():
        assert can_rotate(x)


def test_gradients_are_recorded_for_float32() -> None:
    x = torch.randn(1, 2, 3, 64, requires_grad=True)
    Rotation(1).restore_outputs(Rotation(1).transform_rows(x)).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.ones_like(x), atol=1e-5)


def test_tensors_without_storage_are_left_to_torch() -> None:
    x = torch.randn(1, 2, 3, 64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Rotation(11).transform_rows(mode.from_tensor(x))
        # its result has no storage that a kernel could write
        real = Rotation(11).transform_rows(x)
    assert type(fake) is type(real) is FakeTensor and fake.shape == real.shape == x.shape
    assert torch.allclose(
        Rotation(11).transform_rows(x), Rotation(11).transform_rows(x.double()).float(), atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_rotation_still_traces_to_one_graph() -> None:
    x = torch.randn(1, 2, 3, 64)
    compiled = torch.compile(Rotation(3).transform_rows, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), Rotation(3).transform_rows(x))
