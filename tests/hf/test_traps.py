"""Test what models and their users do to keys, values and masks; each case failed once."""

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


def make_tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def make_small_spec(text: str, **changes: Any) -> LayerSpec:
    recipe = kvant.parse(text, 1).layers[0]
    assert isinstance(recipe, LayerSpec)
    return replace(recipe, page=8, tail=0, **changes)


def relative_difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / a.std()).item()


@torch.no_grad()
def padded_logits(
    model: PreTrainedModel, cache: object, pads: int, cuts: list[int], batch: int = 2
) -> Tensor:
    """Return logits of real tokens, forward after forward; the first sequence is padded."""
    ids, mask = make_tokens(batch, cuts[-1]), torch.ones(batch, cuts[-1], dtype=torch.long)
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


@pytest.mark.parametrize(
    "spec", ["raw,window=4,sinks=0", make_small_spec("affine8", prefill="stored")]
)
def test_a_chunked_model_counts_chunks_from_its_padding(spec: Any) -> None:
    """Whether or not the padding was declared."""
    model, mask = build("llama4"), torch.ones(2, 18, dtype=torch.long)
    mask[0, :3] = 0
    declared = padded_logits(model, kvant.cache_for(model, spec, attention_mask=mask), 3, STEPS)
    actual = padded_logits(model, kvant.cache_for(model, spec), 3, STEPS)
    assert relative_difference(declared, actual) < (1e-4 if isinstance(spec, str) else 0.3)


def test_mask_overrides_declared_padding() -> None:
    model, mask = build("llama"), torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
    expected = padded_logits(model, DynamicCache(config=model.config), 7, [12, 13, 14])
    cache = kvant.cache_for(model, attention_mask=mask)
    assert relative_difference(expected, padded_logits(model, cache, 7, [12, 13, 14])) < 1e-4


@torch.no_grad()
def cropped_logits(
    model: PreTrainedModel,
    cache: Any,
    length: int,
    masks: tuple[Tensor | None, ...],
    count: int = 1,
) -> Tensor:
    """Return logits after a crop: 12 columns, masked by the first mask, and later ones."""
    ids, more = make_tokens(2, 12), make_tokens(2, 20, seed=1)
    if isinstance(cache, DynamicCache):
        cache.activate_past_recording()  # otherwise a window cannot be rewound
    model(ids, past_key_values=cache, **with_positions(masks[0], 12, 12))
    cache.crop(length - 12)
    parts = []
    for position, mask in enumerate(masks[1:]):
        new, columns = (
            more[:, position * count : (position + 1) * count],
            length + (position + 1) * count,
        )
        parts.append(
            model(new, past_key_values=cache, **with_positions(mask, columns, count)).logits
        )
    return torch.cat(parts, 1)


def with_positions(mask: Tensor | None, columns: int, count: int) -> dict[str, Any]:
    if mask is None:
        return {}
    place = (mask[:, :columns].cumsum(-1) - 1).clamp_min(0)
    return {"attention_mask": mask[:, :columns], "position_ids": place[:, columns - count :]}


def left_pad_mask(*pads: int) -> Tensor:
    return (torch.arange(40) >= torch.tensor(pads)[:, None]).long()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma2", "llama4"])
@pytest.mark.parametrize("count", [1, 3])
def test_crop_below_the_first_token_restarts_a_sequence(
    name: str, count: int, attached: bool
) -> None:
    """Regression: its new tokens were hidden as if still padding (silently wrong logits)."""
    model, masks = (
        build(name),
        (left_pad_mask(0, 9), left_pad_mask(0, 7), left_pad_mask(0, 7), left_pad_mask(0, 7)),
    )
    expected = cropped_logits(model, DynamicCache(config=model.config), 7, masks, count)
    if attached:
        kvant.attach(model, guard=False)
    declared = cropped_logits(
        model, kvant.cache_for(model, attention_mask=masks[0]), 7, masks, count
    )
    assert relative_difference(expected, declared) < 1e-4


