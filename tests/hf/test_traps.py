"""What models and their users do to keys, values and masks, each once done wrongly."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

import kvant
from hf.zoo import build
from kvant import LayerSpec, UnsupportedView
from kvant.hf.masks import LazyMask, make_lazy_mask_function


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def small(text: str, **changes: Any) -> LayerSpec:
    recipe = kvant.parse(text, 1).layers[0]
    assert isinstance(recipe, LayerSpec)
    return replace(recipe, page=8, tail=0, **changes)


def apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / a.std()).item()


@torch.no_grad()
def padded(
    model: PreTrainedModel, cache: object, pads: int, cuts: list[int], batch: int = 2
) -> Tensor:
    """Logits of real tokens, forward after forward; the first sequence is padded."""
    ids, mask = tokens(batch, cuts[-1]), torch.ones(batch, cuts[-1], dtype=torch.long)
    mask[0, :pads] = 0
    place = (mask.cumsum(-1) - 1).clamp_min(0)
    parts = [
        model(
            ids[:, a:b],
            past_key_values=cache,
            attention_mask=mask[:, :b],
            position_ids=place[:, a:b],
        ).logits
        for a, b in zip([0, *cuts], cuts, strict=False)
    ]
    return torch.cat(parts, 1)[mask.bool()]


STEPS = [18, *range(19, 31)]


@pytest.mark.parametrize("spec", ["raw,window=4,sinks=0", small("affine8", prefill="stored")])
def test_a_chunked_model_counts_chunks_from_its_padding(spec: Any) -> None:
    """Whether the padding was told or not."""
    model, mask = build("llama4"), torch.ones(2, 18, dtype=torch.long)
    mask[0, :3] = 0
    told = padded(model, kvant.cache_for(model, spec, attention_mask=mask), 3, STEPS)
    found = padded(model, kvant.cache_for(model, spec), 3, STEPS)
    assert apart(told, found) < (1e-4 if isinstance(spec, str) else 0.3)


def test_a_mask_that_says_otherwise_than_was_told_is_right() -> None:
    model, told = build("llama"), torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
    expected = padded(model, DynamicCache(config=model.config), 7, [12, 13, 14])
    cache = kvant.cache_for(model, attention_mask=told)
    assert apart(expected, padded(model, cache, 7, [12, 13, 14])) < 1e-4


@torch.no_grad()
def cropped(
    model: PreTrainedModel, cache: Any, to: int, masks: tuple[Tensor | None, ...], count: int = 1
) -> Tensor:
    """Logits behind a crop: 12 columns, of which the first mask says which are there, and more."""
    ids, more = tokens(2, 12), tokens(2, 20, seed=1)
    if isinstance(cache, DynamicCache):
        cache.activate_past_recording()  # or it cannot go back behind a window
    model(ids, past_key_values=cache, **placed(masks[0], 12, 12))
    cache.crop(to - 12)
    parts = []
    for at, mask in enumerate(masks[1:]):
        new, columns = more[:, at * count : (at + 1) * count], to + (at + 1) * count
        parts.append(model(new, past_key_values=cache, **placed(mask, columns, count)).logits)
    return torch.cat(parts, 1)


def placed(mask: Tensor | None, columns: int, count: int) -> dict[str, Any]:
    if mask is None:
        return {}
    place = (mask[:, :columns].cumsum(-1) - 1).clamp_min(0)
    return {"attention_mask": mask[:, :columns], "position_ids": place[:, columns - count :]}


def ahead(*pads: int) -> Tensor:
    return (torch.arange(40) >= torch.tensor(pads)[:, None]).long()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma2", "llama4"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_crop_below_the_first_token_of_a_sequence_lets_it_begin_anew(
    name: str, count: int, attached: bool
) -> None:
    """Its new tokens were hidden as the padding that they are no more (logits silently wrong)."""
    model, masks = build(name), (ahead(0, 9), ahead(0, 7), ahead(0, 7), ahead(0, 7))
    expected = cropped(model, DynamicCache(config=model.config), 7, masks, count)
    if attached:
        kvant.attach(model, guard=False)
    told = cropped(model, kvant.cache_for(model, attention_mask=masks[0]), 7, masks, count)
    assert apart(expected, told) < 1e-4


@pytest.mark.parametrize("after", [None, ahead(0, 0)])
def test_padding_that_was_told_cannot_be_shown_behind_a_crop(after: Tensor | None) -> None:
    """It is not stored. The host makes no mask of ones alone, which hides nothing either."""
    model = build("llama")
    cache = kvant.cache_for(model, attention_mask=ahead(0, 9)[:, :12])
    with pytest.raises(kvant.CacheError, match=r"\[0, 7\].*padding is not stored.*attention_mask"):
        cropped(model, cache, 7, (ahead(0, 9), after))
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize("spec", ["affine8,sinks=2", "raw,window=6,sinks=2", "raw,sinks=2"])
@pytest.mark.parametrize("after", [None, ahead(0, 0), ahead(0, 7)])
def test_sinks_below_which_was_cropped_are_refused(spec: str, after: Tensor | None) -> None:
    """They are those of the columns that were told; nothing else can be kept any more."""
    model = build("llama")
    kvant.attach(model, guard=False)
    cache = kvant.cache_for(model, spec, attention_mask=ahead(0, 9)[:, :12])
    with pytest.raises(kvant.CacheError, match=r"\[0, 9\].*begin elsewhere.*attention_mask"):
        cropped(model, cache, 7, (ahead(0, 9), after))
    assert cache.get_seq_length() == 7


@torch.no_grad()
def test_sinks_of_a_padded_sequence_outlive_a_crop_into_its_padding() -> None:
    """The same tokens again, padding included, are what they were."""
    model = build("llama")
    kvant.attach(model, guard=False)
    outs = []
    for to in (7, 12):
        cache = kvant.cache_for(model, "raw,window=6,sinks=2", attention_mask=ahead(0, 9)[:, :12])
        model(tokens(2, 12), past_key_values=cache, **placed(ahead(0, 9), 12, 12))
        cache.crop(to - 12)
        new = torch.cat([tokens(2, 12)[:, to:], tokens(2, 6, seed=1)], 1)
        told = placed(ahead(0, 9), 18, new.shape[1])
        outs.append(model(new, past_key_values=cache, **told).logits[:, -6:])
    assert apart(*outs) < 1e-4


@pytest.mark.parametrize("spec", ["raw", "raw,window=6,sinks=2"])
def test_a_crop_to_nothing_forgets_the_padding(spec: str) -> None:
    """Another batch was hidden as if it were padded."""
    model = build("llama")
    kvant.attach(model, guard=False)
    caches = [kvant.cache_for(model, spec, attention_mask=m) for m in (ahead(0, 9)[:, :12], None)]
    cropped(model, caches[0], 0, (ahead(0, 9), ahead(0, 0)))
    for cache in caches:
        cache.crop(-100)
    expected, told = (padded(model, cache, 0, [9, 10, 11], batch=3) for cache in caches)
    assert apart(expected, told) < 1e-4


def test_a_reset_forgets_the_padding() -> None:
    model, told = build("llama"), torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
    cache = kvant.cache_for(model, attention_mask=told)
    padded(model, cache, 4, [12, 13])
    cache.reset()
    expected = padded(model, DynamicCache(config=model.config), 0, [9, 10], batch=3)
    assert apart(expected, padded(model, cache, 0, [9, 10], batch=3)) < 1e-4


@torch.no_grad()
def test_a_mask_that_was_written_to_is_read_again() -> None:
    model, ids = build("llama"), tokens(1, 12)
    outs = []
    for cache in (DynamicCache(config=model.config), kvant.cache_for(model)):
        model(ids, past_key_values=cache)
        mask = torch.ones(1, 1, 1, 13, dtype=torch.bool)
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
        cache.crop(-1)
        mask[..., :5] = False
        outs.append(model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits)
    assert apart(*outs) < 1e-4


def test_a_lazy_mask_has_the_dtype_of_the_real_one() -> None:
    """Models build masks of their own beside it."""
    asked = {"batch_size": 1, "q_length": 2, "kv_length": 5, "q_offset": 3, "dtype": torch.bfloat16}
    for host in (sdpa_mask, eager_mask):
        lazy = make_lazy_mask_function(host)(**asked)
        assert isinstance(lazy, LazyMask)
        assert (lazy.dtype, lazy.shape) == ((lazy + 0).dtype, (lazy + 0).shape) or (
            lazy.dtype == torch.bool
        )
        assert lazy.materialize("a test").dtype == lazy.dtype


def handles(count: int = 1) -> tuple[Tensor, Tensor]:
    cache = kvant.cache_for(build("llama"))
    for length in (12, count):
        pairs = [
            cache.update(torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16), layer)
            for layer in range(4)
        ]
    return pairs[-1]


@pytest.mark.parametrize("change", [lambda k: k.mul_(3.0), lambda k: k[:, :, 2].zero_()])
def test_what_is_written_to_a_handle_is_seen(change: Any) -> None:
    keys, values = handles()
    q = torch.randn(1, 2, 1, 16)
    before = scaled_dot_product_attention(q, keys, values)
    change(keys)
    after = scaled_dot_product_attention(q, keys, values)
    dense = scaled_dot_product_attention(q, keys.clone(), values.clone())
    assert torch.allclose(after, dense, atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-3)


def test_a_handle_has_its_shape_on_every_way() -> None:
    keys, _ = handles()
    for other in (
        keys[:, :, None, :, :],
        keys[:, :, None, :, :].expand(1, 2, 3, 13, 16),
        keys[:, :, None, :, :].expand(1, 2, 3, 13, 16).reshape(1, 6, 13, 16),
        keys[:, :, None],
        keys[..., None],
        keys[:, :, None, :, :].expand(-1, -1, 3, -1, -1),
        keys.transpose(1, 2),
    ):
        assert other.clone().shape == other.shape
    spread = keys[:, :, None, :, :].expand(1, 2, 3, 13, 16).reshape(1, 6, 13, 16)
    assert torch.equal(spread.clone(), keys.clone().repeat_interleave(3, 1))


@torch.no_grad()
def folded_step(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """One step by our cache and one by the host's."""
    ids, outs = tokens(1, 12), []
    for cache in (kvant.cache_for(model), DynamicCache(config=model.config)):
        model(ids, past_key_values=cache)
        outs.append(model(ids[:, :1], past_key_values=cache).logits)
    return outs[0], outs[1]


