"""Test an engine with a store: prefixes are restored while others decode, within the byte limit."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import kvant
import kvant.engine.prefix_reuse as reuse
from engine.test_engine import generate_alone, make_engine, no_leaks
from hf.zoo import build
from kvant.cache import transitions
from kvant.generation import TransformersDecoder
from kvant.prefixes import Prefixes
from kvant.prefixes.memory import PrefixPools
from kvant.stores import FolderStore, Tiers
from prefixes.test_prefix_store import open_folder
from prefixes.test_prefixes import FOREIGN, assert_no_leaks, family_params, make_tokens

pytestmark = pytest.mark.usefixtures(no_leaks.__name__)


@pytest.mark.parametrize("name", family_params())
def test_every_family_hits_the_store_after_a_restart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, shared = build(name), make_tokens(150, seed=0)
    asked = [shared + make_tokens(9 + 5 * n, seed=1 + n) for n in range(4)]
    expected = [generate_alone(model, prompt, max_new_tokens=5) for prompt in asked]
    keeps = name not in FOREIGN and TransformersDecoder(model).supports_chunked_prefill
    for restarted in (False, True):
        prefixes = Prefixes(store=open_folder(tmp_path))
        with make_engine(model, max_sequences=2, prefixes=prefixes) as engine:
            streams = [engine.submit(p, max_new_tokens=5, ignore_end=True) for p in asked]
            results = [stream.result() for stream in streams]
            engine._worker.batch.caches.empty_cache.state.pools.check()
            prefixes.flush()
        assert [list(result.tokens) for result in results] == expected
        if keeps and restarted:
            assert all(result.usage.cached_tokens >= 128 for result in results)
            assert results[0].usage.restored_tokens >= 128
        assert_no_leaks(prefixes)
        prefixes.close()


def test_engine_may_own_its_store(tmp_path: Path) -> None:
    model, prompt = build("llama"), make_tokens(200, seed=0)
    for restored in (0, 192):  # a few tokens after the last page are not worth a blob
        with make_engine(model, max_bytes="64MiB", store=str(tmp_path)) as engine:
            usage = engine.submit(prompt, max_new_tokens=3, ignore_end=True).result().usage
            assert (usage.restored_tokens, usage.cached_tokens) == (restored, restored)
    with pytest.raises(TypeError, match="prefixes and a store"):
        make_engine(model, prefixes=Prefixes(), store=str(tmp_path))


def test_evicted_prefixes_are_restored_within_the_byte_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations of 8 users in memory for 3: the store holds the others."""
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, spec = build("llama"), "affine8,prefill=stored"
    three = 3 * kvant.plan(model, spec, context=330).nbytes
    peak: list[int] = []

    def look(step: Any) -> None:
        stats = engine.stats()
        peak.append(stats["nbytes_held"] + stats["nbytes_free"])

    prefixes = Prefixes(None, store=open_folder(tmp_path))
    conversations = {user: make_tokens(64, seed=user) for user in range(8)}
    prompt_tokens = hit = 0
    with make_engine(model, spec, max_bytes=three, prefixes=prefixes) as engine:
        for turn in range(4):
            for user, before in conversations.items():
                prompt = before + make_tokens(40, seed=100 * turn + user)
                ask = engine.submit(prompt, max_new_tokens=8, ignore_end=True, on_step=look)
                result = ask.result()
                prefixes.flush()
                conversations[user] = prompt + list(result.tokens)
                if turn:
                    prompt_tokens, hit = (
                        prompt_tokens + len(before),
                        hit + result.usage.cached_tokens,
                    )
    assert max(peak) <= three
    assert hit >= 0.9 * prompt_tokens, f"{hit} of {prompt_tokens}"
    assert prefixes.stats()["evicted"]
    assert_no_leaks(prefixes)
    prefixes.close()


