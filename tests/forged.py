"""Files that somebody has forged: a header of ours with other numbers, lists and names in it.

The checksum is right again, as anybody can make it. Such a file is refused with a CacheFileError,
or it is a cache like any other: it can be read, appended to, attended to, rewound and saved. What
loading takes is bounded by the size of the file: twice that, for states of 16 bits are kept in 32.

    python tests/forged.py --seconds 600 [--seed 1]

Tries forgeries until the time is up, and ends with 1 at the first that does something else.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvant import (
    Cache,
    CacheError,
    CacheFileError,
    CacheSpec,
    GroupSpec,
    RecurrentSpec,
    SharedSpec,
    attend,
    load,
    parse,
    save,
)
from kvant.cache import PagedLayer

MARK = rb"\"checksum\": \""
NUMBERS = (0, -1, 1, 2, 63, 64, 65, 2**31 - 1, 2**31, 2**52, 2**53 + 1, 2**63, 2**64, 10**400)
ODD = (*NUMBERS, 0.5, 1e308, True, None, "", "affine", [], {}, [0], "\ud800")
LONG = 3000  # entries of a list that is made longer
ROOM = 1 << 30  # bytes of address space beyond what there is before the first forgery
HANGS = 60  # seconds: far more than a forgery can take that is not stuck
SPECS = (
    "raw,capacity=16",
    "affine4,sinks=4,tail=0",
    "affine8,window=70,sinks=4",
    "turbo4v2",
    "raw/fp8,start=64",
    "affine4,rotate,step=64,capacity=512",
)


class Stuck(BaseException):
    """A forgery that takes for ever."""


def forge(raw: bytes, edit: Any) -> bytes:
    """The file with what `edit` makes of its header, under a checksum that is right."""
    size = int.from_bytes(raw[:8], "little")
    outer, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    entry = json.loads(outer["__metadata__"]["kvant-cache"])
    edit(entry, outer)
    if isinstance(entry, dict):
        entry["checksum"] = "0" * 64
    if isinstance(outer.get("__metadata__"), dict):
        outer["__metadata__"]["kvant-cache"] = json.dumps(entry)
    return signed(json.dumps(outer).encode(), body)


def signed(header: bytes, body: bytes) -> bytes:
    """A file of these two, with the checksum that they have."""
    header += b" " * (-len(header) % 8)
    blank = struct.pack("<Q", len(header)) + header + body
    at = blank.find(MARK) + len(MARK)
    if at < len(MARK):
        return blank
    return blank[:at] + hashlib.sha256(blank).hexdigest().encode() + blank[at + 64 :]


def originals(folder: Path) -> list[bytes]:
    """One file for every kind of layer and memory."""
    caches = []
    for text in SPECS:
        cache = Cache(2, text)
        count = 16 if "capacity=16" in text else 200
        for state in cache:
            state.append(*torch.randn(2, 2, 2, count, 32), start=[0, 5])
        caches.append(cache)
    layer = parse("affine8", 1).layers[0]
    group = GroupSpec((("rows", layer), ("memory", RecurrentSpec(4))))  # type: ignore[arg-type]
    mixed = Cache(None, CacheSpec((layer, group, RecurrentSpec(), SharedSpec(0))))
    for count in (70, 60):
        mixed[0].append(*torch.randn(2, 1, 1, count, 16))
        mixed[1]["rows"].append(*torch.randn(2, 1, 1, count, 16))  # type: ignore[index]
        mixed[1]["memory"].append(count, {"x": torch.randn(1, 3)})  # type: ignore[index]
        mixed[2].append(count, {"conv": torch.randn(1, 400, 2).bfloat16()})
        mixed.checkpoint()
    files = []
    for cache in (*caches, mixed, Cache(3, "affine4")):
        save(cache, folder / "original")
        files.append((folder / "original").read_bytes())
    return files


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key of a JSON value, the deepest last."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def mutate(value: Any, rng: random.Random) -> None:
    """One change somewhere in a JSON value; numbers are what is changed most."""
    found = list(places(value))
    if not found:
        return
    numbers = [(holder, key) for holder, key in found if type(holder[key]) is int]
    holder, key = rng.choice(numbers if numbers and rng.random() < 0.6 else found)
    inner, way = holder[key], rng.randrange(6)
    if type(inner) is int and way < 3:
        other = rng.choice(numbers)
        near = (inner - 1, inner + 1, inner * 2, other[0][other[1]])
        holder[key] = rng.choice(NUMBERS if way < 2 else near)
    elif isinstance(inner, list) and inner and way < 4:
        holder[key] = inner * rng.choice((2, LONG)) if way < 2 else inner[:-1]
    elif isinstance(holder, dict) and way == 4:
        other_key = rng.choice([k for _, k in found if isinstance(k, str)])
        holder[other_key] = copy.deepcopy(inner)
    elif isinstance(holder, dict) and way == 5:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))


def forgery(files: list[bytes], rng: random.Random) -> bytes:
    def edit(entry: Any, outer: Any) -> None:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutate(entry if rng.random() < 0.85 else outer, rng)

    return forge(rng.choice(files), edit)


def attending(states: Any) -> Iterator[PagedLayer]:
    for state in states:
        leaves = state.values() if isinstance(state, dict) else [state]
        yield from (leaf for leaf in leaves if isinstance(leaf, PagedLayer))


def use(cache: Cache, folder: Path) -> None:
    """What any cache can do; an error of ours is an answer, too."""
    save(cache, folder / "again")
    assert load(folder / "again").length == cache.length
    cache.checkpoint()
    with suppress(MemoryError):  # a fork takes the room that the header asks for
        if cache.batch:
            cache.fork().select([0])
    cache.rewind(cache.reachable(max(0, cache.length - 3)))
    for state in attending(cache):
        keys, values = state.read()
        if state.length == 0:
            continue
        batch, heads, _, dim = keys.shape
        for count in (1, 70):
            more = (torch.randn(*side.shape[:2], count, side.shape[3]) for side in (keys, values))
            k, v = (row.to(side.dtype) for row, side in zip(more, (keys, values), strict=True))
            try:
                view = state.append(k) if state.spec.value_dim else state.append(k, v)
            except (CacheError, ValueError, MemoryError):
                break
            attend(torch.randn(batch, heads * 2, count, dim, dtype=keys.dtype), view)
    cache.rollback()
    try:
        cache.recode("affine8")
    except (CacheError, ValueError):
        return


def attempt(data: bytes, folder: Path) -> str:
    """What became of a forgery, in a word."""
    path = folder / "forged"
    path.write_bytes(data)
    try:
        cache = load(path)
    except CacheFileError as error:
        assert str(path) in str(error) and len(str(error)) < 2000, str(error)[:300]
        return "refused"
    assert cache.nbytes_used <= 2 * len(data), f"{cache.nbytes_used} bytes of {len(data)}"
    use(cache, folder)
    return "taken"


def stuck(*_: Any) -> None:
    raise Stuck


def fuzz(seed: int, count: int | None, seconds: float) -> Counter[str]:
    """Forgery after forgery; the one that does something else is kept in a file."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rng, fates, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    torch.manual_seed(seed)
    signal.signal(signal.SIGALRM, stuck)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = originals(folder)
        for file in files:
            assert attempt(forge(file, lambda entry, outer: None), folder) == "taken"
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, resource.RLIM_INFINITY))
        while time.monotonic() < end and (count is None or fates.total() < count):
            data = forgery(files, rng)
            signal.alarm(HANGS)
            try:
                fates[attempt(data, folder)] += 1
            except BaseException:
                kept = Path(tempfile.gettempdir()) / f"forged-{seed}-{fates.total()}"
                kept.write_bytes(data)
                print(f"forgery {fates.total()} of seed {seed} is kept in {kept}", file=sys.stderr)
                raise
            finally:
                signal.alarm(0)
    return fates


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seconds", type=float, default=1e9)
    asked = parser.parse_args()
    print(json.dumps(dict(fuzz(asked.seed, asked.count, asked.seconds))))
