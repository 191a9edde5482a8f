"""An engine with a store: prompts come back beside those who decode, and within the bytes."""

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
from engine.test_engine import alone, engine_for, nothing_is_left
from hf.zoo import build
from kvant.cache.storage import Storage
from kvant.generation import TransformersDecoder
from kvant.prefixes import Prefixes
from kvant.stores import FolderStore, Tiers
from prefixes.test_archive import folder
from prefixes.test_prefixes import FOREIGN, families, leave_nothing, text

pytestmark = pytest.mark.usefixtures(nothing_is_left.__name__)


@pytest.mark.parametrize("name", families())
def test_every_family_after_a_restart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Prefixes, "_record_prefill_time", lambda *given: None
    )  # to read it is never sooner
    model, shared = build(name), text(150, seed=0)
    asked = [shared + text(9 + 5 * n, seed=1 + n) for n in range(4)]
    expected = [alone(model, prompt, max_new_tokens=5) for prompt in asked]
    keeps = name not in FOREIGN and TransformersDecoder(model).supports_chunked_prefill
    for restarted in (False, True):
        prefixes = Prefixes(store=folder(tmp_path))
        with engine_for(model, max_sequences=2, prefixes=prefixes) as engine:
            streams = [engine.submit(p, max_new_tokens=5, ignore_end=True) for p in asked]
            results = [stream.result() for stream in streams]
            engine._batch.check()
            prefixes.flush()
        assert [list(result.tokens) for result in results] == expected
        if keeps and restarted:
            assert all(result.usage.cached_tokens >= 128 for result in results)
            assert results[0].usage.restored_tokens >= 128
        leave_nothing(prefixes)
        prefixes.close()


def test_an_engine_with_a_store_of_its_own(tmp_path: Path) -> None:
    model, prompt = build("llama"), text(200, seed=0)
    for restored in (0, 192):  # a few tokens behind the last page are not worth a blob
        with engine_for(model, max_bytes="64MiB", store=str(tmp_path)) as engine:
            usage = engine.submit(prompt, max_new_tokens=3, ignore_end=True).result().usage
            assert (usage.restored_tokens, usage.cached_tokens) == (restored, restored)
    with pytest.raises(TypeError, match="prefixes and a store"):
        engine_for(model, prefixes=Prefixes(), store=str(tmp_path))


def test_what_was_evicted_comes_back_within_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations of 8 users in memory for 3: what does not fit is in the store."""
    monkeypatch.setattr(
        Prefixes, "_record_prefill_time", lambda *given: None
    )  # to read it is never sooner
    model, spec = build("llama"), "affine8,prefill=stored"
    three = 3 * kvant.plan(model, spec, context=330).nbytes
    most: list[int] = []

    def look(step: Any) -> None:
        told = engine.stats()
        most.append(told["nbytes_held"] + told["nbytes_free"])

    prefixes = Prefixes(None, store=folder(tmp_path))
    said = {user: text(64, seed=user) for user in range(8)}
    asked = hit = 0
    with engine_for(model, spec, max_bytes=three, prefixes=prefixes) as engine:
        for turn in range(4):
            for user, before in said.items():
                prompt = before + text(40, seed=100 * turn + user)
                ask = engine.submit(prompt, max_new_tokens=8, ignore_end=True, on_step=look)
                result = ask.result()
                prefixes.flush()
                said[user] = prompt + list(result.tokens)
                if turn:
                    asked, hit = asked + len(before), hit + result.usage.cached_tokens
    assert max(most) <= three
    assert hit >= 0.9 * asked, f"{hit} of {asked}"
    assert prefixes.stats()["evicted"]
    leave_nothing(prefixes)
    prefixes.close()


def test_many_at_once_in_memory_for_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is promised to those who are served: what comes for one lies in its bytes.

    Eight users talk at once. A page may miss at each end, and the first turn has nothing to hit.
    """
    monkeypatch.setattr(
        Prefixes, "_record_prefill_time", lambda *given: None
    )  # to read it is never sooner
    model, spec, begin = build("llama"), "affine8,prefill=stored", text(70, seed=99)
    two = 2 * kvant.plan(model, spec, context=420).nbytes
    most: list[int] = []

    def look(step: Any) -> None:
        told = engine.stats()
        most.append(told["nbytes_held"] + told["nbytes_free"])

    prefixes = Prefixes(None, store=folder(tmp_path))
    said = {user: begin + text(20, seed=user) for user in range(8)}
    able = hit = 0
    with engine_for(model, spec, max_bytes=two, max_sequences=2, prefixes=prefixes) as engine:
        for turn in range(7):
            asked = {user: said[user] + text(36, seed=100 * turn + user) for user in said}
            streams = {
                user: engine.submit(prompt, max_new_tokens=8, ignore_end=True, on_step=look)
                for user, prompt in asked.items()
            }
            for user, stream in streams.items():
                result = stream.result()
                able += (len(said[user]) - 1) // 64 * 64 if turn else 0
                hit += result.usage.cached_tokens if turn else 0
                said[user] = asked[user] + list(result.tokens)
        engine._batch.check()
        prefixes.flush()
    assert max(most) <= two
    assert hit >= 0.95 * able, f"{hit} of {able}"
    stats = prefixes.stats()
    assert stats["evicted"] and stats["store"]["tokens_restored"]
    leave_nothing(prefixes)
    prefixes.close()


