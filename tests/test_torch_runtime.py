"""Test that a mutable cache refuses transforms, and is never read by address under them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, jvp, vmap

import kvant

# torch warns of its own jvp implementation.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

K, Q = torch.ones(1, 2, 130, 64), torch.ones(1, 4, 1, 64)
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "grad": lambda f: grad(f)(Q),
    "vmap": lambda f: vmap(f)(Q[None]),
    "jvp": lambda f: jvp(f, (Q,), (Q,)),
    "functionalize": lambda f: functionalize(f)(Q),
}


def make_filled_cache(spec: str) -> kvant.Cache:
    cache = kvant.Cache(1, spec)
    cache[0].append(K, K)
    return cache


@pytest.mark.parametrize("spec", ["raw", "affine4,tail=0", "turbo4,tail=0"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_append_under_a_transform_is_refused_and_changes_nothing(name: str, spec: str) -> None:
    cache, transform = make_filled_cache(spec), TRANSFORMS[name]
    with pytest.raises(kvant.CacheError, match=r"append .* kvant\.functional"):
        transform(lambda q: cache[0].append(q[:, :2], q[:, :2]).keys.open.sum())
    with pytest.raises(kvant.CacheError, match=r"attend .* kvant\.functional"):
        transform(lambda q: kvant.attend(q, cache[0].view()).sum())
    assert cache.length == 130


@pytest.mark.parametrize("spec", ["raw", "affine4,tail=0", "turbo4,tail=0"])
def test_reads_under_a_transform_are_right(spec: str) -> None:
    cache = make_filled_cache(spec)
    keys = cache[0].read()[0]
    assert torch.allclose(vmap(lambda q: cache[0].read()[0] * q)(torch.ones(1))[0], keys)
    assert torch.allclose(grad(lambda q: (cache[0].read()[0] * q).sum())(K), keys)


@pytest.mark.parametrize("spec", ["raw", "affine4,tail=0"])
def test_tensors_without_storage_are_not_read_by_address(spec: str) -> None:
    with FakeTensorMode():
        cache = kvant.Cache(1, spec)
        view = cache[0].append(torch.ones(1, 2, 130, 64), torch.ones(1, 2, 130, 64))
        out = kvant.attend(torch.ones(1, 4, 1, 64), view)
    assert out.shape == (1, 4, 1, 64)
    assert dict(cache[0].stats.attend_calls) == {"reference": 1}
