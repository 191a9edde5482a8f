"""Run calls that may block on a store in daemon threads.

A store that never answers must not keep a process alive. `concurrent.futures` would: it joins its
threads at exit without a timeout. The threads here are daemons, joined at exit for a short time
only. Without this join, exit could kill a thread inside torch, which aborts the process.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakSet

from kvant.platform.openmp import use_one_thread

T = TypeVar("T")
Call = Callable[[], None]
JOIN_TIMEOUT_S = 0.5  # seconds that exit waits for all threads
_threads: WeakSet[Thread] = WeakSet()


def start_daemon(call: Call, name: str) -> None:
    """Run a call in a new daemon thread, in which torch computes single-threaded."""

    def run() -> None:
        use_one_thread()
        call()

    thread = Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


class DaemonExecutor:
    """Run calls in up to `count` daemon threads, first come first served, until `shutdown`."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._count, self._name = count, name
        self._num_started = 0

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a call for the next free thread; its future can be cancelled until then."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        if self._num_started < self._count:
            try:
                start_daemon(self._work, self._name)
            except RuntimeError:  # no more threads allowed: the running ones suffice
                if not self._num_started:
                    raise
            else:
                self._num_started += 1
        return future

    def shutdown(self) -> None:
        """End the threads after the calls that are queued, without waiting for them."""
        for _ in range(self._num_started):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # frees the memory that it references


@atexit.register
def _join() -> None:
    end_time = time.monotonic() + JOIN_TIMEOUT_S
    for thread in [*_threads]:
        thread.join(max(0.0, end_time - time.monotonic()))
