"""Test that freed memory is reused in any thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, threading
import torch
from kvant.platform import c_libraries

faults = []

def work():
    for _ in range(20):
        small = [torch.zeros(1 << 16) for _ in range(8)]
        large = [torch.zeros(5 << 19) for _ in range(3)]  # as logits are, of 16 sequences
        del small, large
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

if "keep" in sys.argv:
    c_libraries.keep_freed_memory()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(faults[-1] - faults[9])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is of glibc")
def test_freed_memory_is_reused() -> None:
    def faults(*options: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, *options], capture_output=True, text=True, check=True
        )
        return int(ran.stdout)

    if faults() < 10_000:
        pytest.skip("glibc keeps what is freed by itself here")
    assert faults("keep") < 100


THREADS = """
import ctypes, sys, threading
from kvant.platform import c_libraries

if "keep" in sys.argv:
    c_libraries.keep_freed_memory()
glibc = ctypes.CDLL(None)
barrier = threading.Barrier(24)

def allocate():
    barrier.wait()
    block = bytearray(4096)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(24)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
glibc.malloc_info(0, ctypes.c_void_p.in_dll(glibc, "stdout"))
glibc.fflush(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is of glibc")
def test_threads_share_two_heaps() -> None:
    def count_heaps(*options: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", THREADS, *options], capture_output=True, text=True, check=True
        )
        return ran.stdout.count("<heap nr=")

    if count_heaps() <= 2:
        pytest.skip("glibc gives threads no heaps of their own here")
    assert count_heaps("keep") <= 2
