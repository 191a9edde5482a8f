"""Whoever leaves a store that is late holds no memory any more, wherever the others are."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import kvant
from cache.test_pieces import filled, put
from hf.zoo import build
from kvant.cache.page_set import PageSet
from kvant.cache.restore_buffer import RestoreBuffer
from kvant.prefixes import LookupDeadline, Prefixes
from kvant.prefixes import namespace as shelves
from kvant.prefixes.threads import Daemons
from kvant.stores import FolderStore, Tiers
from kvant.stores import tiers as stores
from prefixes.test_prefixes import said, text


@pytest.mark.parametrize("when", ["before", "taken", "put", "settled", "ended"])
@pytest.mark.parametrize("spec", ["raw", "affine8", "affine8,sinks=4"])
def test_who_leaves_holds_nothing(spec: str, when: str) -> None:
    cache, memory = filled(spec, 300), filled(spec, 128)
    nbytes, waiting = memory.measure_pools()["nbytes_held"], LookupDeadline()
    pieces, shares = PageSet(cache), memory.fork()
    waiting.allocate(lambda: shares)
    if when == "before":
        waiting.cancel()
    arrival = waiting.allocate(lambda: RestoreBuffer(shares, 300, pieces.snapshot_tail_state()))
    assert (arrival is None) == (when == "before")
    if arrival is not None:
        with arrival:
            if when == "taken":
                waiting.cancel()
            put(arrival, pieces)
            if when == "put":
                waiting.cancel()
            again = arrival.finish(300 if when != "settled" else 256)
            assert again.length == {"settled": 256, "ended": 300}.get(when, 0)
            if when == "settled":
                waiting.cancel()
    waiting.release(shares)
    assert waiting.is_cancelled == (when != "ended")
    if waiting.is_cancelled:
        assert not waiting.compute_seconds_left()
        assert waiting.allocate(lambda: kvant.Cache(3, spec)) is None
    else:
        assert waiting.compute_seconds_left() and memory.measure_pools()["nbytes_held"] > nbytes
        waiting.cancel()
    memory.check()
    assert memory.measure_pools()["nbytes_held"] == nbytes


def test_what_cannot_be_cleared_keeps_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def clear(self) -> None:
            raise RuntimeError("no memory to clear it with")

    memory, waiting = filled("raw", 128), LookupDeadline()
    waiting.allocate(Broken)
    waiting.allocate(lambda: memory)
    waiting.cancel()
    assert not memory.length and "no memory to clear it with" in caplog.text


class Hung(FolderStore):
    """A folder on a disk that went away."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.go = threading.Event()

    def has(self, pages: Any) -> Any:
        self.go.wait(60)
        return super().has(pages)


def test_a_reply_waits_for_a_store_that_hangs_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "STORE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(stores, "UNANSWERED", 0.05)
    model, prompt, hung = build("llama"), text(200, seed=0), Hung(tmp_path)
    with Prefixes(store=Tiers([hung])) as prefixes:
        for end in range(3):
            assert said(model, [*prompt, end], prefixes=prefixes) == said(model, [*prompt, end])
        assert prefixes.flush(60)
        (told,) = prefixes.stats()["store"]["stores"]
        assert told["hanging"] and told["skipped"] and told["unwritten"] and not told["errors"]
    hung.go.set()


PROGRAM = """
import sys, threading, time
import kvant
import kvant.prefixes.namespace, kvant.engine.prefix_reuse
from kvant import demo
from kvant.stores import FolderStore, Tiers, tiers
from transformers import AutoModelForCausalLM, AutoTokenizer

class Hung(FolderStore):
    def has(self, pages):
        threading.Event().wait()

kvant.prefixes.namespace.STORE_TIMEOUT_S = kvant.engine.prefix_reuse.MAX_STORE_WAIT_S = 0.1
tiers.UNANSWERED = 0.1
model = AutoModelForCausalLM.from_pretrained(demo.PATH)
tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
prefixes = kvant.Prefixes(store=Tiers([Hung(sys.argv[1], min_free=0)]))
if sys.argv[2] == "engine":
    with kvant.Engine(model, tokenizer, "affine8", prefixes=prefixes, pack=False) as engine:
        for _ in range(2):
            engine.submit([5] * 200, max_new_tokens=2, ignore_end=True).result()
else:
    session = kvant.Session(model, tokenizer, "affine8", prefixes=prefixes, template=False)
    session.send([5] * 200, max_new_tokens=2, ignore_end=True).finish()
until = time.monotonic() + 60
while not (hung := prefixes.stats()["store"]["stores"][0]["hanging"]) and time.monotonic() < until:
    time.sleep(0.01)
print("hung", hung > 0)
"""


@pytest.mark.parametrize("reader", ["engine", "session"])
def test_a_process_ends_though_its_store_hangs(reader: str, tmp_path: Path) -> None:
    """The threads of a pool of concurrent.futures are waited for at the end of a process."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), reader]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "hung True\n"), ended.stderr


def test_daemons_run_calls_in_order_and_hand_on_what_fails() -> None:
    threads, done = Daemons(1, "kvant-test"), list[int]()
    go = threading.Event()
    first = threads.submit(go.wait, 60)
    cancelled, second = threads.submit(done.append, 1), threads.submit(done.append, 2)
    failing = threads.submit(divmod, 1, 0)
    assert cancelled.cancel()
    threads.end()
    go.set()
    assert first.result(60) and second.result(60) is None and done == [2]
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
