"""Test the first chunk of a prompt: attended by a kernel where faster, else by transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvant
from hf.zoo import build
from kvant.attention.native import NativeBackend
from kvant.native import get_library

pytestmark = pytest.mark.skipif(
    get_library().isa in ("", "plain"), reason="no kernel is sooner done here"
)
IDS = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def count_kernel_queries() -> Iterator[list[int]]:
    """Record the number of queries of each kernel call."""
    calls: list[int] = []
    right = NativeBackend.attend

    def count_queries(self: NativeBackend, request: Any, pages: Any) -> Any:
        calls.append(request.q.shape[2])
        return right(self, request, pages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeBackend, "attend", count_queries)
        yield calls


def prompt_logits(model: Any, cache: Any, **more: Any) -> Tensor:
    out: Tensor = model(IDS, past_key_values=cache, **more).logits
    return out


@torch.no_grad()
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("spec", ["raw", "affine8", "fp8", "raw,window=8"])
def test_kernel_reads_the_new_rows_uncopied(spec: str, attached: bool) -> None:
    model = build("mistral" if "window" in spec else "llama")
    plain = model(IDS).logits
    if attached:
        kvant.attach(model, spec, guard=False)
    cache = kvant.cache_for(model, "raw" if "window" in spec else spec)
    with count_kernel_queries() as calls:
        actual = prompt_logits(model, cache)
    assert calls == [40] * model.config.num_hidden_layers
    assert (actual - plain).abs().max() < 1e-5 * plain.std()
    assert "only its prompt was read" in str(cache.explain())


@torch.no_grad()
@pytest.mark.parametrize("mode", ["rotated", "masked", "asked for the reference"])
def test_transformers_attends_otherwise(mode: str) -> None:
    model, more = build("llama"), dict[str, Any]()
    cache = kvant.cache_for(
        model,
        "turbo4" if mode == "rotated" else "affine8",
        backend="reference" if mode == "asked for the reference" else None,
    )
    if mode == "masked":
        more["attention_mask"] = torch.zeros(2, 1, 40, 40).masked_fill(
            torch.ones(40, 40).triu(1).bool(), -torch.inf
        )
        more["attention_mask"][..., 3] = -torch.inf
        more["attention_mask"][..., 3, 3] = 0.0
    with count_kernel_queries() as calls:
        actual = prompt_logits(model, cache, **more)
    assert calls == []
    assert torch.equal(actual, model(IDS, **more).logits)


@torch.no_grad()
def test_padding_is_not_seen() -> None:
    model, mask = build("llama"), torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0
    right = model(IDS, attention_mask=mask).logits
    actual = prompt_logits(model, kvant.cache_for(model, "affine8"), attention_mask=mask)
    assert (actual - right)[mask.bool()].abs().max() < 1e-5 * right.std()


def test_gradients_flow_through_a_prompt() -> None:
    model = build("llama")
    for name, weight in model.named_parameters():
        weight.requires_grad_("q_proj" in name)  # like an adapter of queries only
    with count_kernel_queries() as calls:
        prompt_logits(model, kvant.cache_for(model, "affine8")).sum().backward()
    assert calls == []
    grads = [w.grad for n, w in model.named_parameters() if "q_proj" in n]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
