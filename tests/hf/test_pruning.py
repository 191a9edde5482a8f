"""Models of transformers whose prompts are pruned: alone, side by side, drafted, in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.reading import attached, decoded, read, text
from hf.zoo import FAMILIES, build
from kvant.engine import Engine
from kvant.engine.batch import Batch, EngineSequence
from kvant.generation import TransformersDecoder, generate
from kvant.generation.decoder import make_decoder
from kvant.server.settings import ServerSettings

SPEC, ADAPTIVE = "affine8,prune=snapkv:25%", "affine8,prune=snapkv:25%:adaptive"
FAMILIES_TRIED = ("llama", "gemma3", "gpt_oss", "falcon_h1", "qwen3_next")
WHOLE = ("deepseek_v3",)  # keys and values in one


def pruned_layers(cache: Any) -> list[int]:
    """Those of which rows are gone, and only those that see all rows may be."""
    found = []
    for index, layer in cache.states.layers.items():
        attention = layer["attention"] if isinstance(layer, dict) else layer
        extent = getattr(attention, "page_table", None)
        if extent is not None and extent.pruned_at.any():
            assert attention.spec.retention.window is None
            found.append(index)
    return found


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_the_first_token_behind_a_prompt_prunes(name: str) -> None:
    model, prompt = attached(name), text(450)
    cache, plain = read(model, SPEC, prompt), read(model, "affine8", prompt)
    assert not pruned_layers(cache) and cache.length == 450
    some, every = (decoded(model, one, [450], [0]) for one in (cache, plain))
    assert pruned_layers(cache) and cache.length == 453
    assert some.isfinite().all() and not torch.equal(some, every)
    by_hand = read(model, SPEC, prompt)
    assert by_hand.prune() == 450 - 113
    assert torch.equal(decoded(model, by_hand, [450], [0]), some)
    cache.states.check()


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_what_keeps_all_changes_nothing(name: str) -> None:
    model, prompt = attached(name), text(450)
    plain, every = (
        decoded(model, read(model, spec, prompt), [450], [0])
        for spec in ("raw", "raw,prune=snapkv:100%")
    )
    assert float((plain - every).abs().max() / plain.std()) < 1e-3  # prompts are read otherwise


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_cannot_be_pruned_stay_whole(name: str) -> None:
    model, prompt = attached(name), text(200)
    cache = read(model, SPEC, prompt)
    assert not cache.spec.prunes and cache.prune() == 0


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_sequences_side_by_side_are_as_alone(name: str) -> None:
    model, lengths = attached(name), [90, 450, 400]
    assert FAMILIES[name].cache_argument == "past_key_values"
    caches = [read(model, ADAPTIVE, text(n, seed=n)) for n in lengths]
    for cache in caches:
        cache.prune()
    merged = kvant.merge(caches)
    alone = [decoded(model, caches[i], [lengths[i]], [i]) for i in range(3)]
    found, expected = decoded(model, merged, lengths, [0, 1, 2]), torch.cat(alone)
    assert float((found - expected).abs().max() / expected.std()) < 1e-3


def test_a_padded_batch_is_pruned_as_each_alone() -> None:
    model = attached("llama")
    prompts = [text(n, seed=n) for n in (90, 300)]
    ids = torch.tensor([[0] * 210 + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * 210 + [1] * 90, [1] * 300])
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cache = kvant.cache_for(model, SPEC, attention_mask=mask)
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, **given)
    for row, prompt in zip(together, prompts, strict=True):
        cache = kvant.cache_for(model, SPEC)
        alone = model.generate(torch.tensor([prompt]), past_key_values=cache, **given)
        assert torch.equal(row[-12:], alone[0, -12:])


def test_padding_that_nobody_told_is_refused() -> None:
    model = attached("llama")
    ids = torch.tensor([[0] * 210 + text(90), text(300)])
    mask = torch.tensor([[0] * 210 + [1] * 90, [1] * 300])
    cache = kvant.cache_for(model, SPEC)
    with pytest.raises(kvant.CacheError, match="attention_mask"):
        model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, pad_token_id=0
        )


def test_a_model_that_reads_dense_rows_itself_says_so() -> None:
    model, prompt = build("llama"), text(300)
    model.set_attn_implementation("eager")
    cache = read(model, "affine8,prune=keydiff:25%", prompt)
    with pytest.raises(kvant.UnsupportedView, match="pruned"):
        decoded(model, cache, [300], [0])
    with pytest.raises(kvant.CacheError, match="nobody saw"):
        read(model, SPEC, prompt).prune()


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
    given: dict[str, Any] = {"kv_cache": spec, "max_new_tokens": 300, "ignore_end": True}
    plain = [step.token for step in generate(model, Numbers(), prompt, **given)]
    other: Any = model if draft == "itself" else draft
    drafted = [step.token for step in generate(model, Numbers(), prompt, **given, draft=other)]
    assert drafted == plain


@pytest.mark.parametrize("chunk", [64, 100])
def test_where_chunks_end_changes_nothing(chunk: int) -> None:
    """257 tokens: the last chunk of 64 is a single one."""
    model, prompt = build("llama"), text(257)
    given: dict[str, Any] = {
        "kv_cache": "raw,prune=snapkv:25%",
        "max_new_tokens": 30,
        "ignore_end": True,
    }
    found = [
        [step.token for step in generate(model, Numbers(), prompt, **given, prefill_chunk=size)]
        for size in (512, chunk)
    ]
    assert found[0] == found[1]


def test_assisted_generation_prunes_as_any_other() -> None:
    model, prompt = attached("llama"), torch.tensor([text(90) * 3])
    given: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    found = []
    for more in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = kvant.cache_for(model, "raw,prune=keydiff:64")
        found.append(model.generate(prompt, past_key_values=cache, **given, **more))
        assert pruned_layers(cache)
    assert found[0].shape == found[1].shape


@pytest.mark.parametrize("kind", ["snapkv", "keydiff", "tova"])
def test_a_sequence_that_was_put_aside_goes_on(kind: str, tmp_path: Path) -> None:
    model, spec = attached("llama"), f"raw,prune={kind}:64"
    decoder = make_decoder(model)
    assert isinstance(decoder, TransformersDecoder)
    batch, said = Batch(decoder, decoder.make_cache(spec)), dict[bool, list[int]]()
    for aside in (False, True):
        seat = EngineSequence(text(300))
        logits, said[aside] = batch.prefill(seat, 300), []
        for at in range(40):
            said[aside].append(int(logits.argmax()))
            seat.tokens.append(said[aside][-1])
            rows, failed = batch.decode([seat])
            assert not failed
            logits = rows[0]
            if aside and at in (3, 20):
                batch.swap_out(seat, tmp_path / f"{at}")
                batch.swap_in(seat)
        batch.release(seat)
    assert said[True] == said[False]


@pytest.mark.parametrize("spec", [ADAPTIVE, "affine4,prune=keydiff:64"])
def test_an_engine_gives_what_each_gives_alone(spec: str) -> None:
    model, prompts = build("llama"), [text(n, seed=n) for n in (80, 450, 400)]
    given: dict[str, Any] = {"max_new_tokens": 150, "ignore_end": True}
    alone = [list(generate(model, Numbers(), prompt, kv_cache=spec, **given)) for prompt in prompts]
    with Engine(model, Numbers(), spec) as engine:
        streams = [engine.submit(prompt, **given) for prompt in prompts]
        for stream, steps in zip(streams, alone, strict=True):
            for own, step in zip(stream, steps, strict=True):
                assert own.logprob == pytest.approx(step.logprob, abs=5e-3)
                if own.token != step.token:
                    break  # two tokens that were as likely: a sum in another order decided


def test_a_conversation_goes_on(tmp_path: Path) -> None:
    model = build("llama")
    given: dict[str, Any] = {"max_new_tokens": 8, "ignore_end": True}
    session, held = kvant.Session(model, Numbers(), SPEC), []
    for seed in range(3):
        list(session.send(text(120, seed=seed), **given))
        held.append(int((session.cache.states[0].positions() >= 0).sum(-1).max()))
    # A quarter of the tokens so far (and no fewer than 32), and the reply but for its last token.
    assert held == [32 + 7, 248 // 4 + 7, 376 // 4 + 7]
    assert session.stats()["tokens_reused"] == 127 + 255
    session.save(tmp_path / "talk")
    back = kvant.Session.load(tmp_path / "talk", model, Numbers())
    for one in (session, back):
        list(one.send(text(50, seed=9), **given))
    assert back.tokens == session.tokens


def test_nothing_of_it_is_shared() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="leave the prune out"):
        Engine(model, Numbers(), SPEC, prefixes=kvant.Prefixes())
    settings = ServerSettings(kv_cache=SPEC)
    settings.check()
    assert not settings.shares_prefixes
    assert (
        ServerSettings(kv_cache="affine8").shares_prefixes
        and ServerSettings(kv_cache="auto:1GiB").shares_prefixes
    )
    with pytest.raises(kvant.SpecError, match="a store beside"):
        ServerSettings(kv_cache=SPEC, store=["memory"]).check()


def test_a_recode_to_another_format_goes_on_pruning() -> None:
    model, prompt = attached("llama"), text(300)
    cache = read(model, "raw,prune=keydiff:64", prompt)
    cache.recode("affine8")
    assert decoded(model, cache, [300], [0]).isfinite().all() and pruned_layers(cache)
    cache.recode("affine4")
    assert cache.spec.prunes and cache.length == 303
    with pytest.raises(kvant.SpecError, match="does not come back"):
        cache.recode("affine8,window=400,sinks=0")


def test_rows_go_by_a_prune_or_by_a_budget() -> None:
    with pytest.raises(ValueError, match="a budget beside a prune"):
        kvant.Session(build("llama"), Numbers(), SPEC, strategy="adaptive", budget="1MiB")
