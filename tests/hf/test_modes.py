"""Test that every way to generate gives the tokens of the transformers cache, or is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import kvant
from hf.modes import LONG_DRAFT, MODES, Player, make_draft, make_repetitive, play_mode
from hf.parity import (
    BATCHES,
    PAGE,
    PROMPT,
    TOLERANCE,
    Batch,
    Text,
    Way,
    deviation,
    make_transformers_cache,
    model_of,
    prepare_model,
    run_forwards,
    text_of,
    with_small_pages,
)
from hf.zoo import FAMILIES
from kvant import CacheError, RewindError, SpecError, UnsupportedView
from kvant.recipes import LayerSpec
from thin import thin_rows

NAMES = (
    "llama",
    "falcon",
    "bloom",
    "mistral",
    "gemma3",
    "gpt_oss",
    "llama4",
    "gemma3n",
    "deepseek_v3",
    "mamba2",
    "falcon_h1",
    "lfm2",
    "bart",
)
SPECULATION = ("prompt lookup", "assisted", "assisted far", "assisted by ours")


def refusal(mode: str, name: str) -> tuple[type[Exception], str] | None:
    """Return why transformers refuses this, whatever the cache."""
    family_kind = FAMILIES[name].kind
    if mode in SPECULATION and model_of(name)._is_stateful:
        return ValueError, "not supported with stateful models"
    if mode == "in and out of inference mode" and family_kind in ("recurrent", "hybrid"):
        return RuntimeError, "Inplace update to inference tensor"  # in layers of transformers
    return None


@pytest.mark.parametrize(("mode", "name"), thin_rows(itertools.product(MODES, NAMES)))
def test_tokens_equal_those_of_transformers(mode: str, name: str) -> None:
    expected, owners = refusal(mode, name), ("stock", "attached")
    if mode == "chunked prompt" and FAMILIES[name].kind == "recurrent":
        with pytest.raises(ValueError, match="only be called on Attention layers"):
            play_mode(mode, name, "host")
        tokens = play_mode("greedy", name, "host")
        assert all(torch.equal(play_mode(mode, name, owner), tokens) for owner in owners)
    elif expected is None:
        tokens = play_mode(mode, name, "host")
        assert all(torch.equal(play_mode(mode, name, owner), tokens) for owner in owners)
    else:
        for owner in ("host", *owners):
            with pytest.raises(expected[0], match=expected[1]):
                play_mode(mode, name, owner)


# ---- compressed


@pytest.mark.parametrize(
    ("name", "spec"),
    (
        pytest.param("llama", "affine8", marks=pytest.mark.laws),
        pytest.param("llama", "affine4", marks=pytest.mark.laws),
        pytest.param("llama", "turbo4v4", marks=pytest.mark.laws),
        pytest.param("falcon", "affine4", marks=pytest.mark.laws),
        pytest.param("mistral", "turbo4v4", marks=pytest.mark.laws),
        ("gemma3", "affine8"),
        ("llama4", "affine4"),
        pytest.param("deepseek_v3", "affine8", marks=pytest.mark.laws),
        ("lfm2", "turbo4v4"),
        ("bart", "affine8"),
    ),
)
def test_speculation_changes_no_token_of_a_format(name: str, spec: str) -> None:
    """A verified chunk sees what single tokens would have seen, page by page.

    Transformers puts the first draft into the prompt's forward, so prompts follow the rule too.
    """
    recipe, family = with_small_pages(spec, prefill="stored"), FAMILIES[name]
    with prepare_model(model_of(name), "attached", recipe) as model:
        player = Player(model, family, "attached", recipe)
        text, length = make_repetitive(player.text()), {"max_new_tokens": LONG_DRAFT + PAGE}
        expected = player.play(text, **length)
        assert torch.equal(player.play(text, prompt_lookup_num_tokens=3, **length), expected)
        for tokens in (5, LONG_DRAFT):
            tokens_ = player.play(text, assistant_model=make_draft(name, tokens), **length)
            assert torch.equal(tokens_, expected)


def together(name: str, spec: LayerSpec) -> float:
    """Return the difference between a draft in the forward of its prompt and single tokens."""
    family, text = FAMILIES[name], text_of(FAMILIES[name])
    single = run_forwards(
        model_of(name), family, kvant.cache_for(model_of(name), spec), text, (PROMPT,)
    )
    cache = kvant.cache_for(model_of(name), spec)
    cache.activate_past_recording()
    run = run_forwards(model_of(name), family, cache, text, (PROMPT + 5,))
    return deviation(run.logits, single.logits, text)


def test_first_draft_sees_the_rows_of_decoded_tokens() -> None:
    assert together("falcon", with_small_pages("affine8", prefill="stored")) < TOLERANCE


@pytest.mark.xfail(strict=True, reason="the host tells no cache where the prompt ends")
def test_first_draft_after_a_dense_prompt_sees_the_rows_of_decoded_tokens() -> None:
    assert together("falcon", with_small_pages("affine8")) < TOLERANCE


def test_gemma4_prompt_with_stored_prefill() -> None:
    spec = with_small_pages("affine8", prefill="stored")
    with prepare_model(model_of("gemma4"), "attached", spec) as model:
        Player(model, FAMILIES["gemma4"], "attached", spec).play()


@pytest.mark.parametrize("name", ("llama", "mistral", "lfm2"))
def test_drafts_are_partly_accepted(name: str) -> None:
    """Otherwise rewinds, or accepted drafts, would not be tested."""
    player = Player(model_of(name), FAMILIES[name], "stock")
    cache, lengths, assistant = player.cache(), [], make_draft(name)
    hook = player.model.register_forward_pre_hook(lambda *_: lengths.append(cache.states.length))
    player.play(cache=cache, assistant_model=assistant, max_new_tokens=40)
    hook.remove()
    accepted = {after - before for before, after in itertools.pairwise(lengths[1:-1])}
    assert min(accepted) < 6 and max(accepted) > 1  # five guesses and the token after them


# ---- a window that the model does not have

POLICY = "raw,window=16,sinks=4"
WINDOWED = ("llama", "qwen3", "gpt2", "falcon", "opt", "deepseek_v3", "falcon_h1", "lfm2")


@torch.no_grad()
def windowed_logits(name: str, text: Text, sinks: int = 4) -> Tensor:
    """Return logits of eager attention over DynamicCache, with the policy as an explicit mask.

    Each sequence runs alone, so that none has padding.
    """
    model, family = model_of(name, "eager"), FAMILIES[name]
    logits = torch.zeros(*text.ids.shape, model.config.vocab_size)
    for row, real in enumerate(text.real):
        q = torch.arange(int(real.sum()))
        visible = (q <= q[:, None]) & ((q[:, None] - q < 16) | (q < sinks))
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        logits[row, real] = model(
            text.ids[row : row + 1, real],
            attention_mask=mask[None, None],
            position_ids=q[None],
            past_key_values=make_transformers_cache(model, family),
        ).logits[0]
    return logits


@pytest.mark.parametrize(
    ("name", "chunks", "batch"),
    thin_rows(itertools.product(WINDOWED, ((PROMPT,), (13, 11)), BATCHES)),
    ids=str,
)
def test_policy_window_equals_its_mask(name: str, chunks: tuple[int, ...], batch: Batch) -> None:
    text = text_of(FAMILIES[name], batch)
    expected = windowed_logits(name, text)
    padding_mask = None if text.mask is None else text.mask[:, :PROMPT]
    for way in ("stock", "attached"):
        if way == "stock" and name == "deepseek_v3":
            continue  # refused, see below
        with prepare_model(model_of(name), way, POLICY) as model:
            cache = kvant.cache_for(model, POLICY, attention_mask=padding_mask)
            run = run_forwards(model, FAMILIES[name], cache, text, chunks)
        assert deviation(run.logits, expected, text) < TOLERANCE
        assert run.decoding.materialized == 0 == run.prompt.materialized


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ("llama", "gpt2", "deepseek_v3"))
def test_generating_with_a_policy_window(name: str, batch: Batch) -> None:
    """An attached model declares the padding to its cache."""
    family = FAMILIES[name]
    with prepare_model(model_of(name), "attached", POLICY) as model:
        generated = greedy_with(Player(model, family, "attached", POLICY), batch)
    expected = windowed_logits(name, generated)[:, PROMPT - 1 : -1].argmax(-1)
    assert torch.equal(generated.ids[:, PROMPT:], expected)


def greedy_with(player: Player, batch: Batch) -> Text:
    """Return the prompt and the reply."""
    prompt = player.text(batch)
    ids = player.play(prompt, max_new_tokens=20)
    if prompt.mask is None:
        return Text(ids, None, {})
    new = ids.shape[1] - PROMPT
    return Text(ids, torch.nn.functional.pad(prompt.mask, (0, new), value=1), {})


# ---- unsupported by a family


@pytest.mark.parametrize("name", ("t5", "bart", "whisper"))
def test_a_window_on_an_encoder_decoder_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="cross-attention needs every row"):
        kvant.cache_for(model_of(name), "raw,window=16")


@pytest.mark.parametrize("name", ("bloom", "deepseek_v3", "diffllama"))
def test_window_that_dense_rows_would_not_show_is_refused(name: str) -> None:
    """For a stock model: attached, kvant's attention reads the latents."""
    model, family = model_of(name), FAMILIES[name]
    with pytest.raises(UnsupportedView, match="only kvant's attention applies a window"):
        run_forwards(model, family, kvant.cache_for(model, POLICY), text_of(family), (PROMPT,))


