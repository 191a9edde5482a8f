"""Test operations under their transformers names, and misuse of their results."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvant
from hf.zoo import FAMILIES, build, valid_spec
from kvant import CacheError, CapacityError, RewindError
from kvant.hf import TransformersCache, layers

SPECS = ("raw", "affine8", "turbo4v4", "raw,window=16,sinks=2")


def make_rows(first: int, count: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Return keys and values whose value is their position, plus a thousand per sequence."""
    place = torch.arange(first, first + count, dtype=torch.float32).view(1, 1, -1, 1)
    keys = (place + 1000 * torch.arange(batch).view(-1, 1, 1, 1)).expand(batch, 2, count, 16)
    return keys.clone(), -keys


def forward(cache: TransformersCache, count: int, batch: int = 1) -> list[tuple[Tensor, Tensor]]:
    first = cache.get_seq_length()
    return [cache.update(*make_rows(first, count, batch), i) for i in range(len(cache))]


def make_cache(
    count: int = 20, spec: str = "raw", batch: int = 1, name: str = "llama"
) -> TransformersCache:
    cache = kvant.cache_for(build(name), spec)
    forward(cache, count, batch)
    return cache


def read_positions(cache: TransformersCache, sequence: int = 0, layer: int = 0) -> list[int]:
    keys, _ = cache.states[layer].read()
    return [round(x) for x in keys[sequence, 0, :, 0].tolist()]


def test_crop_accepts_negative_counts_like_transformers() -> None:
    cache = make_cache(20)
    with pytest.raises(ValueError, match=r"crop\(3\): a negative number"):
        cache.crop(3)
    cache.crop(0)
    assert cache.get_seq_length() == 20
    cache.crop(-3)
    assert cache.get_seq_length() == 17
    cache.crop(-100)
    assert cache.get_seq_length() == 0


def test_crop_that_one_layer_refuses_changes_none() -> None:
    """The model of this family has sliding layers next to full ones."""
    cache = make_cache(100, name="gemma3")
    with pytest.raises(RewindError, match="layer 0"):
        cache.crop(-60)
    assert {layer.length for layer in cache.states} == {100}


