"""Run calls in a process that may fail: after a crash or a time-out the next call gets a new one.

A GPU is unusable for a process after an error in a kernel, and a kernel cannot be interrupted.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = get_context("spawn")  # a forked process could not use a GPU that this one has used


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or why it failed."""

    value: Any = None
    error: str | None = None


class Worker:
    """A process that runs one call at a time; `environment` is set before it imports anything."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: Any = None
        self._connection: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *args: object) -> None:
        self._stop()

    def run(self, call: Callable[[], Any], timeout: float) -> Outcome:
        """Run a picklable call; kill the process if it takes longer than `timeout` seconds."""
        if self._process is None:
            self._start()
        outcome = self._exchange(call, timeout)
        if outcome.error is not None:
            self._stop()
        return outcome

    def _exchange(self, call: Callable[[], Any], timeout: float) -> Outcome:
        try:
            self._connection.send(call)
            if not self._connection.poll(timeout):
                return Outcome(error=f"stopped after {timeout:.0f} s")
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            return Outcome(error=f"its process ended with exit code {self._process.exitcode}")
        return outcome

    def _start(self) -> None:
        self._connection, remote = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=run_calls, args=(remote,))
        with set_environment(self._environment):
            self._process.start()
        remote.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


@contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment inside the context."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_calls(connection: Connection) -> None:
    """Run the calls that the connection brings, until its other end closes."""
    try:
        while True:
            connection.send(_run_call(connection.recv()))
    except (EOFError, KeyboardInterrupt):
        return


def _run_call(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(call())
    except Exception as error:  # compilers and drivers raise errors of any class
        traceback.print_exc()
        reason = next(iter(str(error).strip().splitlines()), "no reason is given")
        return Outcome(error=f"{type(error).__name__}: {reason}")
