"""Test requests with a common prefix in an engine: prefilled once, within the byte limit,
without leaks.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from engine.test_engine import generate_alone, make_engine, make_prompts, no_leaks
from generation.speakers import Numbers
from hf.zoo import build
from kvant.engine import prefix_reuse
from kvant.generation import TransformersDecoder
from kvant.prefixes import Prefixes, keys
from kvant.prefixes.keys import make_root_key
from prefixes.test_prefixes import FOREIGN, assert_no_leaks, family_params, make_tokens

pytestmark = pytest.mark.usefixtures(no_leaks.__name__)


def wait_until_idle(engine: kvant.Engine) -> None:
    while (stats := engine.stats())["running"] or stats["waiting"]:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("name", family_params())
def test_every_family_serves_requests_that_join_and_leave(name: str) -> None:
    model, prefixes, shared = build(name), Prefixes(), make_tokens(150, seed=0)
    asked = [shared + make_tokens(9 + 5 * n, seed=1 + n) for n in range(6)]
    with make_engine(model, max_sequences=2, prefixes=prefixes) as engine:
        streams = [engine.submit(p, max_new_tokens=5, ignore_end=True) for p in asked]
        results = [stream.result() for stream in streams]
        engine._worker.batch.caches.empty_cache.state.pools.check()
    expected = [generate_alone(model, prompt, max_new_tokens=5) for prompt in asked]
    assert [list(result.tokens) for result in results] == expected
    if name not in FOREIGN and TransformersDecoder(model).supports_chunked_prefill:
        assert results[-1].usage.cached_tokens >= 128
    assert_no_leaks(prefixes)


@pytest.mark.parametrize(
    "spec", ["raw", "affine8,prefill=stored", "affine4,window=80,prefill=stored"]
)
def test_byte_limit_counts_cached_prefixes(spec: str) -> None:
    """Prefixes are evicted when requests need memory, and the limit is never exceeded."""
    model, prefixes, chance = build("llama"), Prefixes(None), random.Random(1)
    three = (6 if "window" in spec else 3) * kvant.plan(model, spec, context=230).nbytes
    peak, inputs = [], []
    for _ in range(24):
        inputs.append(
            make_tokens(chance.choice((64, 130, 180)), chance.randrange(4))
            + make_tokens(9, len(inputs))
        )

    def look(step: Any) -> None:
        stats = engine.stats()
        peak.append(stats["nbytes_held"] + stats["nbytes_free"])

    with make_engine(model, spec, max_bytes=three, prefixes=prefixes) as engine:
        streams = [
            engine.submit(p, max_new_tokens=12, ignore_end=True, on_step=look) for p in inputs
        ]
        results = [stream.result() for stream in streams]
    assert max(peak) <= three
    if "window" not in spec:  # a window has few reachable lengths, kept only if memory allows
        assert sum(result.usage.cached_tokens for result in results) > 0
        assert prefixes.stats()["evicted"] > 0
    expected = [generate_alone(model, prompt, spec, max_new_tokens=12) for prompt in inputs]
    assert [list(result.tokens) for result in results] == expected
    assert_no_leaks(prefixes)


@pytest.mark.parametrize(
    ("spec", "count"),
    [("raw", 40), ("affine8", 60), pytest.param("affine8", 600, marks=pytest.mark.laws)],
)
def test_continuations_and_prefixes_share_a_byte_limit(spec: str, count: int) -> None:
    """`n` sequences copy the shared open page; `Watched` checks every step."""
    model, prefixes, chance = build("llama"), Prefixes(None), random.Random(3)
    limit = 5 * kvant.plan(model, spec, context=230).nbytes
    with make_engine(
        model, spec, max_bytes=limit, max_sequences=5, prefixes=prefixes, pack=False
    ) as engine:
        streams = []
        for number in range(count):
            prompt = make_tokens(chance.choice((0, 60, 130)), chance.randrange(3))
            prompt = prompt + make_tokens(chance.choice((3, 30, 64)), number)
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
        wait_until_idle(engine)
    assert prefixes.stats()["evicted"] > 0
    assert_no_leaks(prefixes)


def test_salt_is_dropped_with_its_last_request() -> None:
    """Prefixes of a salt are found by its key; no other state is kept for it."""
    model, prefixes, prompt = build("llama"), Prefixes(), make_tokens(128, seed=0)
    with make_engine(model, prefixes=prefixes) as engine:
        cached = []
        for salt in ("a", "b", "a", "", "b"):
            stream = engine.submit(prompt, max_new_tokens=2, salt=salt, ignore_end=True)
            cached.append(stream.result().usage.cached_tokens)
            del stream
            wait_until_idle(engine)
        assert cached == [0, 0, 127, 0, 127]
        assert not engine._worker.prefix_reuse._salted_namespaces
    assert_no_leaks(prefixes)


def test_fully_cached_prompt_recomputes_its_last_token() -> None:
    """nano-vllm #144: a full hit gave an empty input."""
    model, prefixes, prompt = build("llama"), Prefixes(), make_tokens(128, seed=0)
    with make_engine(model, prefixes=prefixes) as engine:
        for _ in range(2):
            result = engine.submit(prompt, max_new_tokens=4, ignore_end=True).result()
            assert list(result.tokens) == generate_alone(model, prompt, max_new_tokens=4)
    assert result.usage.cached_tokens == 127
    assert_no_leaks(prefixes)