class Halting(FolderStore):
    """A store whose pages behind the first come once they are let."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.go, self.asked = threading.Event(), threading.Event()

    def get(self, page: str, part: str) -> Any:
        if not part.endswith("-0"):
            self.asked.set()
            self.go.wait(30)
        return super().get(page, part)


def kept(model: Any, spec: str, prompts: list[list[int]], path: Path) -> None:
    """Let a store have prompts."""
    with Prefixes(store=folder(path)) as prefixes:
        with engine_for(model, spec, prefixes=prefixes) as engine:
            for prompt in prompts:
                engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        prefixes.flush()


def test_who_comes_late_leaves_the_memory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests for which a store is too slow, or that are cancelled: memory for one is enough."""
    monkeypatch.setattr(Prefixes, "_record_prefill_time", lambda *given: None)
    monkeypatch.setattr(reuse, "MAX_STORE_WAIT_S", 0.5)
    model, spec, prompts = build("llama"), "raw", [text(450, seed=n) for n in range(4)]
    kept(model, spec, prompts, tmp_path)
    limit, most = int(1.2 * kvant.plan(model, spec, context=500).nbytes), list[int]()
    slow = Halting(tmp_path)
    prefixes = Prefixes(store=Tiers([slow]))
    with engine_for(model, spec, max_bytes=limit, prefixes=prefixes) as engine:

        def look(step: Any) -> None:
            told = engine.stats()
            most.append(told["nbytes_held"] + told["nbytes_free"])

        asked = {"max_new_tokens": 2, "ignore_end": True, "on_step": look}
        engine.submit(text(70, seed=99), **asked).result()  # from now on there are pools
        for prompt in prompts[:2]:
            assert not engine.submit(prompt, **asked).result().usage.restored_tokens
        cancelled = engine.submit(prompts[2], **asked)
        assert slow.asked.wait(10)
        cancelled.cancel()
        assert not engine.submit(prompts[3], **asked).result().usage.restored_tokens
        slow.go.set()
        engine.submit(text(70, seed=98), **asked).result()
        engine._batch.check()
    assert max(most) <= limit
    leave_nothing(prefixes)
    prefixes.close()


class Silent(FolderStore):
    """A store that does not say what it has, once it is to be silent."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.silent, self.asked, self.go = threading.Event(), threading.Event(), threading.Event()

    def has(self, pages: Any) -> Any:
        if self.silent.is_set():
            self.asked.set()
            self.go.wait(30)
        return super().has(pages)


def test_who_looks_into_a_silent_store_holds_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that a prompt had are free once it ended, though they are still being looked for."""
    monkeypatch.setattr(Prefixes, "_record_prefill_time", lambda *given: None)
    monkeypatch.setattr(reuse, "MAX_STORE_WAIT_S", 0.3)
    model, prompt, silent = build("llama"), text(200, seed=0), Silent(tmp_path)
    prefixes = Prefixes(store=Tiers([silent]))
    with engine_for(model, max_bytes="64MiB", prefixes=prefixes) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        prefixes.flush()
        silent.silent.set()
        asked = [*prompt, *text(200, seed=1)]
        result = engine.submit(asked, max_new_tokens=2, ignore_end=True).result()
        assert silent.asked.is_set() and result.usage.cached_tokens >= 192
        while engine._requests:
            time.sleep(0.001)
        prefixes.clear()
        held = engine.stats()["nbytes_held"]
        silent.go.set()
    assert held == 0
    prefixes.close()


