"""Layers that only the host understands: they go along where they can, or say that they cannot."""

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


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def step(name: str, model: PreTrainedModel, cache: TransformersCache, ids: Tensor) -> Tensor:
    """Logits of the last token."""
    first = cache.get_seq_length()
    arguments = {FAMILIES[name].cache_argument: cache, "use_cache": True}
    if FAMILIES[name].cache_argument == "past_key_values":
        arguments["position_ids"] = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **arguments).logits[:, -1]
    return logits


def begun(name: str, count: int = 11) -> tuple[PreTrainedModel, TransformersCache]:
    model = build(name)
    cache = kvant.cache_for(model, "raw")
    step(name, model, cache, tokens(count))
    return model, cache


@pytest.mark.parametrize("name", STATEFUL)
def test_tokens_are_counted(name: str) -> None:
    model, cache = begun(name)
    step(name, model, cache, tokens(1))
    assert cache.get_seq_length() == cache.states.length == 12


@pytest.mark.parametrize("name", STATEFUL)
def test_a_rewind_goes_back_to_a_checkpoint(name: str) -> None:
    model, cache = begun(name)
    cache.checkpoint()
    expected = step(name, model, cache, tokens(1, seed=1))
    step(name, model, cache, tokens(1, seed=2))
    cache.rewind(11)
    assert torch.equal(step(name, model, cache, tokens(1, seed=1)), expected)


@pytest.mark.parametrize("name", STATEFUL)
def test_without_a_checkpoint_there_is_no_way_back(name: str) -> None:
    model, cache = begun(name)
    step(name, model, cache, tokens(1, seed=1))
    for move in (lambda: cache.crop(-1), lambda: cache.rewind(11)):
        with pytest.raises(RewindError, match="checkpoints"):
            move()
    assert cache.get_seq_length() == 12


def test_a_turn_of_generate_ends_in_a_checkpoint() -> None:
    model, cache = begun("qwen3_next")
    ids = torch.cat([tokens(11), tokens(1, seed=1)], 1)
    model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.states.reachable(12) == 11


@pytest.mark.parametrize("name", STATEFUL)
def test_a_fork_is_independent_in_both_directions(name: str) -> None:
    model, cache = begun(name)
    twin = copy.deepcopy(cache)
    expected = step(name, model, cache, tokens(1, seed=1))
    step(name, model, cache, tokens(1, seed=2))
    assert torch.equal(step(name, model, twin, tokens(1, seed=1)), expected)
    assert twin.get_seq_length() == 12


@pytest.mark.parametrize("name", STATEFUL)
def test_a_file_carries_the_recurrent_state(name: str, tmp_path: Path) -> None:
    model, cache = begun(name)
    kvant.save(cache.states, tmp_path / "turn.safetensors")
    expected = step(name, model, cache, tokens(1, seed=1))
    loaded = kvant.load(tmp_path / "turn.safetensors")
    fresh = kvant.cache_for(model, loaded.spec)
    fresh.restore(loaded.snapshot())
    assert torch.equal(step(name, model, fresh, tokens(1, seed=1)), expected)


@pytest.mark.parametrize("name", STATEFUL)
def test_selection_takes_the_recurrent_state_along(name: str) -> None:
    model, cache = begun(name)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([1]))
    twin = kvant.cache_for(model, "raw")
    step(name, model, twin, tokens(11))
    expected = step(name, model, twin, tokens(1, seed=1))
    assert torch.allclose(step(name, model, cache, tokens(1, seed=1)), expected, atol=1e-5)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_reset_cache_begins_anew(name: str) -> None:
    model, cache = begun(name)
    expected = step(name, model, kvant.cache_for(model, "raw"), tokens(5, seed=3))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(step(name, model, cache, tokens(5, seed=3)), expected)


@pytest.mark.parametrize("name", ["zaya", "falcon_h1", "mamba2"])
def test_states_alone_are_reordered_and_forgotten(name: str) -> None:
    """After a reset they were gone, where the host's own cache has zeros."""
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
    cache.update_conv_state(conv[:1], 0)  # another batch is welcome
    assert torch.equal(cache.get_conv_state(0), conv[:1])


@pytest.mark.parametrize("first", [0, 4], ids=["empty", "held"])
@torch.no_grad()
def test_a_part_of_a_model_that_runs_alone_is_refused(first: int) -> None:
    """A state without rows was taken for what a dead forward left, and silently begun anew."""
    model = build("zaya")
    cache = kvant.cache_for(model)
    if first:
        step("zaya", model, cache, tokens(first))
    part, hidden = model.model.layers[0].self_attn.qkv_proj, torch.randn(1, 7, 64)
    part(hidden[:, :3], cache, None)
    with pytest.raises(CacheError, match=r"no rows came.*reset the|abandoned.*reset"):
        part(hidden[:, 3:], cache, None)
    cache.reset()
    expected = step("zaya", model, kvant.cache_for(model), tokens(5))
    assert torch.equal(step("zaya", model, cache, tokens(5)), expected)


