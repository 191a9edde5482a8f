"""Test recurrent layers that only transformers understands: operations apply to them or raise."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvant
from hf.zoo import FAMILIES, build
from kvant import CacheError, RewindError, SnapshotMismatch
from kvant.contracts import Snapshot
from kvant.hf import TransformersCache

HYBRIDS = ("falcon_h1", "zaya", "qwen3_next", "jamba", "nemotron_h")
STATEFUL = (*HYBRIDS, "mamba2", "mamba")


def make_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def forward_logits(
    name: str, model: PreTrainedModel, cache: TransformersCache, ids: Tensor
) -> Tensor:
    """Return the logits of the last token."""
    first = cache.get_seq_length()
    arguments = {FAMILIES[name].cache_argument: cache, "use_cache": True}
    if FAMILIES[name].cache_argument == "past_key_values":
        arguments["position_ids"] = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **arguments).logits[:, -1]
    return logits


def make_cache(name: str, count: int = 11) -> tuple[PreTrainedModel, TransformersCache]:
    model = build(name)
    cache = kvant.cache_for(model, "raw")
    forward_logits(name, model, cache, make_tokens(count))
    return model, cache


@pytest.mark.parametrize("name", STATEFUL)
def test_tokens_are_counted(name: str) -> None:
    model, cache = make_cache(name)
    forward_logits(name, model, cache, make_tokens(1))
    assert cache.get_seq_length() == cache.states.length == 12


@pytest.mark.parametrize("name", STATEFUL)
def test_rewind_restores_a_checkpoint(name: str) -> None:
    model, cache = make_cache(name)
    cache.checkpoint()
    expected = forward_logits(name, model, cache, make_tokens(1, seed=1))
    forward_logits(name, model, cache, make_tokens(1, seed=2))
    cache.rewind(11)
    assert torch.equal(forward_logits(name, model, cache, make_tokens(1, seed=1)), expected)


@pytest.mark.parametrize("name", STATEFUL)
def test_rewind_without_a_checkpoint_is_refused(name: str) -> None:
    model, cache = make_cache(name)
    forward_logits(name, model, cache, make_tokens(1, seed=1))
    for move in (lambda: cache.crop(-1), lambda: cache.rewind(11)):
        with pytest.raises(RewindError, match="checkpoints"):
            move()
    assert cache.get_seq_length() == 12


def test_turn_of_generate_ends_in_a_checkpoint() -> None:
    model, cache = make_cache("qwen3_next")
    ids = torch.cat([make_tokens(11), make_tokens(1, seed=1)], 1)
    model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.states.reachable(12) == 11


@pytest.mark.parametrize("name", STATEFUL)
def test_fork_is_independent_both_ways(name: str) -> None:
    model, cache = make_cache(name)
    clone = copy.deepcopy(cache)
    expected = forward_logits(name, model, cache, make_tokens(1, seed=1))
    forward_logits(name, model, cache, make_tokens(1, seed=2))
    assert torch.equal(forward_logits(name, model, clone, make_tokens(1, seed=1)), expected)
    assert clone.get_seq_length() == 12


@pytest.mark.parametrize("name", STATEFUL)
def test_file_includes_the_recurrent_state(name: str, tmp_path: Path) -> None:
    model, cache = make_cache(name)
    kvant.save(cache.states, tmp_path / "turn.safetensors")
    expected = forward_logits(name, model, cache, make_tokens(1, seed=1))
    loaded = kvant.load(tmp_path / "turn.safetensors")
    fresh = kvant.cache_for(model, loaded.spec)
    fresh.restore(loaded.snapshot())
    assert torch.equal(forward_logits(name, model, fresh, make_tokens(1, seed=1)), expected)


@pytest.mark.parametrize("name", STATEFUL)
def test_selection_applies_to_the_recurrent_state(name: str) -> None:
    model, cache = make_cache(name)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([1]))
    reference = kvant.cache_for(model, "raw")
    forward_logits(name, model, reference, make_tokens(11))
    expected = forward_logits(name, model, reference, make_tokens(1, seed=1))
    assert torch.allclose(
        forward_logits(name, model, cache, make_tokens(1, seed=1)), expected, atol=1e-5
    )


@pytest.mark.parametrize("name", STATEFUL)
def test_reset_cache_starts_empty(name: str) -> None:
    model, cache = make_cache(name)
    expected = forward_logits(name, model, kvant.cache_for(model, "raw"), make_tokens(5, seed=3))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(forward_logits(name, model, cache, make_tokens(5, seed=3)), expected)


@pytest.mark.parametrize("name", ["zaya", "falcon_h1", "mamba2"])
def test_recurrent_only_cache_can_be_reordered_and_reset(name: str) -> None:
    """Regression: after a reset they were missing, where the transformers cache has zeros."""
    cache = kvant.cache_for(build(name))
    conv, state = torch.randn(2, 6, 3), torch.randn(2, 4)
    cache.update_conv_state(conv, 0)
    cache.update_recurrent_state(state, 0)
    assert cache.has_previous_state(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].conv_states[0], conv[[1, 0]])
    assert torch.equal(cache.layers[0].recurrent_states[0], state[[1, 0]])
    cache.reset()
    assert not cache.has_previous_state(0)
    assert cache.layers[0].conv_states[0].abs().sum() == 0
    assert cache.layers[0].recurrent_states[0].abs().sum() == 0
    cache.update_conv_state(conv[:1], 0)  # another batch is allowed
    assert torch.equal(cache.get_conv_state(0), conv[:1])


@pytest.mark.parametrize("first", [0, 4], ids=["empty", "held"])
@torch.no_grad()
def test_model_part_that_runs_alone_is_refused(first: int) -> None:
    """Regression: a state without rows was mistaken for an incomplete forward and silently
    reset.
    """
    model = build("zaya")
    cache = kvant.cache_for(model)
    if first:
        forward_logits("zaya", model, cache, make_tokens(first))
    part, hidden_states = model.model.layers[0].self_attn.qkv_proj, torch.randn(1, 7, 64)
    part(hidden_states[:, :3], cache, None)
    with pytest.raises(CacheError, match=r"no rows came.*reset the|abandoned.*reset"):
        part(hidden_states[:, 3:], cache, None)
    cache.reset()
    expected = forward_logits("zaya", model, kvant.cache_for(model), make_tokens(5))
    assert torch.equal(forward_logits("zaya", model, cache, make_tokens(5)), expected)


def test_generation_continues_from_a_returned_cache() -> None:
    """From tokens and from embeddings, in parts of several tokens."""
    model, ids = build("zaya"), make_tokens(8)
    options = {"do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(ids, max_new_tokens=9, **options).sequences
    for mask in (False, True):
        cache, out = kvant.cache_for(model), ids
        for _ in range(3):
            inputs = {"attention_mask": torch.ones_like(out)} if mask else {}
            generated = model.generate(
                out, past_key_values=cache, max_new_tokens=3, **inputs, **options
            )
            cache, out = generated.past_key_values, generated.sequences
        assert torch.equal(out, expected)
    embed, said_so_far = model.get_input_embeddings(), ids[:, :0]
    cache = kvant.cache_for(model)
    for _ in range(3):
        whole = embed(torch.cat([ids, said_so_far], 1))
        generated = model.generate(
            inputs_embeds=whole, past_key_values=cache, max_new_tokens=3, **options
        )
        said_so_far = torch.cat([said_so_far, generated.sequences], 1)
    assert torch.equal(said_so_far, expected[:, 8:])


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_failed_forward_leaves_no_wrong_state(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent layer cannot be undone, so it is not used again before a rewind."""
    model, cache = make_cache(name)
    cache.checkpoint()
    expected = forward_logits(name, model, cache, make_tokens(1, seed=1))
    cache.rewind(11)
    attending = [i for i, layer in enumerate(cache.layer_info) if layer.attends]
    dying = cache.layers[attending[0 if place == "first" else -1]]
    with monkeypatch.context() as patch:
        patch.setattr(dying, "update", None)
        with pytest.raises(TypeError):
            forward_logits(name, model, cache, make_tokens(1, seed=2))
    with pytest.raises(CacheError, match="abandoned"):
        forward_logits(name, model, cache, make_tokens(1, seed=1))
    cache.rewind(11)
    assert torch.equal(forward_logits(name, model, cache, make_tokens(1, seed=1)), expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_failed_first_forward_can_be_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the failure was noticed at the first rows, when the first state was already
    new.
    """
    model = build(name)
    cache, fresh = kvant.cache_for(model, "raw"), kvant.cache_for(model, "raw")
    attending = [i for i, layer in enumerate(cache.layer_info) if layer.attends]
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[attending[-1]], "update", None)
        with pytest.raises(TypeError):
            forward_logits(name, model, cache, make_tokens(11, seed=1))
    for ids in (make_tokens(11), make_tokens(1)):
        expected = forward_logits(name, model, fresh, ids)
        assert torch.equal(forward_logits(name, model, cache, ids), expected)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "zamba"])
def test_tokens_of_a_forward_that_failed_after_all_rows_are_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer is recurrent and has not seen them, without a trace: a rewind is right."""
    model, cache = make_cache(name)
    cache.checkpoint()
    expected = forward_logits(name, model, cache, make_tokens(1, seed=1))
    cache.rewind(11)
    last = model.base_model.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", None)
        with pytest.raises(TypeError):
            forward_logits(name, model, cache, make_tokens(1, seed=2))
    assert cache.get_seq_length() == 12
    cache.rewind(11)
    assert torch.equal(forward_logits(name, model, cache, make_tokens(1, seed=1)), expected)


def test_state_unknown_to_kvant_is_reported() -> None:
    model = build("deepseek_v32")
    cache = kvant.cache_for(model, "raw")
    forward_logits("deepseek_v32", model, cache, make_tokens(5))
    assert "kept by transformers" in str(cache.explain())
    with pytest.raises(CacheError, match="indexed_attention"):
        cache.snapshot()


@pytest.mark.parametrize("verb", ["reorder", "move", "fork", "checkpoint", "snapshot"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_lost_state_stays_lost_for_every_operation(
    verb: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = make_cache("jamba")
    cache.checkpoint()
    attending = [i for i, layer in enumerate(cache.layer_info) if layer.attends]
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[attending[0 if place == "first" else -1]], "update", None)
        with pytest.raises(TypeError):
            forward_logits("jamba", model, cache, make_tokens(1, seed=2))
    verbs = {
        "reorder": lambda: cache.reorder_cache(torch.tensor([0])),
        "move": lambda: cache.states.move("cpu"),
        "fork": cache.fork,
        "checkpoint": cache.checkpoint,
        "snapshot": cache.snapshot,
    }
    with pytest.raises(CacheError, match="abandoned"):
        verbs[verb]()
    cache.rewind(11)
    verbs[verb]()


def test_refused_restore_changes_nothing() -> None:
    model, cache = make_cache("falcon_h1")
    fork = cache.fork()
    good = cache.snapshot()
    bad = Snapshot(good.tensors, {**good.numbers, "0/attention/length": 5})
    with pytest.raises(SnapshotMismatch):
        cache.restore(bad)
    expected = forward_logits("falcon_h1", model, fork, make_tokens(1, seed=1))
    assert torch.equal(forward_logits("falcon_h1", model, cache, make_tokens(1, seed=1)), expected)


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "mamba", "falcon_h1"])
def test_states_of_16_bits_are_loaded_in_their_dtype(name: str, tmp_path: Path) -> None:
    """Regression: a chunk after them met states of float32."""
    model = copy.deepcopy(build(name)).bfloat16()
    cache = kvant.cache_for(model, "raw")
    forward_logits(name, model, cache, make_tokens(11))
    kvant.save(cache, tmp_path / "a.kv")
    loaded = kvant.load(tmp_path / "a.kv", model)
    for token in (1, 2):
        ids = make_tokens(5, seed=token)
        expected = forward_logits(name, model, cache, ids)
        assert torch.equal(forward_logits(name, model, loaded, ids), expected)
