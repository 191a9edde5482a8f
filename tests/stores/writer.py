"""A process that forks others, which write the same blobs into a folder and may be killed.

It reads lines: `start ROUNDS` forks one and answers its number; `wait` answers how all ended. One
that was started with 0 rounds writes for ever: it deletes each blob and writes it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from kvant.stores import Blob, BlobPayload, Bytes, FolderStore, pack_blob

PAGES = tuple(f"ab/{number:064x}" for number in range(4))
ROWS = 1 << 17  # 512 KiB
PIECE = 1 << 12


def make_blob(page: str) -> Blob:
    seed = torch.Generator().manual_seed(PAGES.index(page))
    rows = torch.randn(ROWS, generator=seed)
    return Blob(page, "k0-1", PAGES[0], (1, 2), BlobPayload.from_fields({"0/keys.open": rows}))


class WriterProcess:
    """The writer process, as a test controls it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, rounds: int) -> int:
        return int(self._asked(f"start {rounds}"))

    def wait(self) -> list[int]:
        return [int(word) for word in self._asked("wait").split()]

    def _asked(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()


@contextmanager
def start_writers(folder: Path) -> Iterator[WriterProcess]:
    words = [sys.executable, __file__, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        yield WriterProcess(process)


def write_blobs(folder: str, rounds: int, blobs: Mapping[str, Bytes]) -> None:
    store = FolderStore(folder, min_free=0)
    done = 0
    while not rounds or done < rounds:
        for page, data in blobs.items():
            store.drop(page, "k0-1")
            store.put(page, "k0-1", data)
            blob = store.get(page, "k0-1")
            assert blob is None or blob == data
        done += 1
    for page, data in blobs.items():
        store.put(page, "k0-1", data)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    blobs = {page: pack_blob(make_blob(page)) for page in PAGES}
    call = os.write
    # a slow disk: nearly always a file is half written
    os.write = lambda file, data: call(file, data[:PIECE])
    started: list[int] = []
    for line in sys.stdin:
        if line.startswith("start"):
            child = os.fork()
            if not child:
                write_blobs(folder, int(line.split()[1]), blobs)
                os._exit(0)
            started.append(child)
            print(child, flush=True)
        else:
            ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
            started.clear()
            print(*ended, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