def test_generation_goes_on_from_a_cache_that_generation_left() -> None:
    """From tokens and from embeddings, in parts of several tokens."""
    model, ids = build("zaya"), tokens(8)
    told = {"do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(ids, max_new_tokens=9, **told).sequences
    for mask in (False, True):
        cache, out = kvant.cache_for(model), ids
        for _ in range(3):
            given = {"attention_mask": torch.ones_like(out)} if mask else {}
            said = model.generate(out, past_key_values=cache, max_new_tokens=3, **given, **told)
            cache, out = said.past_key_values, said.sequences
        assert torch.equal(out, expected)
    embed, said_so_far = model.get_input_embeddings(), ids[:, :0]
    cache = kvant.cache_for(model)
    for _ in range(3):
        whole = embed(torch.cat([ids, said_so_far], 1))
        said = model.generate(inputs_embeds=whole, past_key_values=cache, max_new_tokens=3, **told)
        said_so_far = torch.cat([said_so_far, said.sequences], 1)
    assert torch.equal(said_so_far, expected[:, 8:])


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_forward_that_died_leaves_no_wrong_state_behind(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a recurrent layer did cannot be undone, so it is not used again before a rewind."""
    model, cache = begun(name)
    cache.checkpoint()
    expected = step(name, model, cache, tokens(1, seed=1))
    cache.rewind(11)
    attending = [i for i, layer in enumerate(cache.layer_info) if layer.attends]
    dying = cache.layers[attending[0 if place == "first" else -1]]
    with monkeypatch.context() as patch:
        patch.setattr(dying, "update", None)
        with pytest.raises(TypeError):
            step(name, model, cache, tokens(1, seed=2))
    with pytest.raises(CacheError, match="abandoned"):
        step(name, model, cache, tokens(1, seed=1))
    cache.rewind(11)
    assert torch.equal(step(name, model, cache, tokens(1, seed=1)), expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_first_forward_that_died_is_begun_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead one was noticed at the first rows, when the first state was that of the new one."""
    model = build(name)
    cache, fresh = kvant.cache_for(model, "raw"), kvant.cache_for(model, "raw")
    attending = [i for i, layer in enumerate(cache.layer_info) if layer.attends]
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[attending[-1]], "update", None)
        with pytest.raises(TypeError):
            step(name, model, cache, tokens(11, seed=1))
    for ids in (tokens(11), tokens(1)):
        expected = step(name, model, fresh, ids)
        assert torch.equal(step(name, model, cache, ids), expected)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "zamba"])
def test_tokens_of_a_forward_that_died_behind_all_rows_are_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer recurs and has not seen them, and nothing tells: who goes back is right."""
    model, cache = begun(name)
    cache.checkpoint()
    expected = step(name, model, cache, tokens(1, seed=1))
    cache.rewind(11)
    last = model.base_model.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", None)
        with pytest.raises(TypeError):
            step(name, model, cache, tokens(1, seed=2))
    assert cache.get_seq_length() == 12
    cache.rewind(11)
    assert torch.equal(step(name, model, cache, tokens(1, seed=1)), expected)


def test_what_only_the_host_understands_is_told() -> None:
    model = build("deepseek_v32")
    cache = kvant.cache_for(model, "raw")
    step("deepseek_v32", model, cache, tokens(5))
    assert "kept by transformers" in str(cache.explain())
    with pytest.raises(CacheError, match="indexed_attention"):
        cache.snapshot()


@pytest.mark.parametrize("verb", ["reorder", "move", "fork", "checkpoint", "snapshot"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_no_verb_finds_a_lost_state_again(
    verb: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = begun("jamba")
    cache.checkpoint()
    attending = [i for i, layer in enumerate(cache.layer_info) if layer.attends]
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[attending[0 if place == "first" else -1]], "update", None)
        with pytest.raises(TypeError):
            step("jamba", model, cache, tokens(1, seed=2))
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


def test_a_restore_that_is_refused_changes_nothing() -> None:
    model, cache = begun("falcon_h1")
    twin = cache.fork()
    good = cache.snapshot()
    bad = Snapshot(good.tensors, {**good.numbers, "0/attention/length": 5})
    with pytest.raises(SnapshotMismatch):
        cache.restore(bad)
    expected = step("falcon_h1", model, twin, tokens(1, seed=1))
    assert torch.equal(step("falcon_h1", model, cache, tokens(1, seed=1)), expected)