@pytest.mark.parametrize("after", [None, left_pad_mask(0, 0)])
def test_declared_padding_cannot_be_shown_after_a_crop(after: Tensor | None) -> None:
    """It is not stored. Transformers omits a mask of ones, which hides nothing either."""
    model = build("llama")
    cache = kvant.cache_for(model, attention_mask=left_pad_mask(0, 9)[:, :12])
    with pytest.raises(kvant.CacheError, match=r"\[0, 7\].*padding is not stored.*attention_mask"):
        cropped_logits(model, cache, 7, (left_pad_mask(0, 9), after))
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize("spec", ["affine8,sinks=2", "raw,window=6,sinks=2", "raw,sinks=2"])
@pytest.mark.parametrize("after", [None, left_pad_mask(0, 0), left_pad_mask(0, 7)])
def test_crop_below_the_sinks_is_refused(spec: str, after: Tensor | None) -> None:
    """They belong to the declared columns; no other rows can become sinks afterwards."""
    model = build("llama")
    kvant.attach(model, guard=False)
    cache = kvant.cache_for(model, spec, attention_mask=left_pad_mask(0, 9)[:, :12])
    with pytest.raises(kvant.CacheError, match=r"\[0, 9\].*other beginnings.*attention_mask"):
        cropped_logits(model, cache, 7, (left_pad_mask(0, 9), after))
    assert cache.get_seq_length() == 7


@torch.no_grad()
def test_sinks_of_a_padded_sequence_survive_a_crop_into_its_padding() -> None:
    """The same tokens, padding included, give the same logits."""
    model = build("llama")
    kvant.attach(model, guard=False)
    outs = []
    for length in (7, 12):
        cache = kvant.cache_for(
            model, "raw,window=6,sinks=2", attention_mask=left_pad_mask(0, 9)[:, :12]
        )
        model(
            make_tokens(2, 12), past_key_values=cache, **with_positions(left_pad_mask(0, 9), 12, 12)
        )
        cache.crop(length - 12)
        new = torch.cat([make_tokens(2, 12)[:, length:], make_tokens(2, 6, seed=1)], 1)
        options = with_positions(left_pad_mask(0, 9), 18, new.shape[1])
        outs.append(model(new, past_key_values=cache, **options).logits[:, -6:])
    assert relative_difference(*outs) < 1e-4


@pytest.mark.parametrize("spec", ["raw", "raw,window=6,sinks=2"])
def test_crop_to_zero_drops_the_padding(spec: str) -> None:
    """Regression: another batch was hidden as if it were padded."""
    model = build("llama")
    kvant.attach(model, guard=False)
    caches = [
        kvant.cache_for(model, spec, attention_mask=m) for m in (left_pad_mask(0, 9)[:, :12], None)
    ]
    cropped_logits(model, caches[0], 0, (left_pad_mask(0, 9), left_pad_mask(0, 0)))
    for cache in caches:
        cache.crop(-100)
    expected, actual = (padded_logits(model, cache, 0, [9, 10, 11], batch=3) for cache in caches)
    assert relative_difference(expected, actual) < 1e-4


def test_reset_drops_the_padding() -> None:
    model, mask = build("llama"), torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
    cache = kvant.cache_for(model, attention_mask=mask)
    padded_logits(model, cache, 4, [12, 13])
    cache.reset()
    expected = padded_logits(model, DynamicCache(config=model.config), 0, [9, 10], batch=3)
    assert relative_difference(expected, padded_logits(model, cache, 0, [9, 10], batch=3)) < 1e-4


@torch.no_grad()
def test_modified_mask_is_read_again() -> None:
    model, ids = build("llama"), make_tokens(1, 12)
    outs = []
    for cache in (DynamicCache(config=model.config), kvant.cache_for(model)):
        model(ids, past_key_values=cache)
        mask = torch.ones(1, 1, 1, 13, dtype=torch.bool)
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
        cache.crop(-1)
        mask[..., :5] = False
        outs.append(model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits)
    assert relative_difference(*outs) < 1e-4


def test_a_lazy_mask_has_the_dtype_of_the_real_one() -> None:
    """Models build further masks from it."""
    options = {
        "batch_size": 1,
        "q_length": 2,
        "kv_length": 5,
        "q_offset": 3,
        "dtype": torch.bfloat16,
    }
    for host in (sdpa_mask, eager_mask):
        lazy = make_lazy_mask_function(host)(**options)
        assert isinstance(lazy, LazyMask)
        assert (lazy.dtype, lazy.shape) == ((lazy + 0).dtype, (lazy + 0).shape) or (
            lazy.dtype == torch.bool
        )
        assert lazy.materialize("a test").dtype == lazy.dtype


def make_handles(count: int = 1) -> tuple[Tensor, Tensor]:
    cache = kvant.cache_for(build("llama"))
    for length in (12, count):
        pairs = [
            cache.update(torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16), layer)
            for layer in range(4)
        ]
    return pairs[-1]


@pytest.mark.parametrize("change", [lambda k: k.mul_(3.0), lambda k: k[:, :, 2].zero_()])
def test_writes_to_a_handle_are_seen(change: Any) -> None:
    keys, values = make_handles()
    q = torch.randn(1, 2, 1, 16)
    before = scaled_dot_product_attention(q, keys, values)
    change(keys)
    after = scaled_dot_product_attention(q, keys, values)
    dense = scaled_dot_product_attention(q, keys.clone(), values.clone())
    assert torch.allclose(after, dense, atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-3)


