"""Test draft models in the engine: every reply is the one without drafts, whatever they propose."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from engine.test_drafts import REPLY, make_repetitive_prompts, submit_all
from engine.test_engine import make_engine, make_prompts, no_leaks, wait_until_idle
from generation.speakers import DEMO, model_of, tokenizer_of
from hf.zoo import build
from kvant.engine.drafts import MAX_FAILURES, PROBE_INTERVAL, ModelDrafts
from kvant.generation import Grammar
from kvant.hf import get_attachments
from kvant.weights import packing
from thin import thin_rows

pytestmark = pytest.mark.usefixtures(no_leaks.__name__)
every_draft_is_verified = pytest.mark.usefixtures("every_draft_is_verified")
HYBRIDS = ("falcon_h1", "qwen3_next")
SPECS = ("raw", "affine8", "affine4,window=30,sinks=4")
CELLS = [(name, spec) for name in ("llama", "gemma3", *HYBRIDS) for spec in SPECS]


def make_noisy_copy(model: Any, noise: float = 0.02) -> Any:
    """Return a draft model that often agrees with `model`."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            change = torch.randn(weight.shape, generator=generator) * weight.std()
            weight += noise * change.nan_to_num()
    return draft


def count_drafts(stats: dict[str, Any]) -> tuple[int, int]:
    return stats["drafts_accepted"], stats["drafts"]


@every_draft_is_verified
@pytest.mark.parametrize(("name", "spec"), thin_rows(CELLS))
def test_replies_are_those_without_drafts(name: str, spec: str) -> None:
    """Hybrids verify drafts while one sequence decodes; a llama rarely proposes theirs."""
    model, prompts, replies = build(name), make_repetitive_prompts(3, seed=1), []
    draft_model = build("llama") if name in HYBRIDS else make_noisy_copy(model)
    for draft in (None, draft_model):
        with make_engine(model, spec, draft=draft, chunk_seconds=60) as engine:
            replies.append(submit_all(engine, prompts))
            assert submit_all(engine, prompts[:1]) == replies[0][:1]
            accepted, verified = count_drafts(engine.stats())
            wait_until_idle(engine)
    assert replies[0] == replies[1]
    assert (0 if name in HYBRIDS else 1) <= accepted < verified


@every_draft_is_verified
def test_an_equal_model_is_always_accepted() -> None:
    model, prompts = build("llama"), make_prompts(3)
    with make_engine(model, draft=copy.deepcopy(model)) as engine:
        submit_all(engine, prompts)
        accepted, verified = count_drafts(engine.stats())
    assert accepted == verified > 2 * REPLY


@every_draft_is_verified
def test_seeds_give_the_tokens_of_plain_sampling() -> None:
    model, prompts, replies = build("llama"), make_prompts(2), []
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "presence_penalty": 0.2}
    for draft in (None, make_noisy_copy(model)):
        with make_engine(model, draft=draft) as engine:
            streams = [
                engine.submit(prompt, n=2, max_new_tokens=REPLY, ignore_end=True, **options)
                for prompt in prompts
            ]
            replies.append([[r.tokens for r in stream.results()] for stream in streams])
            accepted, _ = count_drafts(engine.stats())
    assert replies[0] == replies[1]
    assert accepted > 0


@every_draft_is_verified
def test_grammar_may_leave_no_token_of_a_smaller_vocabulary() -> None:
    model, tokenizer = model_of(DEMO), tokenizer_of(DEMO)
    draft = copy.deepcopy(model)
    draft.resize_token_embeddings(200)
    replies = []
    for each in (None, draft):
        with kvant.Engine(model, tokenizer, "raw", draft=each) as engine:
            streams = [
                engine.submit(text, grammar=Grammar.json(), max_new_tokens=60, temperature=t)
                for text in ("import ", "def ")
                for t in (0.0, 0.8)
            ]
            replies.append([stream.result().text for stream in streams])
    assert replies[0] == replies[1]


@every_draft_is_verified
def test_smaller_vocabulary_and_context_limit_the_drafts() -> None:
    model, prompts = build("llama"), make_prompts(3)
    with make_engine(model) as engine:
        expected = submit_all(engine, prompts)
    known = {token for reply in expected for token in reply}
    for changes in ({"vocab_size": max(known)}, {"max_position_embeddings": 50}):
        with make_engine(model, draft=build("llama", **changes)) as engine:
            assert submit_all(engine, prompts) == expected


