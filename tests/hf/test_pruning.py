"""Test transformers models with pruned prompts: alone, batched, with drafts, in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.reading import decode_logits, make_attached_model, prefill_prompt, text
from hf.zoo import FAMILIES, build
from kvant.engine import Engine
from kvant.engine.batch import Batch
from kvant.engine.request import Sequence
from kvant.generation import TransformersDecoder, generate
from kvant.generation.decoder import make_decoder
from kvant.server.settings import ServerSettings

SPEC, ADAPTIVE = "affine8,prune=snapkv:25%", "affine8,prune=snapkv:25%:adaptive"
FAMILIES_TRIED = ("llama", "gemma3", "gpt_oss", "falcon_h1", "qwen3_next")
WHOLE = ("deepseek_v3",)  # keys and values in one stream


def list_pruned_layers(cache: Any) -> list[int]:
    """Return the layers with evicted rows; only full-attention layers may have any."""
    layers = []
    for index, layer in cache.states.layers.items():
        attention = layer["attention"] if isinstance(layer, dict) else layer
        page_table = getattr(attention, "page_table", None)
        if page_table is not None and page_table.pruned_at.any():
            assert attention.spec.retention.window is None
            layers.append(index)
    return layers


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_first_token_after_a_prompt_prunes(name: str) -> None:
    model, prompt = make_attached_model(name), text(450)
    cache, plain = prefill_prompt(model, SPEC, prompt), prefill_prompt(model, "affine8", prompt)
    assert not list_pruned_layers(cache) and cache.length == 450
    pruned_logits, every = (decode_logits(model, cache_, [450], [0]) for cache_ in (cache, plain))
    assert list_pruned_layers(cache) and cache.length == 453
    assert pruned_logits.isfinite().all() and not torch.equal(pruned_logits, every)
    by_hand = prefill_prompt(model, SPEC, prompt)
    assert by_hand.prune() == 450 - 113
    assert torch.equal(decode_logits(model, by_hand, [450], [0]), pruned_logits)
    cache.state.pools.check()


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_prune_that_keeps_all_changes_nothing(name: str) -> None:
    model, prompt = make_attached_model(name), text(450)
    plain, every = (
        decode_logits(model, prefill_prompt(model, spec, prompt), [450], [0])
        for spec in ("raw", "raw,prune=snapkv:100%")
    )
    # prompts are read in another order
    assert float((plain - every).abs().max() / plain.std()) < 1e-3


@pytest.mark.parametrize("name", WHOLE)
def test_layers_without_prune_support_stay_whole(name: str) -> None:
    model, prompt = make_attached_model(name), text(200)
    cache = prefill_prompt(model, SPEC, prompt)
    assert not cache.spec.prunes and cache.prune() == 0


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_batched_sequences_prune_as_alone(name: str) -> None:
    model, lengths = make_attached_model(name), [90, 450, 400]
    assert FAMILIES[name].cache_argument == "past_key_values"
    caches = [prefill_prompt(model, ADAPTIVE, text(n, seed=n)) for n in lengths]
    for cache in caches:
        cache.prune()
    merged = kvant.merge(caches)
    single = [decode_logits(model, caches[i], [lengths[i]], [i]) for i in range(3)]
    actual, expected = decode_logits(model, merged, lengths, [0, 1, 2]), torch.cat(single)
    assert float((actual - expected).abs().max() / expected.std()) < 1e-3


def test_padded_batch_prunes_each_sequence_as_alone() -> None:
    model = make_attached_model("llama")
    prompts = [text(n, seed=n) for n in (90, 300)]
    ids = torch.tensor([[0] * 210 + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * 210 + [1] * 90, [1] * 300])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cache = kvant.cache_for(model, SPEC, attention_mask=mask)
    batched = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    for row, prompt in zip(batched, prompts, strict=True):
        cache = kvant.cache_for(model, SPEC)
        single = model.generate(torch.tensor([prompt]), past_key_values=cache, **options)
        assert torch.equal(row[-12:], single[0, -12:])


def test_undeclared_padding_is_refused() -> None:
    model = make_attached_model("llama")
    ids = torch.tensor([[0] * 210 + text(90), text(300)])
    mask = torch.tensor([[0] * 210 + [1] * 90, [1] * 300])
    cache = kvant.cache_for(model, SPEC)
    with pytest.raises(kvant.CacheError, match="attention_mask"):
        model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, pad_token_id=0
        )


def test_model_that_reads_dense_rows_itself_is_refused() -> None:
    model, prompt = build("llama"), text(300)
    model.set_attn_implementation("eager")
    cache = prefill_prompt(model, "affine8,prune=keydiff:25%", prompt)
    with pytest.raises(kvant.UnsupportedView, match="after a prune"):
        decode_logits(model, cache, [300], [0])
    with pytest.raises(kvant.CacheError, match="were not recorded"):
        prefill_prompt(model, SPEC, prompt).prune()


PRUNED = (ADAPTIVE, "affine4,prune=keydiff:64", "raw,prune=tova:64")


@pytest.mark.parametrize(
    ("spec", "draft"),
    [
        *((spec, "ngram") for spec in PRUNED),
        (PRUNED[1], "itself"),
        *(pytest.param(spec, "itself", marks=pytest.mark.laws) for spec in PRUNED[::2]),
    ],
)
def test_drafts_change_nothing(spec: str, draft: str) -> None:
    model, prompt = build("llama"), text(90) * 2
    options: dict[str, Any] = {"kv_cache": spec, "max_new_tokens": 150, "ignore_end": True}
    plain = [step.token for step in generate(model, Numbers(), prompt, **options)]
    other: Any = model if draft == "itself" else draft
    drafted = [step.token for step in generate(model, Numbers(), prompt, **options, draft=other)]
    assert drafted == plain


@pytest.mark.parametrize("chunk", [64, 100])
def test_chunk_boundaries_change_nothing(chunk: int) -> None:
    """257 tokens: the last chunk of 64 has a single token."""
    model, prompt = build("llama"), text(257)
    options: dict[str, Any] = {
        "kv_cache": "raw,prune=snapkv:25%",
        "max_new_tokens": 30,
        "ignore_end": True,
    }
    replies = [
        [step.token for step in generate(model, Numbers(), prompt, **options, prefill_chunk=size)]
        for size in (512, chunk)
    ]
    assert replies[0] == replies[1]


def test_assisted_generation_prunes_too() -> None:
    model, prompt = make_attached_model("llama"), torch.tensor([text(90) * 3])
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    replies = []
    for more in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = kvant.cache_for(model, "raw,prune=keydiff:64")
        replies.append(model.generate(prompt, past_key_values=cache, **options, **more))
        assert list_pruned_layers(cache)
    assert replies[0].shape == replies[1].shape


@pytest.mark.parametrize("place", ["snapkv", "keydiff", "tova"])
def test_swapped_out_sequence_continues(place: str, tmp_path: Path) -> None:
    model, spec = make_attached_model("llama"), f"raw,prune={place}:64"
    decoder = make_decoder(model)
    assert isinstance(decoder, TransformersDecoder)
    batch, replies = Batch(decoder, decoder.make_cache(spec)), dict[bool, list[int]]()
    for aside in (False, True):
        seat = Sequence(text(300))
        logits, replies[aside] = batch.prefill(seat, 300), []
        for position in range(40):
            replies[aside].append(int(logits.argmax()))
            seat.tokens.append(replies[aside][-1])
            rows, failed = batch.decode([seat])
            assert not failed
            logits = rows[0]
            if aside and position in (3, 20):
                batch.caches.swap_out(seat, tmp_path / f"{position}", is_decoding=True)
                batch.caches.swap_in(seat, model)
        batch.caches.release([seat])
    assert replies[True] == replies[False]


@pytest.mark.parametrize("spec", [ADAPTIVE, "affine4,prune=keydiff:64"])
def test_engine_tokens_equal_those_of_each_alone(spec: str) -> None:
    model, prompts = build("llama"), [text(n, seed=n) for n in (80, 450, 400)]
    options: dict[str, Any] = {"max_new_tokens": 150, "ignore_end": True}
    single = [
        list(generate(model, Numbers(), prompt, kv_cache=spec, **options)) for prompt in prompts
    ]
    with Engine(model, Numbers(), spec, chunk_seconds=60) as engine:  # chunks as `generate` has
        streams = [engine.submit(prompt, **options) for prompt in prompts]
        for stream, steps in zip(streams, single, strict=True):
            for step_, step in zip(stream, steps, strict=True):
                assert step_.logprob == pytest.approx(step.logprob, abs=5e-3)
                if step_.token != step.token:
                    break  # two tokens were equally likely: the order of sums decided


def test_conversation_continues(tmp_path: Path) -> None:
    model = build("llama")
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_end": True}
    session, lengths = kvant.Session(model, Numbers(), SPEC), []
    for seed in range(3):
        list(session.send(text(120, seed=seed), **options))
        lengths.append(int((session.cache.states[0].positions() >= 0).sum(-1).max()))
    # A quarter of the tokens so far (and at least 32), and the reply but for its last token.
    assert lengths == [32 + 7, 248 // 4 + 7, 376 // 4 + 7]
    assert session.stats()["tokens_reused"] == 127 + 255
    session.save(tmp_path / "talk")
    loaded = kvant.Session.load(tmp_path / "talk", model, Numbers())
    for session_ in (session, loaded):
        list(session_.send(text(50, seed=9), **options))
    assert loaded.tokens == session.tokens


def test_pruned_caches_share_no_prefix() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="remove the prune from the spec"):
        Engine(model, Numbers(), SPEC, prefixes=kvant.Prefixes())
    settings = ServerSettings(kv_cache=SPEC)
    settings.check()
    assert not settings.shares_prefixes
    assert (
        ServerSettings(kv_cache="affine8").shares_prefixes
        and ServerSettings(kv_cache="auto:1GiB").shares_prefixes
    )
    with pytest.raises(kvant.SpecError, match="--store with --kv-cache"):
        ServerSettings(kv_cache=SPEC, store=["memory"]).check()


def test_recode_to_another_format_keeps_pruning() -> None:
    model, prompt = make_attached_model("llama"), text(300)
    cache = prefill_prompt(model, "raw,prune=keydiff:64", prompt)
    cache.recode("affine8")
    assert decode_logits(model, cache, [300], [0]).isfinite().all() and list_pruned_layers(cache)
    cache.recode("affine4")
    assert cache.spec.prunes and cache.length == 303
    with pytest.raises(kvant.SpecError, match="cannot be restored"):
        cache.recode("affine8,window=400,sinks=0")


def test_prune_and_budget_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match="a budget and a prune"):
        kvant.Session(build("llama"), Numbers(), SPEC, strategy="adaptive", budget="1MiB")


def test_prompts_after_speculation_are_pruned_again() -> None:
    """Regression: every later chunk counted as a draft, and the prompt of drafts took slack."""
    model, rows = build("llama"), list[int]()
    for options in ({"prompt_lookup_num_tokens": 3}, {}):
        cache = kvant.cache_for(model, "raw,prune=snapkv:25%")
        ids = torch.randint(3, 128, (1, 100), generator=torch.Generator().manual_seed(0))
        arguments = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
        first = model.generate(ids, past_key_values=cache, **arguments, **options)
        assert cache.states.spec.layers[0].slack <= 64
        later = torch.cat([first, ids.flip(1)], 1)
        model.generate(later, past_key_values=cache, **arguments)
        rows.append(cache.num_rows)
    assert rows[0] < 100 and abs(rows[0] - rows[1]) < 10