def test_a_page_that_came_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ask at once after a restart: whose pools are there lends them to the others."""
    monkeypatch.setattr(Prefixes, "_record_prefill_time", lambda *given: None)
    model, prompts = build("llama"), [text(450, seed=n) for n in range(4)]
    kept(model, "affine8", prompts, tmp_path)
    monkeypatch.setattr(Storage, "copy_pages_from", None)  # an error
    prefixes = Prefixes(store=folder(tmp_path))
    with engine_for(model, "affine8", max_bytes="64MiB", prefixes=prefixes) as engine:
        streams = [engine.submit(p, max_new_tokens=2, ignore_end=True) for p in prompts]
        assert [one.result().usage.restored_tokens for one in streams] == [448] * 4
        engine._batch.check()
        prefixes.flush()
    leave_nothing(prefixes)
    prefixes.close()


def test_an_engine_that_is_closed_keeps_nothing_of_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prefixes, "_record_prefill_time", lambda *given: None)
    model, prompt, slow = build("llama"), text(450, seed=0), Halting(tmp_path)
    kept(model, "affine8", [prompt], tmp_path)
    with Prefixes(store=Tiers([slow])) as prefixes:
        with engine_for(model, "affine8", max_bytes="64MiB", prefixes=prefixes) as engine:
            engine.submit(text(70, seed=1), max_new_tokens=2, ignore_end=True).result()
            storages = [*engine._batch._empty_cache.states._tracker.state.storages.values()]
            there = weakref.ref(storages[0])
            del storages
            engine.submit(prompt, max_new_tokens=2, ignore_end=True)
            assert slow.asked.wait(10)
        slow.go.set()
    prefixes.close()
    until = time.monotonic() + 20
    while there() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert there() is None


class Stuck(FolderStore):
    """A store that takes nothing until it is let."""

    take = threading.Event()

    def put(self, *given: Any) -> None:
        self.take.wait(30)
        super().put(*given)


@pytest.mark.parametrize("shared", [20, 70])
def test_a_store_that_takes_nothing_keeps_nobody_from_memory(
    shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes that it is yet to have wait for it a while, and go then."""
    monkeypatch.setattr("kvant.engine.prefix_reuse.EVICTION_FLUSH_S", 0.05)
    model, prefixes = build("llama"), Prefixes(None, store=Tiers([Stuck(tmp_path, min_free=0)]))
    two = 2 * kvant.plan(model, "affine8", context=300).nbytes
    with engine_for(model, "affine8", max_bytes=two, prefixes=prefixes) as engine:
        asked = [text(shared, seed=0) + text(200, seed=1 + n) for n in range(8)]
        streams = [engine.submit(p, max_new_tokens=8, ignore_end=True) for p in asked]
        assert all(len(stream.result(60).tokens) == 8 for stream in streams)
        engine._batch.check()
        assert prefixes.stats()["evicted"]
        Stuck.take.set()
        prefixes.flush()
    leave_nothing(prefixes)
    prefixes.close()
    Stuck.take.clear()


class Slow(FolderStore):
    """A store that answers when it is let."""

    answer = threading.Event()

    def has(self, pages: Any) -> list[frozenset[str]]:
        self.answer.wait(30)
        return super().has(pages)


def test_a_store_that_does_not_answer_keeps_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang #32724: prefetching delayed the first token of others."""
    monkeypatch.setattr("kvant.engine.prefix_reuse.MAX_STORE_WAIT_S", 0.05)
    model, prefixes = build("llama"), Prefixes(store=Tiers([Slow(tmp_path, min_free=0)]))
    with engine_for(model, max_sequences=1, prefixes=prefixes) as engine:
        streams = [engine.submit(text(70, seed=n), max_new_tokens=4) for n in range(3)]
        assert all(len(stream.result().tokens) <= 4 for stream in streams)
        assert all(not stream.usage.restored_tokens for stream in streams)
        Slow.answer.set()
        prefixes.flush()
    leave_nothing(prefixes)
    prefixes.close()


