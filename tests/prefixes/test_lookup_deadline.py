"""Test that a request that abandons a slow store holds no memory, wherever the others are."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvant
from cache.test_transfer import make_filled_cache, store_missing_pages
from hf.zoo import build
from kvant.cache.reports import measure_pools
from kvant.cache.transfer import PageSet, RestoreBuffer
from kvant.prefixes import LookupDeadline, Prefixes
from kvant.prefixes import namespace as shelves
from kvant.prefixes.restore import start_daemon
from kvant.stores import FolderStore, Tiers
from kvant.stores import tiers as stores
from prefixes.test_prefixes import generate_tokens, make_tokens


@pytest.mark.parametrize("moment", ["before", "taken", "put", "settled", "ended"])
@pytest.mark.parametrize("spec", ["raw", "affine8", "affine8,sinks=4"])
def test_closed_waiter_holds_nothing(spec: str, moment: str) -> None:
    cache, other = make_filled_cache(spec, 300), make_filled_cache(spec, 128)
    nbytes, waiting = measure_pools(other)["nbytes_held"], LookupDeadline()
    pieces, shares = PageSet(cache), other.fork()
    waiting.allocate(lambda: shares)
    if moment == "before":
        waiting.cancel()
    arrival = waiting.allocate(lambda: RestoreBuffer(shares, 300, pieces.snapshot_tail_state()))
    assert (arrival is None) == (moment == "before")
    if arrival is not None:
        with arrival:
            if moment == "taken":
                waiting.cancel()
            store_missing_pages(arrival, pieces)
            if moment == "put":
                waiting.cancel()
            restored = arrival.finish(300 if moment != "settled" else 256)
            assert restored.length == {"settled": 256, "ended": 300}.get(moment, 0)
            if moment == "settled":
                waiting.cancel()
    waiting.release(shares)
    assert waiting.is_cancelled == (moment != "ended")
    if waiting.is_cancelled:
        assert not waiting.compute_seconds_left()
        assert waiting.allocate(lambda: kvant.Cache(3, spec)) is None
    else:
        assert waiting.compute_seconds_left() and measure_pools(other)["nbytes_held"] > nbytes
        waiting.cancel()
    other.state.pools.check()
    assert measure_pools(other)["nbytes_held"] == nbytes


def test_failing_cleanup_blocks_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def clear(self) -> None:
            raise RuntimeError("no memory to clear it with")

    cache, waiting = make_filled_cache("raw", 128), LookupDeadline()
    waiting.allocate(Broken)
    waiting.allocate(lambda: cache)
    waiting.cancel()
    assert not cache.length and "no memory to clear it with" in caplog.text


class HungStore(FolderStore):
    """A folder on a disk that disappeared."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free=0)
        self.go = threading.Event()

    def has(self, pages: Any) -> Any:
        self.go.wait(60)
        return super().has(pages)


def test_hanging_store_delays_a_reply_at_most_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "STORE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(stores, "HANG_TIMEOUT_S", 0.05)
    model, prompt, hung = build("llama"), make_tokens(200, seed=0), HungStore(tmp_path)
    with Prefixes(store=Tiers([hung])) as prefixes:
        for end in range(3):
            assert generate_tokens(model, [*prompt, end], prefixes=prefixes) == generate_tokens(
                model, [*prompt, end]
            )
        end_time = time.monotonic() + 60
        while not prefixes.flush(60):  # on a busy machine any call may take 0.05 seconds
            assert time.monotonic() < end_time
        (store_stats,) = prefixes.stats()["store"]["stores"]
        assert (
            store_stats["hanging"]
            and store_stats["skipped"]
            and store_stats["unwritten"]
            and not store_stats["errors"]
        )
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
tiers.HANG_TIMEOUT_S = 0.1
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
def test_process_exits_despite_a_hanging_store(reader: str, tmp_path: Path) -> None:
    """A process joins the threads of a concurrent.futures pool at its end."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), reader]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "hung True\n"), ended.stderr


def test_daemons_return_results_and_forward_errors() -> None:
    go = threading.Event()
    waiting = start_daemon(lambda: go.wait(60), "kvant-test")
    failing = start_daemon(lambda: divmod(1, 0), "kvant-test")
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert not waiting.done()
    go.set()
    assert waiting.result(60)