def test_many_requests_run_in_memory_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory is reserved by running requests, so a restore uses the bytes of its request.

    Eight users talk at once. A page may be missing at each end, and the first turn has no prefix to
    hit.
    """
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, spec, begin = build("llama"), "affine8,prefill=stored", make_tokens(70, seed=99)
    two = 2 * kvant.plan(model, spec, context=420).nbytes
    peak: list[int] = []

    def look(step: Any) -> None:
        stats = engine.stats()
        peak.append(stats["nbytes_held"] + stats["nbytes_free"])

    prefixes = Prefixes(None, store=open_folder(tmp_path))
    conversations = {user: begin + make_tokens(20, seed=user) for user in range(8)}
    able = hit = 0
    with make_engine(model, spec, max_bytes=two, max_sequences=2, prefixes=prefixes) as engine:
        for turn in range(7):
            turn_prompts = {
                user: conversations[user] + make_tokens(36, seed=100 * turn + user)
                for user in conversations
            }
            streams = {
                user: engine.submit(prompt, max_new_tokens=8, ignore_end=True, on_step=look)
                for user, prompt in turn_prompts.items()
            }
            for user, stream in streams.items():
                result = stream.result()
                able += (len(conversations[user]) - 1) // 64 * 64 if turn else 0
                hit += result.usage.cached_tokens if turn else 0
                conversations[user] = turn_prompts[user] + list(result.tokens)
        engine._worker.batch.caches.empty_cache.state.pools.check()
        prefixes.flush()
    assert max(peak) <= two
    assert hit >= 0.95 * able, f"{hit} of {able}"
    stats = prefixes.stats()
    assert stats["evicted"] and stats["store"]["tokens_restored"]
    assert_no_leaks(prefixes)
    prefixes.close()


class HaltingStore(FolderStore):
    """A store that returns pages after the first only once released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.go, self.asked = threading.Event(), threading.Event()

    def get(self, page: str, part: str) -> Any:
        if not part.endswith("-0"):
            self.asked.set()
            self.go.wait(30)
        return super().get(page, part)


def store_prompts(model: Any, spec: str, prompts: list[list[int]], path: Path) -> None:
    """Store some prompts."""
    with Prefixes(store=open_folder(path)) as prefixes:
        with make_engine(model, spec, prefixes=prefixes) as engine:
            for prompt in prompts:
                engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        prefixes.flush()


def test_late_restore_leaves_memory_to_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with a slow store, or cancelled ones: memory for one suffices."""
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    monkeypatch.setattr(reuse, "MAX_STORE_WAIT_S", 0.5)
    model, spec, prompts = build("llama"), "raw", [make_tokens(450, seed=n) for n in range(4)]
    store_prompts(model, spec, prompts, tmp_path)
    limit, peak = int(1.2 * kvant.plan(model, spec, context=500).nbytes), list[int]()
    slow = HaltingStore(tmp_path)
    prefixes = Prefixes(store=Tiers([slow]))
    with make_engine(model, spec, max_bytes=limit, prefixes=prefixes) as engine:

        def look(step: Any) -> None:
            stats = engine.stats()
            peak.append(stats["nbytes_held"] + stats["nbytes_free"])

        options = {"max_new_tokens": 2, "ignore_end": True, "on_step": look}
        engine.submit(make_tokens(70, seed=99), **options).result()  # allocates the pools
        for prompt in prompts[:2]:
            assert not engine.submit(prompt, **options).result().usage.restored_tokens
        cancelled = engine.submit(prompts[2], **options)
        assert slow.asked.wait(10)
        cancelled.cancel()
        assert not engine.submit(prompts[3], **options).result().usage.restored_tokens
        slow.go.set()
        engine.submit(make_tokens(70, seed=98), **options).result()
        engine._worker.batch.caches.empty_cache.state.pools.check()
    assert max(peak) <= limit
    assert_no_leaks(prefixes)
    prefixes.close()


class SilentStore(FolderStore):
    """A store that stops answering lookups once silenced."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.silent, self.asked, self.go = threading.Event(), threading.Event(), threading.Event()

    def has(self, pages: Any) -> Any:
        if self.silent.is_set():
            self.asked.set()
            self.go.wait(30)
        return super().has(pages)