@pytest.mark.parametrize("way", ("stock", "attached"))
def test_sinks_with_undeclared_padding_are_refused(way: Way) -> None:
    """The sinks would be padding."""
    family = FAMILIES["llama"]
    with prepare_model(model_of("llama"), way, POLICY) as model:
        cache = kvant.cache_for(model, POLICY)
        with pytest.raises(CacheError, match="need the padding before the first rows"):
            run_forwards(model, family, cache, text_of(family, 2), (PROMPT,))


@pytest.mark.parametrize("way", ("stock", "attached"))
def test_a_window_without_sinks_needs_no_padding(way: Way) -> None:
    spec, name = "raw,window=16,sinks=0", "llama"
    text = text_of(FAMILIES[name], 2)
    expected = windowed_logits(name, text, sinks=0)
    with prepare_model(model_of(name), way, spec) as model:
        run = run_forwards(model, FAMILIES[name], kvant.cache_for(model, spec), text, (PROMPT,))
    assert deviation(run.logits, expected, text) < TOLERANCE


@pytest.mark.parametrize("name", ("falcon_h1", "qwen3_next", "mamba2"))
def test_rewind_without_a_checkpoint_is_refused(name: str) -> None:
    player = Player(model_of(name), FAMILIES[name], "stock")
    cache = player.cache()
    player.play(cache=cache)
    with pytest.raises(RewindError, match="checkpoint"):
        cache.crop(-3)
