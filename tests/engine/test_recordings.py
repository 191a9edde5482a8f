"""Batches whose forwards are recorded on a CPU: each gets what it would get alone, to the token."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest

from engine.test_engine import alone, engine_for, finished, nothing_is_left, prompts
from hf.zoo import build
from kvant.engine.batch import Batch, EngineSequence
from kvant.generation import TransformersDecoder
from kvant.hf import NATIVE_REPLAY, TransformersCache
from kvant.native import get_library

pytestmark = [
    pytest.mark.skipif(get_library().functions is None, reason="the native library is not here"),
    pytest.mark.usefixtures(nothing_is_left.__name__),
]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every forward of a token of each: how many sequences, and was it replayed?"""
    found, rows = [], TransformersDecoder.compute_batch_logits

    def counted(
        decoder: Any, tokens: Any, places: Any, cache: TransformersCache, *given: Any
    ) -> Any:
        before = cache.context.replay_stats.num_tokens
        out = rows(decoder, tokens, places, cache, *given)
        found.append((len(tokens), cache.context.replay_stats.num_tokens > before))
        return out

    monkeypatch.setattr(TransformersDecoder, "compute_batch_logits", counted)
    at_once = NATIVE_REPLAY._replace(num_warmup_forwards=0)
    monkeypatch.setattr("kvant.generation.decoder.NATIVE_REPLAY", at_once)
    return found


@pytest.mark.parametrize(
    "spec",
    [
        "raw",
        "affine8,window=40,sinks=4",
        *(pytest.param(s, marks=pytest.mark.laws) for s in ("affine4,tail=3", "turbo4v4", "fp8")),
    ],
)
def test_sequences_come_and_go(
    replayed: list[tuple[int, bool]], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = build("llama"), prompts(9, longest=90)
    counts = [5, 30, 1, 12, 70, 8, 8, 3, 20]
    with engine_for(model, spec, max_sequences=4) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=n, ignore_end=True)
            for prompt, n in zip(asked, counts, strict=True)
        ]
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    sizes = {size for size, _ in replayed}  # which others there are, the processor's speed decides
    assert {1, 4} <= sizes <= {1, 2, 3, 4}, "nobody is beside them who asked nothing"
    assert {size for size, again in replayed if again} == sizes
    assert sum(again for _, again in replayed) > len(replayed) // 2
    monkeypatch.setattr(TransformersDecoder, "_captures_on_cpu", False)
    for prompt, n, tokens in zip(asked, counts, found, strict=True):
        assert tokens == alone(model, prompt, spec, max_new_tokens=n)


def test_a_model_that_is_not_replayed_is_served(replayed: list[tuple[int, bool]]) -> None:
    model, asked = build("falcon_h1"), prompts(3, seed=4, longest=9)
    with engine_for(model, "raw", max_sequences=3) as engine:
        streams = [engine.submit(p, max_new_tokens=6, ignore_end=True) for p in asked]
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    assert not any(again for _, again in replayed)
    assert found == [alone(model, prompt, max_new_tokens=6) for prompt in asked]


def test_an_empty_batch_keeps_no_memory_of_recordings(replayed: list[tuple[int, bool]]) -> None:
    decoder = TransformersDecoder(build("llama"))
    batch, seat = Batch(decoder, decoder.make_cache("raw")), EngineSequence([3, 4, 5])
    batch.prefill(seat, 3)
    for token in (6, 7, 8):
        seat.tokens.append(token)
        batch.decode([seat])
    blocks = ref(batch._replay_buffers)
    batch.release(seat)
    batch.clear()
    gc.collect()
    assert replayed == [(1, True)] * 3 and blocks() is None