class Hung(FolderStore):
    """A store that does not answer, and counts how often it is asked."""

    asked = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.go = threading.Event()

    def has(self, pages: Any) -> list[frozenset[str]]:
        self.asked += 1
        self.go.wait(60)
        return super().has(pages)


def test_a_store_that_hangs_keeps_few_threads_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that its request left behind had kept all others from looking for their prompts."""
    monkeypatch.setattr("kvant.engine.prefix_reuse.MAX_STORE_WAIT_S", 0.02)
    model, hung = build("llama"), Hung(tmp_path)
    prefixes = Prefixes(store=Tiers([hung]))
    with engine_for(model, max_sequences=1, prefixes=prefixes) as engine:
        for number in range(reuse.LOOKUPS + 3):
            result = engine.submit(
                text(70, seed=number), max_new_tokens=2, ignore_end=True
            ).result()
            assert len(result.tokens) == 2 and not result.usage.restored_tokens
        assert 2 <= hung.asked <= reuse.LOOKUPS + 1  # one of them is the writer
        hung.go.set()
        prefixes.flush()
    assert prefixes.stats()["store"]["stores"][0]["written"]
    leave_nothing(prefixes)
    prefixes.close()


def test_a_prompt_that_comes_while_another_is_read(tmp_path: Path) -> None:
    """Its pages lie in the engine's pools, whoever was first."""
    model, prompt = build("llama"), text(200, seed=0)
    with engine_for(model, store=str(tmp_path)) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
    with engine_for(model, store=str(tmp_path), chunk_seconds=1e-9) as engine:
        first = engine.submit(text(448, seed=1), max_new_tokens=2, ignore_end=True)
        second = engine.submit(prompt, max_new_tokens=2, ignore_end=True)
        assert second.result().usage.restored_tokens == 192
        assert len(first.result().tokens) == 2
        engine._batch.check()


def test_what_cannot_be_kept_is_nobodys_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = build("llama"), text(200, seed=0)
    with engine_for(model, store=str(tmp_path)) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()

    def fails(*given: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("kvant.engine.batch.Batch.adopt_restore", fails)
    with engine_for(model, store=str(tmp_path)) as engine:
        result = engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        assert (len(result.tokens), result.usage.cached_tokens) == (2, 0)


def test_a_request_that_cannot_be_sampled_leaves_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own bias makes its logits infinite: the rows of the store are right."""
    monkeypatch.setattr(
        Prefixes, "_record_prefill_time", lambda *given: None
    )  # to read it is never sooner
    model, prompt = build("llama"), text(330, seed=0)
    with engine_for(model, prefixes=Prefixes(store=folder(tmp_path))) as engine:
        engine.submit(prompt, max_new_tokens=2, ignore_end=True).result()
        engine.prefixes.close()
    with engine_for(model, prefixes=Prefixes(store=folder(tmp_path))) as engine:
        stream = engine.submit(
            [*prompt, 5], max_new_tokens=2, temperature=1.0, logit_bias={3: 1e39}
        )
        with pytest.raises(ValueError, match="not numbers"):
            stream.result()
        usage = engine.submit([*prompt, 6], max_new_tokens=2, ignore_end=True).result().usage
        assert usage.cached_tokens >= 320 and not engine.prefixes.stats()["store"]["refused"]
        engine.prefixes.close()


def test_a_limit_on_threads_ends_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup whose thread does not start finds nothing, and the next one is tried."""
    model, prompt = build("llama"), text(200, seed=0)
    expected = alone(model, prompt, max_new_tokens=3)
    failures = [RuntimeError("can't start new thread")]
    start = reuse.start_daemon

    def start_or_fail(call: Any, name: str) -> None:
        if failures:
            raise failures.pop()
        start(call, name)

    monkeypatch.setattr(reuse, "start_daemon", start_or_fail)
    with engine_for(model, prefixes=Prefixes(store=folder(tmp_path))) as engine:
        for _ in range(2):
            stream = engine.submit(prompt, max_new_tokens=3, ignore_end=True)
            assert list(stream.result().tokens) == expected
        assert not failures
        engine.prefixes.close()