def test_lookup_in_a_silent_store_holds_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a finished prompt are free, although its lookup still runs."""
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    monkeypatch.setattr(reuse, "MAX_STORE_WAIT_S", 0.3)
    model, prompt, silent = build("llama"), make_tokens(200, seed=0), SilentStore(tmp_path)
    prefixes = Prefixes(store=Tiers([silent]))
    with make_engine(model, max_bytes="64MiB", prefixes=prefixes) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        prefixes.flush()
        silent.silent.set()
        long_prompt = [*prompt, *make_tokens(200, seed=1)]
        result = engine.submit(long_prompt, max_new_tokens=2, ignore_end=True).result()
        assert silent.asked.is_set() and result.usage.cached_tokens >= 192
        while engine._worker.requests:
            time.sleep(0.001)
        prefixes.clear()
        nbytes_before = engine.stats()["nbytes_held"]
        silent.go.set()
    assert nbytes_before == 0
    prefixes.close()


def test_restored_page_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests restore after a restart: the first one with pools shares its pages."""
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, prompts = build("llama"), [make_tokens(450, seed=n) for n in range(4)]
    store_prompts(model, "affine8", prompts, tmp_path)
    monkeypatch.setattr(transitions, "copy_sides", None)  # fails if called
    prefixes = Prefixes(store=open_folder(tmp_path))
    with make_engine(model, "affine8", max_bytes="64MiB", prefixes=prefixes) as engine:
        streams = [engine.submit(p, max_new_tokens=2, ignore_end=True) for p in prompts]
        assert [stream.result().usage.restored_tokens for stream in streams] == [448] * 4
        engine._worker.batch.caches.empty_cache.state.pools.check()
        prefixes.flush()
    assert_no_leaks(prefixes)
    prefixes.close()


def test_closed_engine_drops_arriving_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, prompt, slow = build("llama"), make_tokens(450, seed=0), HaltingStore(tmp_path)
    store_prompts(model, "affine8", [prompt], tmp_path)
    with Prefixes(store=Tiers([slow])) as prefixes:
        with make_engine(model, "affine8", max_bytes="64MiB", prefixes=prefixes) as engine:
            engine.submit(make_tokens(70, seed=1), max_new_tokens=2, ignore_end=True).result()
            storages = [*engine._worker.batch.caches.empty_cache.states.state.storages.values()]
            storage_ref = weakref.ref(storages[0])
            del storages
            engine.submit(prompt, max_new_tokens=2, ignore_end=True)
            assert slow.asked.wait(10)
        slow.go.set()
    prefixes.close()
    until = time.monotonic() + 20
    while storage_ref() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert storage_ref() is None


class StuckStore(FolderStore):
    """A store whose writes block until released."""

    take = threading.Event()

    def put(self, *args: Any) -> None:
        self.take.wait(30)
        super().put(*args)


