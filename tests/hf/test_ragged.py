"""Sequences of different lengths under one cache: each is computed as it would be alone."""

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
# Their attention computes with keys themselves, or with a mask of its own making.
ALONE = (*OWN_ATTENTION, "diffllama", "doge", "jetmoe")
FOREIGN = ("mllama", "deepseek_v32")  # transformers keeps what some of their layers remember
FEW = ("llama", "gemma3", "llama4", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_next", "mamba2")


@torch.no_grad()
def prompted(model: PreTrainedModel, name: str, spec: str) -> list[Any]:
    """A cache for each prompt."""
    caches, seed = [], torch.Generator().manual_seed(1)
    for count in PROMPTS:
        cache = kvant.cache_for(model, spec)
        ids = torch.randint(3, VOCABULARY, (1, count), generator=seed)
        model(ids, **{FAMILIES[name].cache_argument: cache})
        caches.append(cache)
    return caches


@torch.no_grad()
def decoded(model: PreTrainedModel, name: str, cache: Any, which: list[int]) -> Tensor:
    """Logits of a few tokens of these sequences."""
    steps = torch.randint(3, VOCABULARY, (3, STEPS), generator=torch.Generator().manual_seed(2))
    outs = []
    for at in range(STEPS):
        places = torch.tensor([[PROMPTS[sequence] + at] for sequence in which])
        given = {FAMILIES[name].cache_argument: cache, "position_ids": places}
        outs.append(model(steps[which, at : at + 1], **given).logits[:, -1])
    return torch.stack(outs, 1)


def apart(name: str, spec: str, *, attached: bool) -> float:
    """How far logits of sequences side by side are from those of each alone."""
    model = build(name)
    if attached:
        kvant.attach(model, "raw", guard=False)
    caches = prompted(model, name, spec)
    merged = kvant.merge(caches)
    alone = [decoded(model, name, cache, [b]) for b, cache in enumerate(caches)]
    found, expected = decoded(model, name, merged, [0, 1, 2]), torch.cat(alone)
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", FEW)
def test_each_sequence_is_computed_as_alone(name: str) -> None:
    spec = "raw" if FAMILIES[name].kind == "recurrent" else "affine8,tail=0"
    assert apart(name, spec, attached=True) < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_an_unmodified_model_decodes_them(name: str) -> None:
    assert apart(name, "raw", attached=False) < 1e-3


@pytest.mark.laws
@pytest.mark.parametrize("name", [one for one in DECODERS if one not in ALONE + FOREIGN])
def test_every_other_family_decodes_them(name: str) -> None:
    assert apart(name, "raw", attached=True) < 1e-3


@pytest.mark.parametrize("name", ["bloom", "xglm"])
def test_a_family_that_cannot_says_why_and_keeps_what_it_has(name: str) -> None:
    model = build(name)
    caches = prompted(model, name, "raw")
    merged = kvant.merge(caches)
    with pytest.raises(kvant.UnsupportedView, match=r"different lengths.*extract"):
        decoded(model, name, merged, [0, 1, 2])
    assert merged.lengths == list(PROMPTS)
    one = decoded(model, name, merged.extract(1), [1])
    assert torch.allclose(one, decoded(model, name, caches[1], [1]), atol=1e-4)


@pytest.mark.laws
@pytest.mark.parametrize("name", ALONE)
def test_no_family_is_wrong_without_a_word(name: str) -> None:
    model = build(name)
    merged = kvant.merge(prompted(model, name, "raw"))
    with pytest.raises(kvant.UnsupportedView, match="different lengths"):
        decoded(model, name, merged, [0, 1, 2])


@pytest.mark.parametrize("name", FOREIGN)
def test_layers_that_transformers_keeps_are_not_merged(name: str) -> None:
    model = build(name)
    with pytest.raises(kvant.CacheError, match="live in transformers"):
        kvant.merge(prompted(model, name, "raw"))


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_sequences_come_and_go(name: str) -> None:
    model = build(name)
    caches = prompted(model, name, "affine8")
    merged = kvant.merge(caches)
    decoded(model, name, merged, [0, 1, 2])
    one = merged.extract(2)
    merged.remove(1)
    assert merged.lengths == [PROMPTS[0] + STEPS, PROMPTS[2] + STEPS]
    assert (one.lengths, one.length) == ([PROMPTS[2] + STEPS], PROMPTS[2] + STEPS)
    merged.states.check()
    again = kvant.merge([merged, caches[1]])
    assert again.lengths == [PROMPTS[0] + STEPS, PROMPTS[2] + STEPS, PROMPTS[1]]


def test_what_cannot_be_merged_is_refused() -> None:
    model, other = build("llama"), build("gemma3")
    one = prompted(model, "llama", "raw")[0]
    with pytest.raises(ValueError, match="no tokens"):
        kvant.merge([one, kvant.cache_for(model, "raw")])
    with pytest.raises(ValueError, match="recode"):
        kvant.merge([one, prompted(model, "llama", "affine8")[0]])
    with pytest.raises(ValueError, match="different models"):
        kvant.merge([one, prompted(other, "gemma3", "raw")[0]])
    with pytest.raises(ValueError, match="merge of no caches"):
        kvant.merge([])


def chunked(model: PreTrainedModel, cache: Any, which: list[int]) -> Tensor:
    """Logits of three tokens at once."""
    ids = torch.randint(3, VOCABULARY, (3, 3), generator=torch.Generator().manual_seed(2))
    places = torch.tensor([[PROMPTS[b] + t for t in range(3)] for b in which])
    with torch.no_grad():
        out: Tensor = model(ids[which], position_ids=places, past_key_values=cache).logits
    return out


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_several_tokens_of_each_are_read_at_once(name: str, attached: bool) -> None:
    """The host aligns its masks to the newest token, as we do."""
    model = build(name)
    if attached or name == "gemma2":
        kvant.attach(model, "raw", guard=False)
    caches = prompted(model, name, "raw")
    found = chunked(model, kvant.merge(caches), [0, 1, 2])
    alone = [chunked(model, cache, [b]) for b, cache in enumerate(caches)]
    assert (found - torch.cat(alone)).abs().max() < 1e-3 * found.std()


def test_several_tokens_of_each_in_chunks_are_refused() -> None:
    """The host counts its chunks from the first column."""
    model = build("llama4")
    merged = kvant.merge(prompted(model, "llama4", "raw"))
    with pytest.raises(kvant.UnsupportedView, match="one token at a time"):
        chunked(model, merged, [0, 1, 2])
