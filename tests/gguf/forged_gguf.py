"""Forged GGUF files: a small model whose header has other bytes and numbers.

Such a file must be refused in one line, or load a model. Loading may need as much memory as twice
the file and 64 MB.

python tests/gguf/forged_gguf.py --seconds 600 [--seed 1]

Try forgeries until the time is up; exit with 1 at the first other outcome.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from gguf_files import make_model, make_vocabulary, write_file
from kvant import checkpoints

ROOM = 64 << 20
HANGS = 60  # seconds: far beyond any forgery that is not stuck
NUMBERS = (0, 1, 2, 3, 63, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
NUM_HEADER_BYTES = 12_000
FAMILIES = ("llama", "qwen3", "gemma2", "phi3")


class StuckForgery(BaseException):
    """A forgery that does not terminate."""


def raise_stuck(*_: Any) -> None:
    raise StuckForgery


def make_forgery(files: list[bytes], rng: random.Random) -> bytes:
    """Return a file with up to three changes, most of them numbers of its header."""
    content = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(min(NUM_HEADER_BYTES, len(content)))
        way = rng.randrange(5)
        if way < 2:
            content[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif way == 2:
            content[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
        elif way == 3:
            content[at] = rng.randrange(256)
        else:
            del content[rng.randint(1, len(content)) :]
    return bytes(content)


def attempt(data: bytes, path: Path) -> str:
    """Return the outcome of a forgery in a word."""
    path.write_bytes(data)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + 2 * len(data) + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        checkpoints.load(str(path), device="cpu", dtype="float32")
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error), str(error)[:300]
        assert "memory" not in str(error), str(error)[:300]
        return "refused"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return "taken"


def fuzz(seed: int, count: int | None, seconds: float) -> Counter[str]:
    """Try forgeries; save the first with another outcome."""
    torch.set_num_threads(1)
    rng, outcomes, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    signal.signal(signal.SIGALRM, raise_stuck)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "one.gguf"
        files = []
        for family in FAMILIES:
            vocabulary = make_vocabulary("<|bos|>", bos_token_id=299, eos_token_id=298)
            write_file(path, family, make_model(family), "Q4_0", **vocabulary)
            files.append(path.read_bytes())
        for file in files:
            assert attempt(file, path) == "taken"
        while time.monotonic() < end and (count is None or outcomes.total() < count):
            data = make_forgery(files, rng)
            signal.alarm(HANGS)
            try:
                outcomes[attempt(data, path)] += 1
            except BaseException:
                kept = Path(tempfile.gettempdir()) / f"forged-{seed}-{outcomes.total()}.gguf"
                kept.write_bytes(data)
                print(
                    f"forgery {outcomes.total()} of seed {seed} is kept in {kept}", file=sys.stderr
                )
                raise
            finally:
                signal.alarm(0)
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    print(json.dumps(dict(fuzz(options.seed, options.count, options.seconds))))