def test_a_copy_of_a_folded_model_folds_by_its_own_weights() -> None:
    model = build("deepseek_v3")
    kvant.attach(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for layer in twin.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-1.5).add_(0.1)
    assert apart(*folded_step(twin)) < 1e-4


def test_an_adapter_on_a_folded_projection_is_heard() -> None:
    model = build("deepseek_v3")
    kvant.attach(model)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *args: args[-1] * 1.5)
    assert apart(*folded_step(model)) < 1e-4


def test_an_eager_model_of_a_subclass_finds_its_attention() -> None:
    class Mine(Gemma2Attention): ...

    model = build("gemma2")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine
    kvant.attach(model)
    model.generate(tokens(1, 12), max_new_tokens=3)


@torch.no_grad()
def test_one_key_head_takes_a_mask_a_head() -> None:
    model = build("llama", num_key_value_heads=1)
    ids, outs = tokens(1, 9), []
    mask = torch.ones(1, 4, 1, 10, dtype=torch.bool)
    mask[:, 1, :, :4] = False
    for cache in (DynamicCache(config=model.config), kvant.cache_for(model)):
        model(ids, past_key_values=cache)
        outs.append(model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits)
    assert apart(*outs) < 1e-4


def test_a_draft_longer_than_what_is_kept_can_be_taken_back() -> None:
    model = build("mistral")
    ids = torch.cat([tokens(1, 24)] * 5 + [tokens(1, 24)[:, :5]], 1)
    arguments = {"max_new_tokens": 120, "min_new_tokens": 120, "do_sample": False}
    plain = model.generate(ids, **arguments)
    drafted = model.generate(
        ids, prompt_lookup_num_tokens=80, past_key_values=kvant.cache_for(model), **arguments
    )
    assert torch.equal(plain, drafted)


@torch.no_grad()
def test_a_speculated_chunk_is_not_read_from_rows_of_its_newest_token() -> None:
    """A model that needs dense rows cannot have them a token each."""
    model = build("bloom")
    cache = kvant.cache_for(model, small("affine4"))
    model(tokens(1, 10), past_key_values=cache)
    cache.activate_past_recording()
    with pytest.raises(UnsupportedView, match=r"speculation.*raw"):
        model(tokens(1, 6), past_key_values=cache)
    assert cache.get_seq_length() == 10


def test_layers_that_never_come_are_told_even_token_by_token() -> None:
    cache = kvant.cache_for(build("llama"))
    rows = torch.zeros(1, 2, 1, 16)
    with pytest.raises(kvant.CacheError, match=r"no rows to layers \[3\]"):
        for _ in range(3):
            for layer in range(3):
                cache.update(rows, rows, layer)