@every_draft_is_verified
def test_a_long_prompt_is_read_between_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.engine.drafts.CATCH_UP_CHUNK", 8)
    model, prompt, lengths = build("llama"), make_prompts(1, longest=100)[0] * 3, list[int]()
    draft = copy.deepcopy(model)
    forward = draft.forward

    def record(*args: Any, **options: Any) -> Any:
        lengths.append(options["input_ids"].shape[1])
        return forward(*args, **options)

    monkeypatch.setattr(draft, "forward", record)
    with make_engine(model, draft=draft) as engine:
        submit_all(engine, [prompt], max_new_tokens=100)
        accepted, _ = count_drafts(engine.stats())
    assert max(lengths) == 8
    assert accepted > 0


@every_draft_is_verified
def test_a_draft_model_that_fails_ends_the_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = build("llama"), make_prompts(3)
    with make_engine(model) as engine:
        expected = submit_all(engine, prompts)
    draft = copy.deepcopy(model)

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no memory")

    with make_engine(model, draft=draft) as engine:
        monkeypatch.setattr(draft, "forward", fail)
        with caplog.at_level(logging.WARNING, "kvant"):
            assert submit_all(engine, prompts) == expected
        assert engine.stats()["drafts"] == 0
    failures = [text for text in caplog.messages if "RuntimeError('no memory')" in text]
    assert len(failures) == MAX_FAILURES


@every_draft_is_verified
@pytest.mark.parametrize("overcommit", [1.0, 3.0])
def test_caches_of_the_draft_model_count(overcommit: float) -> None:
    """They are counted before they are made, and freed with their requests."""
    model, prompts = build("llama"), make_prompts(6)
    draft = copy.deepcopy(model)
    with make_engine(model, chunk_seconds=60) as engine:
        expected = submit_all(engine, prompts)
    options: dict[str, Any] = {"overcommit": overcommit, "chunk_seconds": 60}
    peak, limit = 0, 500 << 10
    with make_engine(model, max_bytes=limit, draft=draft, **options) as engine:
        drafts, choose = engine._worker.drafts, engine._worker.drafts.choose_drafts

        def record(pairs: Any) -> Any:
            nonlocal peak
            chosen, stats = choose(pairs), engine.stats()
            assert stats["nbytes_drafts"] > 0
            peak = max(peak, sum(stats[f"nbytes_{kind}"] for kind in ("drafts", "held", "free")))
            return chosen

        drafts.choose_drafts = record  # type: ignore[method-assign]
        assert submit_all(engine, prompts) == expected
        stats = engine.stats()
        wait_until_idle(engine)
        assert engine.stats()["nbytes_drafts"] == 0
    assert 0 < peak <= limit
    assert (stats["put_aside"] > 0) == (overcommit > 1)
    assert stats["drafts_accepted"] > 0


def test_drafts_that_do_not_pay_are_tried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not verified, but compared with what comes."""
    model, calls = build("llama"), list[list[int]]()
    decode_drafts = ModelDrafts._decode_drafts

    def record(self: ModelDrafts, pairs: Any, states: Any, counts: list[int]) -> Any:
        calls.append(counts)
        return decode_drafts(self, pairs, states, counts)

    monkeypatch.setattr(ModelDrafts, "_decode_drafts", record)
    monkeypatch.setattr("kvant.engine.drafts.DraftSizer.choose_num_drafts", lambda *a, **k: 0)
    with make_engine(model, draft=copy.deepcopy(model)) as engine:
        submit_all(engine, make_prompts(1), max_new_tokens=3 * PROBE_INTERVAL + 2)
        assert engine.stats()["drafts"] == 0
    assert calls == [[1], [1], [1]]


def test_the_draft_model_is_prepared_and_restored() -> None:
    model, draft = build("llama"), build("llama").bfloat16()
    with make_engine(model, draft=draft):
        assert [*get_attachments(draft)]
        assert packing.is_packed(draft)
    assert not get_attachments(draft)
    assert not packing.is_packed(draft)


def test_another_vocabulary_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    for size, count in ((128, 0), (120, 0), (300, 1)):
        with make_engine(model, draft=build("llama", vocab_size=size)):
            pass
        assert sum("its vocabulary has" in text for text in caplog.messages) == count


def test_unsuitable_draft_models_are_refused() -> None:
    model = build("llama")
    for draft, message in (
        (model, "draft=LlamaForCausalLM: it is the model itself"),
        (build("falcon_h1"), "draft=FalconH1ForCausalLM: its sequences cannot be decoded and"),
        (Path("folder"), "draft=PosixPath.'folder'.: 'ngram', a model of transformers, or None"),
        (True, "draft=True: 'ngram', a model of transformers, or None"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(model, draft=draft)
