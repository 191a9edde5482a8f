"""Requests that begin alike, through the engine: read once, within the bytes, with nothing left."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from engine.test_engine import alone, engine_for, nothing_is_left, prompts
from hf.zoo import build
from kvant.engine import batch
from kvant.generation import TransformersDecoder
from kvant.prefixes import Prefixes, namespace
from kvant.prefixes.keys import make_root_key
from prefixes.test_prefixes import FOREIGN, families, leave_nothing, text

pytestmark = pytest.mark.usefixtures(nothing_is_left.__name__)


def settled(engine: kvant.Engine) -> None:
    while (told := engine.stats())["running"] or told["waiting"]:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("name", families())
def test_every_family_while_requests_come_and_go(name: str) -> None:
    model, prefixes, shared = build(name), Prefixes(), text(150, seed=0)
    asked = [shared + text(9 + 5 * n, seed=1 + n) for n in range(6)]
    with engine_for(model, max_sequences=2, prefixes=prefixes) as engine:
        streams = [engine.submit(p, max_new_tokens=5, ignore_end=True) for p in asked]
        results = [stream.result() for stream in streams]
        engine._batch.check()
    expected = [alone(model, prompt, max_new_tokens=5) for prompt in asked]
    assert [list(result.tokens) for result in results] == expected
    if name not in FOREIGN and TransformersDecoder(model).supports_chunked_prefill:
        assert results[-1].usage.cached_tokens >= 128
    leave_nothing(prefixes)


@pytest.mark.parametrize(
    "spec", ["raw", "affine8,prefill=stored", "affine4,window=80,prefill=stored"]
)
def test_a_limit_of_bytes_counts_what_is_kept(spec: str) -> None:
    """Prefixes go where requests need the room, and never is more taken than was allowed."""
    model, prefixes, chance = build("llama"), Prefixes(None), random.Random(1)
    three = (6 if "window" in spec else 3) * kvant.plan(model, spec, context=230).nbytes
    most, asked = [], []
    for _ in range(24):
        asked.append(text(chance.choice((64, 130, 180)), chance.randrange(4)) + text(9, len(asked)))

    def look(step: Any) -> None:
        told = engine.stats()
        most.append(told["nbytes_held"] + told["nbytes_free"])

    with engine_for(model, spec, max_bytes=three, prefixes=prefixes) as engine:
        streams = [
            engine.submit(p, max_new_tokens=12, ignore_end=True, on_step=look) for p in asked
        ]
        results = [stream.result() for stream in streams]
    assert max(most) <= three
    if "window" not in spec:  # of which few lengths serve, where there is room to keep them
        assert sum(result.usage.cached_tokens for result in results) > 0
        assert prefixes.stats()["evicted"] > 0
    expected = [alone(model, prompt, spec, max_new_tokens=12) for prompt in asked]
    assert [list(result.tokens) for result in results] == expected
    leave_nothing(prefixes)


@pytest.mark.parametrize(
    ("spec", "count"),
    [("raw", 40), ("affine8", 60), pytest.param("affine8", 600, marks=pytest.mark.laws)],
)
def test_continuations_and_prefixes_share_a_limit_of_bytes(spec: str, count: int) -> None:
    """`n` sequences copy the page that all begin to write; `Watched` compares every step."""
    model, prefixes, chance = build("llama"), Prefixes(None), random.Random(3)
    limit = 5 * kvant.plan(model, spec, context=230).nbytes
    with engine_for(
        model, spec, max_bytes=limit, max_sequences=5, prefixes=prefixes, pack=False
    ) as engine:
        streams = []
        for number in range(count):
            prompt = text(chance.choice((0, 60, 130)), chance.randrange(3))
            prompt = prompt + text(chance.choice((3, 30, 64)), number)
            streams.append(
                engine.submit(
                    prompt,
                    max_new_tokens=12,
                    ignore_end=True,
                    n=chance.choice((1, 2, 4)),
                    temperature=0.8,
                    seed=number,
                )
            )
            if chance.random() < 0.1:
                streams.pop(chance.randrange(len(streams))).cancel()
            if chance.random() < 0.5:
                streams[0].results()
        for stream in streams:
            assert all(len(result.tokens) == 12 for result in stream.results())
        settled(engine)
    assert prefixes.stats()["evicted"] > 0
    leave_nothing(prefixes)


def test_a_salt_is_forgotten_with_its_last_request() -> None:
    """Prefixes of a salt are found again by its key: nothing else is kept for it."""
    model, prefixes, prompt = build("llama"), Prefixes(), text(128, seed=0)
    with engine_for(model, prefixes=prefixes) as engine:
        cached = []
        for salt in ("a", "b", "a", "", "b"):
            stream = engine.submit(prompt, max_new_tokens=2, salt=salt, ignore_end=True)
            cached.append(stream.result().usage.cached_tokens)
            del stream
            settled(engine)
        assert cached == [0, 0, 127, 0, 127]
        assert not engine._batch._salted_namespaces
    leave_nothing(prefixes)


def test_a_prompt_that_is_all_there_is_read_by_its_last_token() -> None:
    """nano-vllm #144: a full hit gave an empty input."""
    model, prefixes, prompt = build("llama"), Prefixes(), text(128, seed=0)
    with engine_for(model, prefixes=prefixes) as engine:
        for _ in range(2):
            result = engine.submit(prompt, max_new_tokens=4, ignore_end=True).result()
            assert list(result.tokens) == alone(model, prompt, max_new_tokens=4)
    assert result.usage.cached_tokens == 127
    leave_nothing(prefixes)


