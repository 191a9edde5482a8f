"""Test batches whose forwards are captured on a CPU: tokens equal those of each request alone."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest

from engine.test_engine import generate_alone, make_engine, make_prompts, no_leaks, wait_until_idle
from hf.zoo import build
from kvant.engine.batch import Batch
from kvant.engine.request import Sequence
from kvant.generation import TransformersDecoder
from kvant.hf import TransformersCache
from kvant.native import get_library
from kvant.replay import NATIVE_REPLAY

pytestmark = [
    pytest.mark.skipif(get_library().functions is None, reason="the native library is not here"),
    pytest.mark.usefixtures(no_leaks.__name__),
]


@pytest.fixture
def replay_log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Record the batch size of every decode forward, and whether it was replayed."""
    actual, rows = [], TransformersDecoder.compute_batch_logits

    def count_forwards(
        decoder: Any, tokens: Any, places: Any, cache: TransformersCache, *args: Any
    ) -> Any:
        before = cache.context.replay_stats.num_tokens
        out = rows(decoder, tokens, places, cache, *args)
        actual.append((len(tokens), cache.context.replay_stats.num_tokens > before))
        return out

    monkeypatch.setattr(TransformersDecoder, "compute_batch_logits", count_forwards)
    at_once = NATIVE_REPLAY._replace(num_warmup_forwards=0)
    monkeypatch.setattr("kvant.replay.replayer.NATIVE_REPLAY", at_once)
    return actual


@pytest.mark.parametrize(
    "spec",
    [
        "raw",
        "affine8,window=40,sinks=4",
        *(pytest.param(s, marks=pytest.mark.laws) for s in ("affine4,tail=3", "turbo4v4", "fp8")),
    ],
)
def test_replay_survives_sequences_joining_and_leaving(
    replay_log: list[tuple[int, bool]], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("llama"), make_prompts(9, longest=90)
    counts = [5, 30, 1, 12, 70, 8, 8, 3, 20]
    with make_engine(model, spec, max_sequences=4) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=n, ignore_end=True)
            for prompt, n in zip(inputs, counts, strict=True)
        ]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    sizes = {size for size, _ in replay_log}  # other sizes depend on the speed of the processor
    assert {1, 4} <= sizes <= {1, 2, 3, 4}, "nobody is beside them who asked nothing"
    assert {size for size, was_replayed in replay_log if was_replayed} == sizes
    assert sum(was_replayed for _, was_replayed in replay_log) > len(replay_log) // 2
    monkeypatch.setattr(TransformersDecoder, "make_replayer", lambda *args, **options: None)
    for prompt, n, tokens in zip(inputs, counts, actual, strict=True):
        assert tokens == generate_alone(model, prompt, spec, max_new_tokens=n)


def test_model_without_replay_is_served(replay_log: list[tuple[int, bool]]) -> None:
    model, inputs = build("falcon_h1"), make_prompts(3, seed=4, longest=9)
    with make_engine(model, "raw", max_sequences=3) as engine:
        streams = [engine.submit(p, max_new_tokens=6, ignore_end=True) for p in inputs]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    assert not any(was_replayed for _, was_replayed in replay_log)
    assert actual == [generate_alone(model, prompt, max_new_tokens=6) for prompt in inputs]


def test_empty_batch_frees_its_replay_memory(replay_log: list[tuple[int, bool]]) -> None:
    decoder = TransformersDecoder(build("llama"))
    batch, seat = Batch(decoder, decoder.make_cache("raw")), Sequence([3, 4, 5])
    batch.prefill(seat, 3)
    for token in (6, 7, 8):
        seat.tokens.append(token)
        batch.decode([seat])
    blocks = ref(batch._replay_buffers)
    batch.caches.release([seat])
    batch.clear()
    gc.collect()
    assert replay_log == [(1, True)] * 3 and blocks() is None