def test_handle_has_its_shape_in_every_mode() -> None:
    keys, _ = make_handles()
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
    """Compute one step with a kvant cache and one with a transformers cache."""
    ids, outs = make_tokens(1, 12), []
    for cache in (kvant.cache_for(model), DynamicCache(config=model.config)):
        model(ids, past_key_values=cache)
        outs.append(model(ids[:, :1], past_key_values=cache).logits)
    return outs[0], outs[1]


def test_copy_of_a_folded_model_folds_its_own_weights() -> None:
    model = build("deepseek_v3")
    kvant.attach(model)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for layer in clone.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-1.5).add_(0.1)
    assert relative_difference(*folded_step(clone)) < 1e-4


def test_adapter_on_a_folded_projection_is_applied() -> None:
    model = build("deepseek_v3")
    kvant.attach(model)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *args: args[-1] * 1.5)
    assert relative_difference(*folded_step(model)) < 1e-4


def test_eager_subclass_finds_its_attention() -> None:
    class Mine(Gemma2Attention): ...

    model = build("gemma2")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine
    kvant.attach(model)
    model.generate(make_tokens(1, 12), max_new_tokens=3)


@torch.no_grad()
def test_single_kv_head_accepts_a_mask_per_head() -> None:
    model = build("llama", num_key_value_heads=1)
    ids, outs = make_tokens(1, 9), []
    mask = torch.ones(1, 4, 1, 10, dtype=torch.bool)
    mask[:, 1, :, :4] = False
    for cache in (DynamicCache(config=model.config), kvant.cache_for(model)):
        model(ids, past_key_values=cache)
        outs.append(model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits)
    assert relative_difference(*outs) < 1e-4


def test_draft_longer_than_the_window_can_be_rewound() -> None:
    model = build("mistral")
    ids = torch.cat([make_tokens(1, 24)] * 5 + [make_tokens(1, 24)[:, :5]], 1)
    arguments = {"max_new_tokens": 120, "min_new_tokens": 120, "do_sample": False}
    plain = model.generate(ids, **arguments)
    drafted = model.generate(
        ids, prompt_lookup_num_tokens=80, past_key_values=kvant.cache_for(model), **arguments
    )
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("spec", ["raw", "raw,window=400"])
def test_long_drafts_after_a_convolution_are_verified(spec: str) -> None:
    """Regression: the slack grew within a forward, which ended states of its first layers."""
    model = build("lfm2")
    ids = torch.arange(3, 128).repeat(2)[None]
    arguments = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
    plain = model.generate(ids, **arguments)
    with kvant.attach(model, spec, guard=False):
        drafted = model.generate(ids, prompt_lookup_num_tokens=80, **arguments)
    assert torch.equal(plain, drafted)


def test_states_are_not_recorded_after_speculation() -> None:
    """Regression: convolutions recorded every later token, without a limit."""
    model, ids = build("lfm2"), make_tokens(1, 40)
    arguments = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    cache = kvant.cache_for(model)
    out = model.generate(ids, prompt_lookup_num_tokens=3, past_key_values=cache, **arguments)
    out = torch.cat([out, ids[:, :4]], 1)
    again = model.generate(out, past_key_values=cache, **arguments)
    states = cache.layers[0].conv_states[0]
    assert states.shape[-1] == model.config.conv_L_cache and torch.equal(
        again, model.generate(out, **arguments)
    )


def test_generate_does_not_compile_a_model_with_our_cache() -> None:
    assert not kvant.cache_for(build("mamba")).is_compileable


@torch.no_grad()
def test_speculated_chunk_does_not_read_its_newest_rows() -> None:
    """A model that needs dense rows cannot have different ones per token."""
    model = build("bloom")
    cache = kvant.cache_for(model, make_small_spec("affine4"))
    model(make_tokens(1, 10), past_key_values=cache)
    cache.activate_past_recording()
    with pytest.raises(UnsupportedView, match=r"speculation.*raw"):
        model(make_tokens(1, 6), past_key_values=cache)
    assert cache.get_seq_length() == 10


def test_layers_without_rows_are_reported_even_token_by_token() -> None:
    cache = kvant.cache_for(build("llama"))
    rows = torch.zeros(1, 2, 1, 16)
    with pytest.raises(kvant.CacheError, match=r"no rows to layers \[3\]"):
        for _ in range(3):
            for layer in range(3):
                cache.update(rows, rows, layer)