def test_who_was_put_aside_hits_and_is_hit() -> None:
    """nano-vllm #233: out of bounds after a preemption and a hit of the same prefix."""
    model, prefixes, shared = build("llama"), Prefixes(), text(64, seed=0)
    few = 6 * kvant.plan(model, "raw", context=64).nbytes
    asked = [shared + text(6, seed=1 + n) for n in range(6)]
    with engine_for(model, max_bytes=few, overcommit=4.0, prefixes=prefixes) as engine:
        streams = [engine.submit(p, max_new_tokens=90, ignore_end=True) for p in asked]
        found = [list(stream.result().tokens) for stream in streams]
        assert engine.stats()["put_aside"] > 0
        settled(engine)
        engine._batch.check()
    assert found == [alone(model, prompt, max_new_tokens=90) for prompt in asked]
    leave_nothing(prefixes)


def test_who_looks_again_and_finds_less_reads_it_all() -> None:
    """What was found goes while a request waits: nothing of it stays behind in its place."""
    model, prefixes, shared = build("llama"), Prefixes(), text(128, seed=0)
    waits = threading.Event()
    with engine_for(model, max_sequences=1, prefixes=prefixes) as engine:
        engine.submit([*shared, 5], max_new_tokens=2, ignore_end=True).result()
        busy = engine.submit(
            [7], max_new_tokens=4, ignore_end=True, on_step=lambda step: waits.wait(60)
        )
        stream = engine.submit(shared + text(40, seed=1), max_new_tokens=5, ignore_end=True)
        prefixes.clear()
        waits.set()
        found = list(stream.result().tokens)
        busy.result()
    assert found == alone(model, shared + text(40, seed=1), max_new_tokens=5)
    leave_nothing(prefixes)


def test_pages_are_counted_once_when_nobody_is_served() -> None:
    """SGLang #35270: a check of an idle server counted twice, and ended it."""
    model, prefixes = build("llama"), Prefixes()
    with engine_for(model, prefixes=prefixes) as engine:
        for prompt in prompts(5, longest=200):
            engine.submit(prompt, max_new_tokens=3, ignore_end=True).result()
        settled(engine)
        engine._batch.check()
        assert engine.stats()["nbytes_held"] == prefixes.stats()["nbytes"] > 0
        assert prefixes.stats()["nbytes_idle"] == prefixes.stats()["nbytes"]
    leave_nothing(prefixes)


