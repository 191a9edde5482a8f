"""Forwards that are recorded and done again: they give the same bits, in memory used again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kvant
from kvant.capture import Capture, ReplayBuffers, capture_forward
from kvant.codecs.frames import Rotation, hadamard
from kvant.errors import UnsupportedView
from kvant.native import (
    DTYPE_CODES,
    NativeRequest,
    capture_requests,
    check_refusal,
    compile_requests,
    get_library,
    map_elements,
    norm_rows,
)

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
SHAPES = ((3,), (2, 5), (1, 16), (2, 3, 4, 48), (4, 1, 3, 65))


def odd(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of every size, with some that end a range."""
    x = torch.randn(shape) * torch.tensor(10.0) ** torch.randint(-42, 38, shape)
    flat = x.reshape(-1)
    for at, value in enumerate((0.0, -0.0, float("inf"), 1e-40, -65504.0)):
        flat[at % flat.numel()] = value
    return x.to(dtype)


def equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, but for which NaN it is."""
    nan = one.isnan() & other.isnan()
    ints = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return bool((nan | (one.contiguous().view(ints) == other.contiguous().view(ints))).all())


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_one_by_one_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = odd(shape, dtype), odd(shape, dtype)
    narrow = odd((*shape[:-1], 1), dtype).expand(shape)
    cases: list[tuple[str, Tensor, Tensor | None, Tensor]] = [
        ("copy", a, None, a),
        ("negate", a, None, -a),
        ("add", a, b, a + b),
        ("multiply", a, b, a * b),
        ("multiply", narrow, b, narrow * b),
        ("add", a.flip(-1), narrow, a.flip(-1) + narrow),
    ]
    if len(shape) > 1:
        turned = b.transpose(0, -1).contiguous().transpose(0, -1)
        cases.append(("add", a, turned, a + turned))
    for operation, x, y, expected in cases:
        wide = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)
        for out in (torch.zeros(shape, dtype=dtype), wide[..., ::2]):
            map_elements(operation, out, x, y)
            assert equal(out, expected), operation


def test_a_function_of_16_bits_is_looked_up() -> None:
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    table, out = functional.silu(every), torch.zeros(2**16, dtype=torch.bfloat16)
    map_elements("look_up", out, every, table)
    assert equal(out, table)


def test_a_program_is_done_as_often_as_it_is_called() -> None:
    x, weight, asked = torch.randn(1, 64), torch.ones(64), list[NativeRequest]()
    with capture_requests(asked.append):
        out = norm_rows(x, weight, 1e-6)
        map_elements("add", x, x, out)
    again, other = compile_requests(asked), torch.randn(1, 64)
    x.copy_(other)
    check_refusal(again())
    assert torch.equal(x, other + norm_rows(other, weight, 1e-6))


def test_what_a_step_refuses_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="shape: below zero"):
        check_refusal(compile_requests([("map", b"\xff" * 200, ())])())
    with pytest.raises(RuntimeError, match="request: less than"):
        check_refusal(compile_requests([("map", b"", ())])())


class Layer(nn.Module):
    """What a layer of a model does with a token, but for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(96, 160, bias=False), nn.Linear(96, 160)
        self.down = nn.Linear(160, 96)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.cat((-x[..., 48:], x[..., :48]), -1)
        x = x * 2 + half.sigmoid() * x.softmax(-1)
        out = self.down(functional.silu(self.gate(x)) * self.up(x))
        out = out.view(*out.shape[:-1], 4, 24).transpose(1, 2).reshape(*out.shape)
        out += x
        return out.to(torch.float32).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_forward_that_is_done_again_gives_what_it_gives(dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(4))).to(dtype)
    if packed:
        kvant.pack(layers)
    x = torch.randn(2, 3, 96).to(dtype)
    with torch.no_grad():
        layers(x)  # what is tried once, is
        again = capture_forward(layers, x)
        for _ in range(3):
            x.copy_(torch.randn(2, 3, 96))
            expected = layers(x.clone())
            gc.collect()
            assert equal(again(x), expected)


def test_memory_is_used_again_once_nobody_looks_at_it() -> None:
    layers = nn.Sequential(*(Layer() for _ in range(20))).bfloat16()
    x = torch.randn(1, 1, 96).bfloat16()
    recording = Capture((x,), ReplayBuffers())
    with torch.no_grad(), recording, capture_requests(recording.add_request):
        layers(x)
    assert len(recording._buffers._by_storage) < 30 < len(recording._steps)


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.tolist()[0],
        lambda x: x * float(x.numpy()[0]),
        lambda x: x * float(np.asarray(x)[0]),
    ],
)
def test_a_forward_that_asks_for_a_value_is_refused(asks: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedView, match="asks for the value"):
        capture_forward(asks, torch.randn(4))


def test_a_result_that_an_operator_gives_otherwise_is_not_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a table says is held against what came: else the operator is called."""
    wrong = torch.zeros(2**16, dtype=torch.bfloat16)
    monkeypatch.setattr("kvant.capture._tabulate_results", lambda *given: wrong)
    x = torch.randn(5).bfloat16()
    again = capture_forward(functional.silu, x)
    x.copy_(torch.randn(5))
    assert torch.equal(again(x), functional.silu(x))


def test_a_constant_that_is_written_to_is_made_anew() -> None:
    def forward(x: Tensor) -> Tensor:
        total = torch.tensor([1.0, 2.0])
        total += x
        return total * 2

    x = torch.tensor([3.0, 4.0])
    again = capture_forward(forward, x)
    for _ in range(3):
        assert torch.equal(again(x), torch.tensor([8.0, 12.0]))


def test_parts_of_two_dtypes_are_put_together_by_the_operator() -> None:
    one, other = torch.ones(4).bfloat16(), torch.ones(4)
    again = capture_forward(lambda x, y: torch.cat((x, y.half(), x)), one, other)
    other.fill_(3)
    assert torch.equal(again(one, other)[4:8], torch.full((4,), 3.0).to(again.out.dtype))


def test_what_a_request_points_to_is_kept() -> None:
    """The signs of a rotation are in a cache of some size only."""
    x = torch.randn(1, 1, 1, 32)
    again = capture_forward(lambda x: Rotation(5).transform_rows(x), x)
    expected = Rotation(5).transform_rows(x)
    hadamard._make_native_signs.cache_clear()
    gc.collect()
    assert torch.equal(again(x), expected)


def test_calls_of_another_thread_are_not_heard() -> None:
    from threading import Thread

    asked = list[str]()
    with capture_requests(lambda one: asked.append(one[0])):
        other = Thread(target=norm_rows, args=(torch.randn(1, 64), torch.ones(64), 1e-6))
        other.start()
        other.join()
        norm_rows(torch.randn(1, 64), torch.ones(64), 1e-6)
    assert asked == ["norm"]