def test_swapped_out_requests_hit_and_are_hit() -> None:
    """nano-vllm #233: out of bounds after a preemption and a hit of the same prefix."""
    model, prefixes, shared = build("llama"), Prefixes(), make_tokens(64, seed=0)
    max_bytes = 6 * kvant.plan(model, "raw", context=64).nbytes
    asked = [shared + make_tokens(6, seed=1 + n) for n in range(6)]
    with make_engine(model, max_bytes=max_bytes, overcommit=4.0, prefixes=prefixes) as engine:
        streams = [engine.submit(p, max_new_tokens=90, ignore_end=True) for p in asked]
        actual = [list(stream.result().tokens) for stream in streams]
        assert engine.stats()["put_aside"] > 0
        wait_until_idle(engine)
        engine._worker.batch.caches.empty_cache.state.pools.check()
    assert actual == [generate_alone(model, prompt, max_new_tokens=90) for prompt in asked]
    assert_no_leaks(prefixes)


def test_request_that_loses_its_prefix_prefills_fully() -> None:
    """A matched prefix may be evicted while its request queues; nothing of it stays allocated."""
    model, prefixes, shared = build("llama"), Prefixes(), make_tokens(128, seed=0)
    waiting = threading.Event()
    with make_engine(model, max_sequences=1, prefixes=prefixes) as engine:
        engine.submit([*shared, 5], max_new_tokens=2, ignore_end=True).result()
        busy = engine.submit(
            [7], max_new_tokens=4, ignore_end=True, on_step=lambda step: waiting.wait(60)
        )
        stream = engine.submit(shared + make_tokens(40, seed=1), max_new_tokens=5, ignore_end=True)
        prefixes.clear()
        waiting.set()
        results = list(stream.result().tokens)
        busy.result()
    assert results == generate_alone(model, shared + make_tokens(40, seed=1), max_new_tokens=5)
    assert_no_leaks(prefixes)


def test_idle_engine_counts_shared_pages_once() -> None:
    """SGLang #35270: a check of an idle server counted twice, and ended it."""
    model, prefixes = build("llama"), Prefixes()
    with make_engine(model, prefixes=prefixes) as engine:
        for prompt in make_prompts(5, longest=200):
            engine.submit(prompt, max_new_tokens=3, ignore_end=True).result()
        wait_until_idle(engine)
        engine._worker.batch.caches.empty_cache.state.pools.check()
        assert engine.stats()["nbytes_held"] == prefixes.stats()["nbytes"] > 0
        assert prefixes.stats()["nbytes_idle"] == prefixes.stats()["nbytes"]
    assert_no_leaks(prefixes)


def test_cancelled_prompt_resumes_at_its_last_page() -> None:
    model, prefixes, prompt = build("falcon_h1"), Prefixes(), make_tokens(400, seed=0)
    with make_engine(model, chunk_seconds=1e-6, prefixes=prefixes) as engine:
        busy = engine.submit(make_tokens(5, seed=1), max_new_tokens=5000, ignore_end=True)
        next(busy)  # later chunks have 64 tokens
        stream = engine.submit(prompt, max_new_tokens=4, ignore_end=True)
        job = None
        while job is None or not 64 <= job.num_computed_tokens < 400:
            job = next(
                (
                    request
                    for request in engine._worker.scheduler.queue.running
                    if request.num_prompt_tokens == 400
                ),
                None,
            )
        stream.cancel()
        stream.results()
        second = engine.submit(prompt, max_new_tokens=4, ignore_end=True).result()
        busy.cancel()
    assert second.usage.cached_tokens >= 64
    assert list(second.tokens) == generate_alone(model, prompt, max_new_tokens=4)
    assert_no_leaks(prefixes)


def test_exact_prefixes_are_prefilled_in_fixed_chunks() -> None:
    model, prefixes, shared = build("llama"), Prefixes(exact=True), make_tokens(1030, seed=0)
    with make_engine(
        model, "affine8,prefill=stored", max_context=2048, prefixes=prefixes
    ) as engine:
        for n in range(2):
            prompt = shared + make_tokens(5, seed=1 + n)
            result = engine.submit(prompt, max_new_tokens=3, ignore_end=True).result()
    assert result.usage.cached_tokens == 1024
    assert_no_leaks(prefixes)


