"""Threads that OpenMP holds for those that compute."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvant import openmp

pytestmark = pytest.mark.skipif(openmp._load_runtime() is None, reason="here it does nothing")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def compute() -> None:
    torch.ones(1 << 20).add_(1)


def after(call: Callable[[], None]) -> int:
    call()
    return threads()


def more(*calls: Callable[[], None]) -> list[int]:
    """Threads more than before, after each of these calls of another thread."""
    with ThreadPoolExecutor(1) as another:
        another.submit(threads).result()  # it is there
        before = threads()
        return [another.submit(after, one).result() - before for one in calls]


def test_a_thread_that_computed_holds_others_until_it_gives_them_back() -> None:
    assert more(compute, openmp.release_threads) == [2, 0]


def test_a_thread_computes_again_after_that() -> None:
    assert more(compute, openmp.release_threads, compute, openmp.release_threads) == [2, 0, 2, 0]


def test_a_thread_that_computes_alone_holds_none() -> None:
    assert more(openmp.use_one_thread, compute) == [0, 0]


FORK = """
import os, sys, torch
from kvant import openmp
torch.set_num_threads(3)
torch.ones(1 << 20).add_(1)
if not (child := os.fork()):
    openmp.release_threads()
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_waits_for_no_threads_of_its_parent() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=120).returncode == 7


def test_others_compute_as_before() -> None:
    assert more(openmp.use_one_thread, compute) == [0, 0]
    assert torch.get_num_threads() == 3
    assert more(compute, openmp.release_threads) == [2, 0]
