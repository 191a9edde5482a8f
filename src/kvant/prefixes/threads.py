"""Threads that wait for stores.

They are daemons: a store that never answers keeps no process from ending. The pools of
`concurrent.futures` join theirs when it ends. Those that compute get a moment to finish: a thread
that is killed inside of torch would abort the process.
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

from kvant.openmp import use_one_thread

T = TypeVar("T")
Call = Callable[[], None]
JOIN_S = 0.5  # how long the end of a process waits for all of them
_started: WeakSet[Thread] = WeakSet()


def start_daemon(call: Call, name: str) -> None:
    """Run a call in a thread of its own, which computes without others."""

    def run() -> None:
        use_one_thread()
        call()

    thread = Thread(target=run, name=name, daemon=True)
    _started.add(thread)
    thread.start()


class Daemons:
    """Up to `count` threads that run calls in order, until `end`."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._count, self._name = count, name
        self._started = 0

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run a call once a thread is free; the future may be cancelled until then."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        if self._started < self._count:
            try:
                start_daemon(self._work, self._name)
            except RuntimeError:  # a limit on threads: those that run do it
                if not self._started:
                    raise
            else:
                self._started += 1
        return future

    def end(self) -> None:
        """End the threads after the calls that are queued, without waiting for them."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and the memory that it holds


@atexit.register
def _join() -> None:
    until = time.monotonic() + JOIN_S
    for thread in [*_started]:
        thread.join(max(0.0, until - time.monotonic()))