@pytest.mark.parametrize("shared", [20, 70])
def test_stalled_store_writes_hold_no_memory(
    shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes queued for it are retained for a while and then evicted."""
    monkeypatch.setattr("kvant.engine.prefix_reuse.EVICTION_FLUSH_S", 0.05)
    model, prefixes = (
        build("llama"),
        Prefixes(None, store=Tiers([StuckStore(tmp_path, min_free=0)])),
    )
    two = 2 * kvant.plan(model, "affine8", context=300).nbytes
    with make_engine(model, "affine8", max_bytes=two, prefixes=prefixes) as engine:
        asked = [make_tokens(shared, seed=0) + make_tokens(200, seed=1 + n) for n in range(8)]
        streams = [engine.submit(p, max_new_tokens=8, ignore_end=True) for p in asked]
        assert all(len(stream.result(60).tokens) == 8 for stream in streams)
        engine._worker.batch.caches.empty_cache.state.pools.check()
        assert prefixes.stats()["evicted"]
        StuckStore.take.set()
        prefixes.flush()
    assert_no_leaks(prefixes)
    prefixes.close()
    StuckStore.take.clear()


class SlowStore(FolderStore):
    """A store that answers only once released."""

    answer = threading.Event()

    def has(self, pages: Any) -> list[frozenset[str]]:
        self.answer.wait(30)
        return super().has(pages)


def test_unresponsive_store_delays_requests_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang #32724: prefetching delayed the first token of others."""
    monkeypatch.setattr("kvant.engine.prefix_reuse.MAX_STORE_WAIT_S", 0.05)
    model, prefixes = build("llama"), Prefixes(store=Tiers([SlowStore(tmp_path, min_free=0)]))
    with make_engine(model, max_sequences=1, prefixes=prefixes) as engine:
        streams = [engine.submit(make_tokens(70, seed=n), max_new_tokens=4) for n in range(3)]
        assert all(len(stream.result().tokens) <= 4 for stream in streams)
        assert all(not stream.usage.restored_tokens for stream in streams)
        SlowStore.answer.set()
        prefixes.flush()
    assert_no_leaks(prefixes)
    prefixes.close()


class HungStore(FolderStore):
    """A store that never answers, and counts its calls."""

    asked = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.go = threading.Event()

    def has(self, pages: Any) -> list[frozenset[str]]:
        self.asked += 1
        self.go.wait(60)
        return super().has(pages)


def test_hanging_store_holds_few_threads_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a lookup abandoned by its request blocked all other lookups."""
    monkeypatch.setattr("kvant.engine.prefix_reuse.MAX_STORE_WAIT_S", 0.02)
    model, hung = build("llama"), HungStore(tmp_path)
    prefixes = Prefixes(store=Tiers([hung]))
    with make_engine(model, max_sequences=1, prefixes=prefixes) as engine:
        for number in range(reuse.MAX_LOOKUP_THREADS + 3):
            result = engine.submit(
                make_tokens(70, seed=number), max_new_tokens=2, ignore_end=True
            ).result()
            assert len(result.tokens) == 2 and not result.usage.restored_tokens
        assert 2 <= hung.asked <= reuse.MAX_LOOKUP_THREADS + 1  # one is the writer
        hung.go.set()
        prefixes.flush()
    assert prefixes.stats()["store"]["stores"][0]["written"]
    assert_no_leaks(prefixes)
    prefixes.close()


def test_prompt_arriving_during_a_lookup_is_served(tmp_path: Path) -> None:
    """Its pages are in the engine's pools, whichever request was first."""
    model, prompt = build("llama"), make_tokens(200, seed=0)
    with make_engine(model, store=str(tmp_path)) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
    with make_engine(model, store=str(tmp_path), chunk_seconds=1e-9) as engine:
        first = engine.submit(make_tokens(448, seed=1), max_new_tokens=2, ignore_end=True)
        second = engine.submit(prompt, max_new_tokens=2, ignore_end=True)
        assert second.result().usage.restored_tokens == 192
        assert len(first.result().tokens) == 2
        engine._worker.batch.caches.empty_cache.state.pools.check()


def test_failed_store_write_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = build("llama"), make_tokens(200, seed=0)
    with make_engine(model, store=str(tmp_path)) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()

    def fails(*args: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("kvant.engine.prefix_reuse.StoreLookups._import_restore", fails)
    with make_engine(model, store=str(tmp_path)) as engine:
        result = engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        assert (len(result.tokens), result.usage.cached_tokens) == (2, 0)


def test_request_that_fails_to_sample_leaves_its_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bias and penalty make its logits infinite: the rows in the store are right."""
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, prompt = build("llama"), make_tokens(330, seed=0)
    with make_engine(model, prefixes=Prefixes(store=open_folder(tmp_path))) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        engine.prefixes.close()
    with make_engine(model, prefixes=Prefixes(store=open_folder(tmp_path))) as engine:
        options: dict[str, Any] = {"logit_bias": {3: 3e38}, "presence_penalty": -3e38}
        stream = engine.submit([*prompt, 5], max_new_tokens=2, temperature=1.0, **options)
        with pytest.raises(ValueError, match="logits are NaN"):
            stream.result()
        usage = engine.submit([*prompt, 6], max_new_tokens=2, ignore_end=True).result().usage
        assert usage.cached_tokens >= 320 and not engine.prefixes.stats()["store"]["refused"]
        engine.prefixes.close()


def test_thread_limit_does_not_stop_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup whose thread cannot start misses, and the next one is tried."""
    model, prompt = build("llama"), make_tokens(200, seed=0)
    expected = generate_alone(model, prompt, max_new_tokens=3)
    failures = [RuntimeError("can't start new thread")]
    start = reuse.start_daemon

    def start_or_fail(call: Any, name: str) -> None:
        if failures:
            raise failures.pop()
        start(call, name)

    monkeypatch.setattr(reuse, "start_daemon", start_or_fail)
    with make_engine(model, prefixes=Prefixes(store=open_folder(tmp_path))) as engine:
        for _ in range(2):
            stream = engine.submit(prompt, max_new_tokens=3, ignore_end=True)
            assert list(stream.result().tokens) == expected
        assert not failures
        engine.prefixes.close()