def test_a_cancelled_prompt_resumes_where_it_stopped() -> None:
    model, prefixes, prompt = build("falcon_h1"), Prefixes(), text(400, seed=0)
    with engine_for(model, chunk_seconds=1e-6, prefixes=prefixes) as engine:
        busy = engine.submit(text(5, seed=1), max_new_tokens=5000, ignore_end=True)
        next(busy)  # from now on chunks are of 64 tokens
        stream = engine.submit(prompt, max_new_tokens=4, ignore_end=True)
        job = None
        while job is None or not 64 <= job.num_computed_tokens < 400:
            job = next(
                (one for one in engine._scheduler.running if one.num_prompt_tokens == 400), None
            )
        stream.cancel()
        stream.results()
        again = engine.submit(prompt, max_new_tokens=4, ignore_end=True).result()
        busy.cancel()
    assert again.usage.cached_tokens >= 64
    assert list(again.tokens) == alone(model, prompt, max_new_tokens=4)
    leave_nothing(prefixes)


def test_exact_prefixes_are_read_in_fixed_chunks() -> None:
    model, prefixes, shared = build("llama"), Prefixes(exact=True), text(1030, seed=0)
    with engine_for(model, "affine8,prefill=stored", max_context=2048, prefixes=prefixes) as engine:
        for n in range(2):
            prompt = shared + text(5, seed=1 + n)
            result = engine.submit(prompt, max_new_tokens=3, ignore_end=True).result()
    assert result.usage.cached_tokens == 1024
    leave_nothing(prefixes)


def test_who_has_another_salt_shares_nothing(tmp_path: Path) -> None:
    """Neither in memory nor in a store (vLLM #44701); with the same salt all of it."""
    model, prompt = build("llama"), text(200, seed=0)
    for restarted in (False, True):
        prefixes = Prefixes(store=str(tmp_path))
        with engine_for(model, prefixes=prefixes) as engine:
            held = {}
            for salt in ("", "one", "two", "one"):
                asked = engine.submit(prompt, max_new_tokens=3, salt=salt, ignore_end=True)
                held[salt] = asked.result().usage.cached_tokens
                if not restarted and salt == "two":
                    assert not any(held.values())
            assert held["one"] >= 192
            prefixes.flush()
        prefixes.close()
        if restarted:
            assert held == {"": 192, "one": held["one"], "two": 192}


def test_weights_that_change_between_two_requests() -> None:
    """They are looked at when the first request comes: nothing of before is believed."""
    model, prompt = build("llama"), text(150, seed=0)
    with engine_for(model, prefixes=Prefixes()) as engine:
        for step in range(3):
            found = engine.submit(prompt, max_new_tokens=5, ignore_end=True).result()
            assert list(found.tokens) == alone(model, prompt, max_new_tokens=5)
            assert found.usage.cached_tokens == 0, step
            settled(engine)
            with torch.no_grad():
                model.get_output_embeddings().weight[step] += 1
                model.get_input_embeddings().weight[prompt[0]] += 1


def test_weights_are_looked_at_once_while_somebody_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = list[Any]()
    monkeypatch.setattr(
        namespace, "make_root_key", lambda *asked: looked.append(asked) or make_root_key(*asked)
    )
    monkeypatch.setattr(batch, "WEIGHTS_CHECK_INTERVAL_S", 1e9)
    prompts = [text(70 + n, seed=n) for n in range(6)]
    with engine_for(build("llama"), max_sequences=2, prefixes=Prefixes()) as engine:
        streams = [engine.submit(one, max_new_tokens=5) for one in prompts]
        for stream in streams:
            stream.result()
        settled(engine)
        first = len(looked)
        engine.submit(prompts[0], max_new_tokens=5).result()
    assert first < len(prompts)  # begun and kept, each looks by itself
    assert first < len(looked) <= first + 2
