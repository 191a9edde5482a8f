"""Test the cache as a value against lists of tokens and attention without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import kvant
from kvant.functional import State, cached_attention, get, init, reset, seq_length, update

B, H, D = 2, 2, 4
WIDE = torch.float64


def make_state(layers: int = 1, dtype: torch.dtype = torch.float32, limit: int = 2048) -> State:
    return init(
        batch_size=B, num_layers=layers, num_heads=H, head_dim=D, max_seq_len=limit, dtype=dtype
    )


def make_rows(*tokens: int) -> Tensor:
    """Return rows whose values are their token."""
    return torch.tensor(tokens, dtype=torch.float32)[:, None].expand(B, H, -1, D).clone()


def random_tensor(*shape: int, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the attention of the newest queries in float64."""
    group, count, length = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    q, k, v = (x.double() for x in (q, *(x.repeat_interleave(group, 1) for x in (k, v))))
    scores = q @ k.mT / q.shape[3] ** 0.5
    hidden_mask = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
    return torch.softmax(scores.masked_fill(hidden_mask, float("-inf")), -1) @ v


def states_equal(first: State, second: State) -> bool:
    pairs = zip(first.keys + first.values, second.keys + second.values, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@dataclass
class Node:
    """A state, and the tokens that each of its layers should hold."""

    state: State
    tokens: list[list[int]]

    def check(self) -> None:
        for layer, tokens in enumerate(self.tokens):
            keys, values = get(self.state, layer)
            assert seq_length(self.state, layer) == len(tokens)
            assert torch.equal(keys, make_rows(*tokens))
            assert torch.equal(values, -make_rows(*tokens))


STEP = st.tuples(st.integers(0, 99), st.integers(0, 2), st.integers(0, 4))


@given(st.lists(STEP, max_size=12))
def test_every_state_of_a_tree_keeps_its_tokens(steps: list[tuple[int, int, int]]) -> None:
    """Branches grow from any state; all inputs and outputs are overwritten afterwards."""
    nodes, token = [Node(make_state(3), [[], [], []])], 1
    for parent, layer, count in steps:
        old = nodes[parent % len(nodes)]
        new = list(range(token, token + count))
        k, v = make_rows(*new), -make_rows(*new)
        state, keys, values = update(old.state, layer, k, v)
        tokens = [
            layer_tokens + new * (index == layer) for index, layer_tokens in enumerate(old.tokens)
        ]
        nodes.append(Node(state, tokens))
        assert torch.equal(keys, make_rows(*tokens[layer])) and torch.equal(values, -keys)
        for tensor in (k, v, keys, values, *get(state, layer)):
            tensor.fill_(-99)
        token += count
    for node in nodes:
        node.check()
        Node(reset(node.state), [[], [], []]).check()
        node.check()


def test_layers_of_one_forward_have_positions_of_their_own() -> None:
    state = make_state(3)
    for layer in range(3):
        state, keys, _ = update(state, layer, make_rows(layer, 10), make_rows(0, 0))
        assert torch.equal(keys, make_rows(layer, 10))
    assert [seq_length(state, layer) for layer in range(3)] == [2, 2, 2]


def test_length_without_a_layer_is_common_to_all_layers() -> None:
    state = make_state(2)
    assert seq_length(state) == 0
    state = update(state, 0, make_rows(1, 2), make_rows(1, 2))[0]
    assert (seq_length(state), seq_length(state, 0)) == (0, 2)
    state = update(state, 1, make_rows(1), make_rows(1))[0]
    assert seq_length(state) == 1


class CopyCounter(TorchDispatchMode):
    """Count the bytes that operators write, to new or existing tensors."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in func._schema.returns]
        for tensor, alias in zip(out if isinstance(out, tuple) else (out,), aliases, strict=True):
            if isinstance(tensor, Tensor) and (alias is None or alias.is_write):
                self.nbytes += tensor.nbytes
        return out


def count_copied_bytes(updates: int) -> int:
    """Return the bytes written by single-token updates."""
    state, row = make_state(), make_rows(1)
    with CopyCounter() as copies:
        for _ in range(updates):
            state = update(state, 0, row, row)[0]
    return copies.nbytes


@pytest.mark.xfail(
    strict=True,
    reason="an update returns all rows of its layer, and keeps them in one tensor",
)
def test_copied_bytes_grow_linearly_with_tokens() -> None:
    """An old state may still be updated twice: see the test of a tree of states."""
    # 4 times as many tokens; copying everything would give 16 times
    assert count_copied_bytes(512) < 8 * count_copied_bytes(128)


def test_attention_modifies_no_input() -> None:
    attend, state = cached_attention(num_heads=4, head_dim=D, layer=0), make_state()
    q, k, v = random_tensor(B, 4, 3, D, dtype=torch.float32), make_rows(1, 2, 3), make_rows(4, 5, 6)
    before = q.clone()
    out, after = attend(q, k, v, state)
    for tensor in (out, k, v):
        tensor.fill_(-99)
    assert torch.equal(q, before) and seq_length(state, 0) == 0
    assert torch.equal(get(after, 0)[0], make_rows(1, 2, 3))
    assert torch.equal(get(after, 0)[1], make_rows(4, 5, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, WIDE])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_matches_float64(dtype: torch.dtype, group: int) -> None:
    attend, state = cached_attention(num_heads=H * group, head_dim=D, layer=0), make_state(1, dtype)
    for count in (5, 1, 3, 0, 1):
        q = 8 * random_tensor(B, H * group, count, D, dtype=dtype)
        out, state = attend(q, *random_tensor(2, B, H, count, D, dtype=dtype), state)
        expected = exact_attention(q, *get(state, 0))
        assert out.dtype == dtype and out.shape == q.shape
        assert torch.allclose(out.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_matches_the_mutable_cache(dtype: torch.dtype) -> None:
    dim, heads, tolerance = 16, 4, 8 * torch.finfo(dtype).eps
    cache = kvant.Cache(1, "raw")
    state = init(batch_size=B, num_layers=1, num_heads=2, head_dim=dim, dtype=dtype)
    attend = cached_attention(num_heads=heads, head_dim=dim, layer=0)
    for count in (70, 1, 4, 1):
        q = random_tensor(B, heads, count, dim, dtype=dtype)
        k, v = random_tensor(2, B, 2, count, dim, dtype=dtype)
        expected = kvant.attend(q, cache[0].append(k, v))
        out, state = attend(q, k, v, state)
        assert torch.allclose(out, expected, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, get(state, 0), cache[0].read()))


class Toy(torch.nn.Module):
    """Three attention layers, with or without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = torch.nn.ModuleList(torch.nn.Linear(8, 16, dtype=WIDE) for _ in range(3))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        for layer, linear in enumerate(self.maps):
            rows = linear(x).unflatten(2, (4, D)).transpose(1, 2)
            k, v = rows[:, :2], rows[:, 2:]
            q = torch.cat([k * 2, v], 1)
            if state is None:
                out = exact_attention(q, k, v)
            else:
                attend = cached_attention(num_heads=4, head_dim=D, layer=layer)
                out, state = attend(q, k, v, state)
            x = x + out[:, :2].transpose(1, 2).flatten(2)
        return x, state


def test_stepwise_model_equals_a_single_forward() -> None:
    model, x = Toy(), random_tensor(B, 7, 8)
    state, parts = make_state(3, WIDE), []
    for piece in x.split([3, 1, 2, 1], dim=1):
        part, state = model(piece, state)
        parts.append(part)
    assert torch.allclose(torch.cat(parts, 1), model(x)[0])


def test_nonfinite_rows_reach_only_queries_that_see_them() -> None:
    attend, state = cached_attention(num_heads=H, head_dim=D, layer=0), make_state()
    q, k, v = random_tensor(3, B, H, 4, D, dtype=torch.float32)
    clean = attend(q, k, v, state)[0]
    k[:, :, 2], v[:, :, 2] = float("nan"), float("inf")
    out = attend(q, k, v, state)[0]
    assert torch.equal(out[:, :, :2], clean[:, :, :2])
    assert out[:, :, 2:].isnan().all()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch uses it for jvp
def test_gradients_equal_those_without_a_cache() -> None:
    """With respect to queries and rows, new ones and those of an earlier state."""
    attend, weight = cached_attention(num_heads=4, head_dim=D, layer=0), random_tensor(B, 4, 2, D)
    q, k, v = random_tensor(B, 4, 2, D), *random_tensor(2, B, H, 5, D)

    def attend_cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, _, _ = update(make_state(1, WIDE), 0, k[:, :, :3], v[:, :, :3])
        out, state = attend(q, k[:, :, 3:], v[:, :, 3:], state)
        return (
            (out * weight).sum() + (get(state, 0)[0] ** 2).sum() + update(state, 0, k, v)[2].sum()
        )

    def bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (exact_attention(q, k, v) * weight).sum() + (k**2).sum() + 2 * v.sum()

    actual, expected = (grad(f, argnums=(0, 1, 2))(q, k, v) for f in (attend_cached, bare))
    assert all(map(torch.allclose, actual, expected))
    tangents = tuple(random_tensor(*x.shape) for x in (q, k, v))
    actual, expected = (jvp(f, (q, k, v), tangents) for f in (attend_cached, bare))
    assert all(map(torch.allclose, actual, expected))


def test_state_is_differentiable() -> None:
    state = update(make_state(2, WIDE), 1, *random_tensor(2, B, H, 3, D))[0]
    slopes = grad(lambda state: (get(state, 1)[0] ** 2).sum())(state)
    assert isinstance(slopes, State)
    assert torch.equal(slopes.keys[1], 2 * state.keys[1])
    assert not slopes.values[1].any()


@pytest.mark.parametrize("mapped", [True, False])
def test_vmap_equals_a_loop(mapped: bool) -> None:
    """Over rows, and over states or one state for all; mapped states can be mapped again."""
    attend = cached_attention(num_heads=4, head_dim=D, layer=1)
    lead, singles = 3, [make_state(2, WIDE) for _ in range(3)]
    many = vmap(lambda _: make_state(2, WIDE))(torch.zeros(lead)) if mapped else singles[0]
    for turn, count in enumerate((4, 1, 2)):
        over = 0 if mapped or turn else None
        q, k, v = random_tensor(lead, B, 4, count, D), *random_tensor(2, lead, B, H, count, D)
        many, keys, _ = vmap(update, in_dims=(over, None, 0, 0))(many, 0, k, v)
        out, many = vmap(attend, in_dims=(0, 0, 0, 0))(q, k, v, many)
        for i in range(lead):
            singles[i], expected_keys, _ = update(singles[i], 0, k[i], v[i])
            expected, singles[i] = attend(q[i], k[i], v[i], singles[i])
            assert torch.equal(keys[i], expected_keys)
            assert torch.allclose(out[i], expected)
        assert seq_length(many, 0) == seq_length(many, 1) == seq_length(singles[0], 1)
    assert seq_length(reset(many), 1) == 0


def test_transforms_work_on_a_functional_model() -> None:
    model, x = Toy(), random_tensor(3, B, 2, 8)
    weights = dict(model.named_parameters())
    state = model(random_tensor(B, 3, 8), make_state(3, WIDE))[1]

    def loss(weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, State]:
        out, after = functional_call(model, weights, (x, state))
        return out.sum(), after

    slopes, after = vmap(grad(loss, has_aux=True), in_dims=(None, 0))(weights, x)
    for i in range(3):
        single_grad, state_of_one = grad(loss, has_aux=True)(weights, x[i])
        assert all(torch.allclose(slopes[name][i], single_grad[name]) for name in single_grad)
        assert torch.allclose(after.keys[2][i], state_of_one.keys[2])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_loop_does_not_recompile_per_token(backend: str) -> None:
    """The first rows have their own shapes (none, one); then lengths are dynamic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    attends = [cached_attention(num_heads=4, head_dim=D, layer=layer) for layer in range(2)]

    def step(q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        for attend in attends:
            q, state = attend(q, k, v, state)
        state, keys, _ = update(state, 2, k, v)
        return q + keys.sum(), state

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    ours = theirs = make_state(3, limit=80)
    for count in (6, *[1] * 60):
        q = random_tensor(B, 4, count, D, dtype=torch.float32)
        k, v = random_tensor(2, B, H, count, D, dtype=torch.float32)
        expected, theirs = step(q, k, v, theirs)
        out, ours = compiled(q, k, v, ours)
        assert torch.allclose(out, expected, atol=1e-6)
        assert states_equal(ours, theirs)
    assert counter.frame_count <= 4


def test_compiled_update_returns_a_copy() -> None:
    torch._dynamo.reset()
    state, k = make_state(), make_rows(1, 2)
    after, keys, values = torch.compile(update, backend="aot_eager")(state, 0, k, k)
    for tensor in (keys, values, k):
        tensor.fill_(-99)
    assert torch.equal(get(after, 0)[0], make_rows(1, 2))
    assert torch.equal(get(after, 0)[1], make_rows(1, 2))


def test_exceeded_capacity_changes_nothing() -> None:
    state = update(make_state(limit=3), 0, make_rows(1, 2), make_rows(1, 2))[0]
    attend = cached_attention(num_heads=H, head_dim=D, layer=0)
    with pytest.raises(kvant.CapacityError, match=r"4 tokens in layer 0 .* of 3"):
        update(state, 0, make_rows(3, 4), make_rows(3, 4))
    with pytest.raises(kvant.CapacityError, match="4 tokens"):
        attend(make_rows(0, 0), make_rows(3, 4), make_rows(3, 4), state)
    assert torch.equal(update(state, 0, make_rows(3), make_rows(3))[1], make_rows(1, 2, 3))


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (make_rows(1)[:1], make_rows(1)[:1], r"k of shape \[1, 2, 1, 4\] .* \[2, 2, T, 4\]"),
        (make_rows(1), make_rows(1)[:, :1], r"v of shape \[2, 1, 1, 4\] .* \[2, 2, T, 4\]"),
        (make_rows(1)[..., :3], make_rows(1), r"k of shape \[2, 2, 1, 3\] .* \[2, 2, T, 4\]"),
        (make_rows(1)[0], make_rows(1)[0], r"k of shape \[2, 1, 4\] .* \[2, 2, T, 4\]"),
        (make_rows(1), make_rows(1, 2), "k of 1 tokens and v of 2"),
        (make_rows(1).half(), make_rows(1).half(), "k of torch.float16 .* torch.float32"),
        (make_rows(1), make_rows(1).to("meta"), "v of torch.float32 on meta .* on cpu"),
    ],
)
def test_rows_of_wrong_shape_are_refused(k: Tensor, v: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update(make_state(), 0, k, v)


@pytest.mark.parametrize(
    ("q", "heads", "message"),
    [
        (make_rows(1), 4, r"q of shape \[2, 2, 1, 4\] .* \[B, 4, T, 4\]"),
        (make_rows(1, 2), 2, r"q of shape \[2, 2, 2, 4\] with k of \[2, 2, 1, 4\]"),
        (make_rows(1).repeat(1, 2, 1, 1)[:, :3], 3, "3 a multiple of H"),
        (make_rows(1).double(), 2, "q of torch.float64 .* k of torch.float32"),
    ],
)
def test_queries_of_wrong_shape_are_refused(q: Tensor, heads: int, message: str) -> None:
    attend = cached_attention(num_heads=heads, head_dim=D, layer=0)
    with pytest.raises(ValueError, match=message):
        attend(q, make_rows(1), make_rows(1), make_state())


@pytest.mark.parametrize("layer", [-1, 2])
def test_unknown_layer_is_refused(layer: int) -> None:
    attend = cached_attention(num_heads=H, head_dim=D, layer=layer)
    calls = (
        lambda: update(make_state(2), layer, make_rows(1), make_rows(1)),
        lambda: get(make_state(2), layer),
        lambda: seq_length(make_state(2), layer),
        lambda: attend(make_rows(1), make_rows(1), make_rows(1), make_state(2)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"layer {layer} of a state with 2"):
            call()


@pytest.mark.parametrize("name", ["batch_size", "num_layers", "num_heads", "head_dim"])
def test_empty_state_is_refused(name: str) -> None:
    sizes = {"batch_size": 1, "num_layers": 1, "num_heads": 1, "head_dim": 1}
    with pytest.raises(ValueError, match=f"{name} 0"):
        init(**sizes | {name: 0})


def test_repr_shows_lengths_and_explains_a_mapped_state() -> None:
    state = update(make_state(2), 0, make_rows(1), make_rows(1))[0]
    assert repr(state) == "State(lengths [1, 0] of 2048)"
    many = vmap(lambda k: update(state, 0, k, k)[0])(make_rows(1).expand(5, B, H, 1, D))
    with pytest.raises(ValueError, match=r"mapped over \[5\]: use torch.vmap"):
        update(many, 0, make_rows(1), make_rows(1))