@pytest.mark.parametrize("spec", SPECS)
def test_selection_repeats_and_reorders(spec: str) -> None:
    cache = make_cache(12, spec, batch=3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    assert [read_positions(cache, b)[0] // 1000 for b in range(4)] == [2, 2, 0, 0]
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    assert [read_positions(cache, b)[0] // 1000 for b in range(4)] == [0, 2, 2, 2]
    cache.batch_select_indices(torch.tensor([True, False, False, False]))
    assert cache.states.batch == 1


INDICES = {
    "a tuple": (0, 2),
    "a list": [2, 0, 0],
    "a list of truths": [True, False, True],
    "counted from the end": torch.tensor([-1, 0]),
    "a slice": slice(1, None),
    "32 bits": torch.tensor([2, 1], dtype=torch.int32),
    "a mask": torch.tensor([True, False, True]),
    "a mask of bytes": torch.tensor([1, 0, 1], dtype=torch.uint8),
    "a mask too short": torch.tensor([True, False]),
    "a mask too long": torch.tensor([True, False, False, True]),
    "bytes": torch.tensor([0, 2], dtype=torch.uint8),
    "8 bits": torch.tensor([1, 0], dtype=torch.int8),
    "16 bits": torch.tensor([1, 0], dtype=torch.int16),
    "too large": torch.tensor([0, 3]),
    "too small": (-4,),
    "no numbers": torch.tensor([0.0, 1.0]),
    "words": ["a"],
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_selection_accepts_every_pytorch_index(family: str, name: str) -> None:
    """Regression: a tuple failed; short masks and 8-bit numbers were misinterpreted."""
    model, index = build(family), INDICES[name]
    ids = torch.randint(3, 128, (3, 10), generator=torch.Generator().manual_seed(0))
    # No kernel reads the prompt, so the rows of both are equal to the bit.
    ours = kvant.cache_for(model, backend="reference")
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (ours, theirs):
            model(ids, past_key_values=cache)
    try:
        theirs.batch_select_indices(index)
    except (IndexError, TypeError, ValueError) as error:
        with pytest.raises(type(error), match=r"sequences .* of a batch of 3"):
            ours.batch_select_indices(index)
        assert ours.states.batch == 3
    else:
        ours.batch_select_indices(index)
        assert torch.equal(ours.layers[-1].keys + 0, theirs.layers[-1].keys)


@pytest.mark.parametrize("index", [[], 1, torch.tensor([[0, 1]]), torch.zeros(3).bool(), None])
def test_a_selection_of_no_sequences_is_refused(index: Any) -> None:
    """Transformers would leave a cache that cannot be appended to."""
    cache = make_cache(12, batch=3)
    with pytest.raises(ValueError, match="of a batch of 3: one dimension, at least one index"):
        cache.batch_select_indices(index)
    assert cache.states.batch == 3


@pytest.mark.parametrize("index", [[-1, 0], torch.tensor([True, False, True]), [3], [0.0], [1j]])
def test_reorder_accepts_only_sequence_numbers(index: Any) -> None:
    cache = make_cache(12, batch=3)
    for verb in (cache.reorder_cache, cache.states.select):
        with pytest.raises(ValueError, match="of a batch of 3: indices from 0 to 2"):
            verb(torch.as_tensor(index))
    assert cache.states.batch == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_sequence_numbers_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    cache = make_cache(12, batch=3)
    cache.states.select(torch.tensor([2, 0], dtype=dtype))
    assert [read_positions(cache, b)[0] // 1000 for b in range(2)] == [2, 0]


def test_operations_on_an_empty_cache_do_nothing() -> None:
    cache = kvant.cache_for(build("llama"), "affine8")
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-4)
    cache.reset()
    assert (cache.get_seq_length(), cache.layers[0].keys, cache.is_initialized) == (0, None, False)


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "deepseek_v32"])
def test_cleared_cache_equals_a_new_one(name: str) -> None:
    """Memory is freed, including that of transformers layers."""
    model, cache = build(name), kvant.cache_for(build(name), valid_spec(name, "affine8"))
    ids = torch.randint(3, 128, (2, 30), generator=torch.Generator().manual_seed(0))
    outs = []
    with torch.no_grad():
        for batch in (1, 2):
            cache.clear()
            assert (cache.get_seq_length(), cache.nbytes, cache.is_initialized) == (0, 0, False)
            outs.append(model(ids[:batch], past_key_values=cache).logits[:1])
    assert torch.allclose(*outs, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v32"])
def test_trim_drops_at_most_all_tokens(name: str) -> None:
    cache = kvant.cache_for(build(name), "raw")
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        build(name)(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"trim\(-1\): 0 or more"):
        cache.trim(-1)
    assert [cache.trim(count) for count in (0, 3, 100, 1)] == [0, 3, 17, 0]
    assert cache.get_seq_length() == 0


def test_both_caches_of_an_encoder_decoder_are_trimmed_and_cleared() -> None:
    """Generated tokens are trimmed; the encoder's rows stay until a clear."""
    model, inputs = build("bart"), FAMILIES["bart"].inputs(tokens=12)
    cache, outs = kvant.cache_for(model, "raw"), []
    last = inputs["decoder_input_ids"][:, -1:]
    with torch.no_grad():
        for _ in range(2):
            model(**inputs, past_key_values=cache)
            outs += [model(**inputs | {"decoder_input_ids": last}, past_key_values=cache).logits]
            assert (cache.trim(1), cache.get_seq_length()) == (1, 12)
            outs += [model(**inputs | {"decoder_input_ids": last}, past_key_values=cache).logits]
            cache.clear()
            assert (cache.get_seq_length(), cache.cross_attention_cache.nbytes) == (0, 0)
    assert all(torch.allclose(outs[0], out, atol=1e-4) for out in outs)


def test_refused_merge_names_the_alternative() -> None:
    """Regression: it was a bare shape mismatch."""
    first, two = make_cache(12), make_cache(20)
    with pytest.raises(ValueError, match=r"change it by repeat, select or kvant.merge"):
        forward(first, 1, batch=2)
    assert (first.get_seq_length(), two.get_seq_length()) == (12, 20)


def test_reset_cache_accepts_another_batch_size() -> None:
    cache = make_cache(12, batch=2)
    cache.reset()
    forward(cache, 5, batch=3)
    assert (cache.get_seq_length(), cache.states.batch) == (5, 3)


@pytest.mark.parametrize("spec", SPECS)
def test_a_deep_copy_is_a_fork(spec: str) -> None:
    cache = make_cache(30, spec)
    clone = copy.deepcopy(cache)
    forward(cache, 3)
    clone.crop(-2)
    forward(clone, 1)
    assert (cache.get_seq_length(), clone.get_seq_length()) == (33, 29)
    assert read_positions(clone)[-1] == 28


def test_mask_sizes_equal_the_returned_keys() -> None:
    """For every type of layer: transformers sizes its masks before it appends."""
    for name in ("llama", "mistral", "gemma3", "llama4"):
        cache = kvant.cache_for(build(name), "raw")
        for count in (5, 1, 1, 6, 1):
            sizes = [cache.get_mask_sizes(count, i) for i in range(len(cache))]
            handed = forward(cache, count)
            for (length, offset), (keys, values) in zip(sizes, handed, strict=True):
                assert keys.shape[2] == values.shape[2] == length, name
                first, last = keys[0, 0, [0, -1], 0].tolist()
                assert (first, last) == (offset, cache.get_seq_length() - 1), name


def test_keys_of_an_earlier_forward_cannot_be_read() -> None:
    cache = make_cache(8)
    keys, _ = forward(cache, 1)[0]
    forward(cache, 1)
    with pytest.raises(CacheError, match="earlier forward"):
        keys + 0
    keys, _ = forward(cache, 1)[0]
    cache.crop(-1)
    with pytest.raises(CacheError, match="earlier forward"):
        keys + 0


def test_layers_expose_their_keys_and_values() -> None:
    """Cross-attention and a few models read them from there."""
    cache = make_cache(8)
    layer = cache.layers[1]
    assert layer.keys.shape == (1, 2, 8, 16)
    assert torch.equal(layer.values + 0, make_rows(0, 8)[1])


def test_single_layer_operations_are_refused() -> None:
    cache = make_cache(8)
    for verb in ("reset", "crop", "reorder_cache"):
        with pytest.raises((CacheError, TypeError)):
            getattr(cache.layers[0], verb)()


def test_exceeded_capacity_raises_and_changes_nothing() -> None:
    cache = kvant.cache_for(build("llama"), "raw,capacity=10")
    forward(cache, 10)
    with pytest.raises(CapacityError):
        forward(cache, 1)
    assert (cache.get_seq_length(), cache.get_max_length(0)) == (10, 10)


def test_layer_without_rows_raises() -> None:
    cache = kvant.cache_for(build("llama"), "raw")
    for layer in range(len(cache) - 1):
        cache.update(*make_rows(0, 5), layer)
    with pytest.raises(CacheError, match=r"no rows to layers \[3\]"):
        cache.update(*make_rows(0, 1), 0)


def test_failed_first_forward_can_be_repeated() -> None:
    cache = kvant.cache_for(build("llama"), "raw")
    for layer in range(2):
        cache.update(*make_rows(0, 5), layer)
    forward(cache, 5)
    assert cache.get_seq_length() == 5


def test_too_many_layers_raise() -> None:
    cache = make_cache(3)
    with pytest.raises(CacheError, match="rows for layer 4 of a cache for 4"):
        cache.update(*make_rows(3, 1), 4)


def test_offloaded_layers_are_loaded_back() -> None:
    cache = make_cache(80, "affine8")
    cache.offload(1)
    cache.prefetch(1)
    forward(cache, 1)
    assert read_positions(cache, layer=1)[-1] == 80


def test_memory_is_freed_with_the_cache() -> None:
    cache = make_cache(8)
    layer_ref = weakref.ref(cache.states[0])
    gc.disable()
    try:
        del cache
        assert layer_ref() is None
    finally:
        gc.enable()


def test_explain_lists_fused_and_unfused_layers() -> None:
    ids = torch.randint(3, 128, (1, 6), generator=torch.Generator().manual_seed(0))
    for name, words in (("llama", "stored pages by "), ("bloom", "made dense 2 times")):
        model = build(name)
        cache = kvant.cache_for(model, "affine8")
        assert "not read yet" in str(cache.explain())
        model.generate(ids, **{FAMILIES[name].cache_argument: cache}, max_new_tokens=3)
        assert words in str(kvant.explain(cache))


def test_lost_gradients_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    layers._warn_about_gradients.cache_clear()
    cache = kvant.cache_for(build("llama"), "raw")
    for _ in range(2):
        for layer in range(4):
            cache.update(
                torch.zeros(1, 2, 1, 16, requires_grad=True), torch.zeros(1, 2, 1, 16), layer
            )
    assert sum("no gradients" in record.message for record in caplog.records) == 1


def test_declared_padding_follows_its_sequences() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    cache = kvant.cache_for(build("llama"), "raw,sinks=2", attention_mask=mask)
    forward(cache, 4, batch=4)  # two beams of each
    assert cache.states[0].view().page_table.padding.tolist() == [2, 2, 0, 0]
    cache.reorder_cache(torch.tensor([1, 0, 2, 2]))
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache.states[0].view().page_table.padding.tolist() == [0, 2]
    assert cache.context.padding == (0, 2)


def test_batch_that_differs_from_the_mask_is_refused() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    cache = kvant.cache_for(build("llama"), "raw,sinks=2", attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask of 2.*give"):
        forward(cache, 4, batch=3)


def test_speculation_keeps_counters_and_widens_windows() -> None:
    cache = make_cache(100, "affine8", name="gemma3")
    appends = cache.stats()["appends"]
    cache.activate_past_recording()
    assert (cache.stats()["appends"], cache.get_seq_length()) == (appends, 100)
    assert {recipe.slack for recipe in cache.spec.layers} == {64}
    forward(cache, 40)
    cache.crop(-40)
    assert cache.stats()["rewinds_exact"] == len(cache)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "deepseek_v3", "falcon_h1"])
def test_per_layer_recipes_are_fitted_like_a_string(name: str) -> None:
    model = build(name)
    by_word = kvant.cache_for(model, "affine8").spec
    plain = kvant.CacheSpec(kvant.parse("affine8", len(by_word.layers)).layers)
    assert kvant.cache_for(model, plain).spec == by_word == kvant.cache_for(model, by_word).spec


def test_model_window_has_no_sinks() -> None:
    """They would be seen beyond the window."""
    for spec in ("raw,window=4,sinks=2", "raw,window=100,sinks=2", "raw,sinks=2"):
        recipe = kvant.cache_for(build("mistral"), spec).spec.layers[0]
        assert isinstance(recipe, kvant.LayerSpec)
        assert (recipe.retention.sinks, recipe.retention.window) == (0, 4 if "=4" in spec else 8)


def test_added_window_keeps_four_sinks_in_full_layers() -> None:
    model = build("gemma3")
    recipes = kvant.cache_for(model, "raw,window=5").spec.layers
    windows = {
        (layer_type, recipe.retention.sinks)
        for layer_type, recipe in zip(model.config.layer_types, recipes, strict=True)
        if isinstance(recipe, kvant.LayerSpec)
    }
    assert windows == {("full_attention", 4), ("sliding_attention", 0)}


VERBS = {
    "crop": lambda cache: cache.crop(-4),
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "restore": lambda cache: cache.restore(cache.snapshot()),
    "recode": lambda cache: cache.recode("f32"),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_shared_layers_follow_every_operation(verb: str) -> None:
    """The upper layers of this model read the rows of lower ones and store none."""
    model, ids = build("gemma3n"), torch.arange(40).view(2, 20)
    cache = kvant.cache_for(model, "raw")
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
        cache = VERBS[verb](cache) or cache
        ids = ids.flip(0) if verb == "select" else ids
        expected = model(ids, use_cache=False).logits
        length = cache.get_seq_length()
        assert length == {"crop": 8, "reset": 0}.get(verb, 12)
        logits = model(ids[:, length:], past_key_values=cache).logits
    assert (logits - expected[:, length:]).abs().max() < 1e-4 * expected.std()
    assert len(list(cache.states)) == model.config.get_text_config().num_hidden_layers // 2


@pytest.mark.parametrize("slack", [32.5, 2**62, "64"])
def test_impossible_slack_is_refused_and_changes_nothing(slack: Any) -> None:
    """Regression: later appends or saves failed."""
    cache = make_cache(20, "affine8")
    spec = cache.spec
    with pytest.raises((TypeError, kvant.SpecError)):
        cache.ensure_slack(slack)
    assert cache.spec == spec and cache.context.slack == 0
    cache.ensure_slack(torch.tensor(64))
    forward(cache, 3)
    assert cache.length == 23


def test_caches_of_different_slack_are_merged() -> None:
    """Regression: one of them was used for speculation; the advice to recode it did not help."""
    plain, speculating = make_cache(20, "affine8"), make_cache(150, "affine8")
    speculating.activate_past_recording()
    for pair in ((plain, speculating), (speculating, plain)):
        merged = kvant.merge(pair)
        assert merged.lengths == [cache.length for cache in pair]
        assert merged.context.slack == speculating.context.slack == 64
    with pytest.raises(ValueError, match=r"or call ensure_slack\(64\) of each"):
        plain.states.merge_with([speculating.states])


def test_keys_of_a_loaded_cache_are_read(tmp_path: Path) -> None:
    cache = make_cache(20, "affine8")
    kvant.save(cache, tmp_path / "a.kv")
    loaded = kvant.load(tmp_path / "a.kv", build("llama"))
    for side in ("keys", "values"):
        rows = getattr(loaded.layers[1], side)
        assert torch.equal(rows + 0, getattr(cache.layers[1], side) + 0)