def test_different_salts_share_nothing(tmp_path: Path) -> None:
    """Neither in memory nor in a store (vLLM #44701); equal salts share everything."""
    model, prompt = build("llama"), make_tokens(200, seed=0)
    for restarted in (False, True):
        prefixes = Prefixes(store=str(tmp_path))
        with make_engine(model, prefixes=prefixes) as engine:
            stats_by_salt = {}
            for salt in ("", "one", "two", "one"):
                stream = engine.submit(prompt, max_new_tokens=3, salt=salt, ignore_end=True)
                stats_by_salt[salt] = stream.result().usage.cached_tokens
                if not restarted and salt == "two":
                    assert not any(stats_by_salt.values())
            assert stats_by_salt["one"] >= 192
            prefixes.flush()
        prefixes.close()
        if restarted:
            assert stats_by_salt == {"": 192, "one": stats_by_salt["one"], "two": 192}


def test_changed_weights_between_requests_invalidate_prefixes() -> None:
    """Weights are checked at the first request, and older prefixes are invalidated."""
    model, prompt = build("llama"), make_tokens(150, seed=0)
    with make_engine(model, prefixes=Prefixes()) as engine:
        for step in range(3):
            actual = engine.submit(prompt, max_new_tokens=5, ignore_end=True).result()
            assert list(actual.tokens) == generate_alone(model, prompt, max_new_tokens=5)
            assert actual.usage.cached_tokens == 0, step
            wait_until_idle(engine)
            with torch.no_grad():
                model.get_output_embeddings().weight[step] += 1
                model.get_input_embeddings().weight[prompt[0]] += 1


def test_prefix_in_other_pools_is_copied() -> None:
    """Regression: its match counted as evicted, and the prompt was matched again without end."""
    model, prefixes = build("llama"), Prefixes()
    first, second = make_tokens(200, seed=0), make_tokens(200, seed=1)
    with make_engine(model, prefixes=prefixes) as engine:
        engine.submit(first, max_new_tokens=4).result()
        prefixes.clear()  # the engine keeps its pools, the next prefix makes new ones
        options = {"max_new_tokens": 4, "ignore_end": True}
        list(kvant.generate(model, Numbers(), second, kv_cache="raw", prefixes=prefixes, **options))
        reply = engine.submit(second, **options).result(60)
        assert reply.usage.cached_tokens == 199
        assert list(reply.tokens) == generate_alone(model, second, max_new_tokens=4)


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_prefixes_of_old_weights_are_evicted(salt: str) -> None:
    """Regression: they counted no more, and with a salt the next match never ended."""
    model, prefixes = build("llama"), Prefixes()
    prompt, options = make_tokens(200, seed=0), {"max_new_tokens": 4, "ignore_end": True}
    with make_engine(model, prefixes=prefixes) as engine:
        for cached in (0, 199, 0, 199):
            if not cached:
                with torch.no_grad():
                    model.get_input_embeddings().weight[prompt[0]] += 1
                sizes = [engine.stats()["nbytes_held"]]
            reply = engine.submit(prompt, salt=salt, **options).result(60)
            assert reply.usage.cached_tokens == cached
            assert list(reply.tokens) == generate_alone(model, prompt, max_new_tokens=4)
            wait_until_idle(engine)
            sizes.append(engine.stats()["nbytes_held"])
        assert sizes[0] == sizes[-1]
        assert sum(len(list(pools)) > 0 for pools in prefixes.memory) == 1


def test_free_pages_of_adopted_pools_count() -> None:
    """Regression: an engine that began with the pools of a larger one stayed above its limit."""
    model, prefixes = build("llama"), Prefixes("100kB")
    prompts = [make_tokens(400 if n else 100, seed=n) for n in range(8)]
    with make_engine(model, prefixes=prefixes) as engine:
        for stream in [engine.submit(p, max_new_tokens=8, ignore_end=True) for p in prompts]:
            stream.result()
        wait_until_idle(engine)
        before = engine.stats()
    limit = (before["nbytes_held"] + before["nbytes_free"]) // 2
    with make_engine(model, prefixes=prefixes, max_bytes=limit) as engine:
        engine.submit(prompts[0], max_new_tokens=8, ignore_end=True).result()
        wait_until_idle(engine)
        after = engine.stats()
        assert after["nbytes_held"] + after["nbytes_free"] <= limit


def test_weights_are_checked_once_while_requests_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = list[Any]()
    monkeypatch.setattr(
        keys, "make_root_key", lambda *args: looked.append(args) or make_root_key(*args)
    )
    monkeypatch.setattr(prefix_reuse, "WEIGHTS_CHECK_INTERVAL_S", 1e9)
    prompts = [make_tokens(70 + n, seed=n) for n in range(6)]
    with make_engine(build("llama"), max_sequences=2, prefixes=Prefixes()) as engine:
        streams = [engine.submit(prompt, max_new_tokens=5) for prompt in prompts]
        for stream in streams:
            stream.result()
        wait_until_idle(engine)
        first = len(looked)
        engine.submit(prompts[0], max_new_tokens=5).result()
    assert first < len(prompts)  # running requests match prefixes individually
    assert first < len(looked) <= first + 2
