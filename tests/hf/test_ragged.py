"""Test sequences of different lengths under one cache: each is computed as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvant
from hf.zoo import FAMILIES, OWN_ATTENTION, VOCABULARY, build

PROMPTS, STEPS = (5, 17, 31), 5
DECODERS = [name for name, family in FAMILIES.items() if family.kind != "encoder-decoder"]
# Their attention uses keys directly, or builds its own mask.
ALONE = (*OWN_ATTENTION, "diffllama", "doge", "jetmoe")
FOREIGN = ("mllama", "deepseek_v32")  # transformers stores the state of some of their layers
FEW = ("llama", "gemma3", "llama4", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_next", "mamba2")


@torch.no_grad()
def prefill_caches(model: PreTrainedModel, name: str, spec: str) -> list[Any]:
    """Return a cache for each prompt."""
    caches, seed = [], torch.Generator().manual_seed(1)
    for count in PROMPTS:
        cache = kvant.cache_for(model, spec)
        ids = torch.randint(3, VOCABULARY, (1, count), generator=seed)
        model(ids, **{FAMILIES[name].cache_argument: cache})
        caches.append(cache)
    return caches


@torch.no_grad()
def decode_tokens(model: PreTrainedModel, name: str, cache: Any, indices: list[int]) -> Tensor:
    """Return the logits of a few tokens of these sequences."""
    steps = torch.randint(3, VOCABULARY, (3, STEPS), generator=torch.Generator().manual_seed(2))
    outs = []
    for position in range(STEPS):
        places = torch.tensor([[PROMPTS[sequence] + position] for sequence in indices])
        options = {FAMILIES[name].cache_argument: cache, "position_ids": places}
        outs.append(model(steps[indices, position : position + 1], **options).logits[:, -1])
    return torch.stack(outs, 1)


def logits_difference(name: str, spec: str, *, attached: bool) -> float:
    """Return the difference between batched logits and those of each sequence alone."""
    model = build(name)
    if attached:
        kvant.attach(model, "raw", guard=False)
    caches = prefill_caches(model, name, spec)
    merged = kvant.merge(caches)
    single = [decode_tokens(model, name, cache, [b]) for b, cache in enumerate(caches)]
    actual, expected = decode_tokens(model, name, merged, [0, 1, 2]), torch.cat(single)
    return float((actual - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", FEW)
def test_each_sequence_is_computed_as_alone(name: str) -> None:
    spec = "raw" if FAMILIES[name].kind == "recurrent" else "affine8,tail=0"
    assert logits_difference(name, spec, attached=True) < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_unmodified_model_decodes_ragged_batches(name: str) -> None:
    assert logits_difference(name, "raw", attached=False) < 1e-3


@pytest.mark.laws
@pytest.mark.parametrize(
    "name", [decoder for decoder in DECODERS if decoder not in ALONE + FOREIGN]
)
def test_every_other_family_decodes_ragged_batches(name: str) -> None:
    assert logits_difference(name, "raw", attached=True) < 1e-3


@pytest.mark.parametrize("name", ["bloom", "xglm"])
def test_unsupported_family_gives_a_reason_and_keeps_its_caches(name: str) -> None:
    model = build(name)
    caches = prefill_caches(model, name, "raw")
    merged = kvant.merge(caches)
    with pytest.raises(kvant.UnsupportedView, match=r"different lengths.*extract"):
        decode_tokens(model, name, merged, [0, 1, 2])
    assert merged.lengths == list(PROMPTS)
    single = decode_tokens(model, name, merged.extract(1), [1])
    assert torch.allclose(single, decode_tokens(model, name, caches[1], [1]), atol=1e-4)


@pytest.mark.laws
@pytest.mark.parametrize("name", ALONE)
def test_no_family_fails_silently(name: str) -> None:
    model = build(name)
    merged = kvant.merge(prefill_caches(model, name, "raw"))
    with pytest.raises(kvant.UnsupportedView, match="different lengths"):
        decode_tokens(model, name, merged, [0, 1, 2])


@pytest.mark.parametrize("name", FOREIGN)
def test_layers_with_transformers_state_are_not_merged(name: str) -> None:
    model = build(name)
    with pytest.raises(kvant.CacheError, match="live in transformers"):
        kvant.merge(prefill_caches(model, name, "raw"))


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_sequences_join_and_leave(name: str) -> None:
    model = build(name)
    caches = prefill_caches(model, name, "affine8")
    merged = kvant.merge(caches)
    decode_tokens(model, name, merged, [0, 1, 2])
    single = merged.extract(2)
    merged.remove(1)
    assert merged.lengths == [PROMPTS[0] + STEPS, PROMPTS[2] + STEPS]
    assert (single.lengths, single.length) == ([PROMPTS[2] + STEPS], PROMPTS[2] + STEPS)
    merged.state.pools.check()
    rejoined = kvant.merge([merged, caches[1]])
    assert rejoined.lengths == [PROMPTS[0] + STEPS, PROMPTS[2] + STEPS, PROMPTS[1]]


def test_only_or_missing_sequence_is_not_removed() -> None:
    model = build("llama")
    single = prefill_caches(model, "llama", "raw")[0]
    with pytest.raises(ValueError, match="only sequence: clear"):
        single.remove(0)
    with pytest.raises(ValueError, match=r"sequences \[1\] of a batch of 1"):
        single.remove(1)
    assert single.lengths == [PROMPTS[0]]


def test_slack_that_cannot_be_stored_is_set_by_a_later_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    cache = prefill_caches(model, "llama", "affine8")[0]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(cache.states, "ensure_slack", raise_memory_error)
        cache.ensure_slack(40)
    cache.ensure_slack(40)
    assert cache.spec.layers[0].slack >= 40


def raise_memory_error(slack: int) -> None:
    raise MemoryError


def test_incompatible_caches_are_not_merged() -> None:
    model, other = build("llama"), build("gemma3")
    single = prefill_caches(model, "llama", "raw")[0]
    with pytest.raises(ValueError, match="no tokens"):
        kvant.merge([single, kvant.cache_for(model, "raw")])
    with pytest.raises(ValueError, match="recode"):
        kvant.merge([single, prefill_caches(model, "llama", "affine8")[0]])
    with pytest.raises(ValueError, match="different models"):
        kvant.merge([single, prefill_caches(other, "gemma3", "raw")[0]])
    with pytest.raises(ValueError, match="merge of no caches"):
        kvant.merge([])


def decode_chunk(model: PreTrainedModel, cache: Any, indices: list[int]) -> Tensor:
    """Return the logits of three tokens at once."""
    ids = torch.randint(3, VOCABULARY, (3, 3), generator=torch.Generator().manual_seed(2))
    places = torch.tensor([[PROMPTS[b] + t for t in range(3)] for b in indices])
    with torch.no_grad():
        out: Tensor = model(ids[indices], position_ids=places, past_key_values=cache).logits
    return out


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_several_tokens_of_each_sequence_run_in_one_forward(name: str, attached: bool) -> None:
    """Transformers aligns its masks to the newest token, too."""
    model = build(name)
    if attached or name == "gemma2":
        kvant.attach(model, "raw", guard=False)
    caches = prefill_caches(model, name, "raw")
    actual = decode_chunk(model, kvant.merge(caches), [0, 1, 2])
    single = [decode_chunk(model, cache, [b]) for b, cache in enumerate(caches)]
    assert (actual - torch.cat(single)).abs().max() < 1e-3 * actual.std()


def test_chunk_over_a_ragged_batch_is_refused() -> None:
    """Transformers counts its chunks from the first column."""
    model = build("llama4")
    merged = kvant.merge(prefill_caches(model, "llama4", "raw"))
    with pytest.raises(kvant.UnsupportedView, match="one token at a time"):
        decode_chunk(model, merged, [0, 1, 2])
