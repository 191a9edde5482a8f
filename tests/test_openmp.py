"""Test the worker threads that OpenMP keeps for computing threads."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvant.platform import c_libraries

pytestmark = pytest.mark.skipif(c_libraries._load_openmp() is None, reason="here it does nothing")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def list_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def compute() -> None:
    torch.ones(1 << 20).add_(1)


def list_threads_after(call: Callable[[], None]) -> set[str]:
    call()
    return list_threads()


def count_added_threads(*calls: Callable[[], None]) -> list[int]:
    """Return the additional threads after each of these calls of another thread.

    A thread of an earlier test may end meanwhile.
    """
    with ThreadPoolExecutor(1) as another:
        before = another.submit(list_threads).result()  # starts it
        return [len(another.submit(list_threads_after, call).result() - before) for call in calls]


def test_computing_thread_keeps_workers_until_it_releases_them() -> None:
    assert count_added_threads(compute, c_libraries.release_threads) == [2, 0]


def test_thread_computes_again_after_a_release() -> None:
    assert count_added_threads(
        compute, c_libraries.release_threads, compute, c_libraries.release_threads
    ) == [2, 0, 2, 0]


def test_single_threaded_computation_keeps_no_workers() -> None:
    assert count_added_threads(c_libraries.use_one_thread, compute) == [0, 0]


FORK = """
import os, sys, torch
from kvant.platform import c_libraries
torch.set_num_threads(3)
torch.ones(1 << 20).add_(1)
if not (child := os.fork()):
    c_libraries.release_threads()
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_process_does_not_wait_for_parent_threads() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=120).returncode == 7


def test_other_threads_are_unaffected() -> None:
    assert count_added_threads(c_libraries.use_one_thread, compute) == [0, 0]
    assert torch.get_num_threads() == 3
    assert count_added_threads(compute, c_libraries.release_threads) == [2, 0]
