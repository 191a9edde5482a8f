"""Forged cache files: a kvant header with other numbers, lists and names.

The checksum is valid, since it is easy to compute. Such a file must be refused with a
CacheFileError, or load as a working cache: readable, appendable, and so on. The memory that loading
needs is bounded by twice the file size, since 16-bit states are stored in float32.

python tests/forged.py --seconds 600 [--seed 1]

Try forgeries until the time is up; exit with 1 at the first other outcome.
"""

from __future__ import annotations

import argparse
import copy
import gc
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
LONG = 3000  # entries of a lengthened list
ROOM = 1 << 30  # bytes of address space beyond those of the start
HANGS = 60  # seconds: far beyond any forgery that is not stuck
SPECS = (
    "raw,capacity=16",
    "affine4,sinks=4,tail=0",
    "affine8,window=70,sinks=4",
    "turbo4v2",
    "raw/fp8,start=64",
    "affine4,rotate,step=64,capacity=512",
)


class StuckForgery(BaseException):
    """A forgery that does not terminate."""


def forge(raw: bytes, edit: Any) -> bytes:
    """Return the file with its header changed by `edit`, under a valid checksum."""
    size = int.from_bytes(raw[:8], "little")
    outer, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    entry = json.loads(outer["__metadata__"]["kvant-cache"])
    edit(entry, outer)
    if isinstance(entry, dict):
        entry["checksum"] = "0" * 64
    if isinstance(outer.get("__metadata__"), dict):
        outer["__metadata__"]["kvant-cache"] = json.dumps(entry)
    return sign(json.dumps(outer).encode(), body)


def sign(header: bytes, body: bytes) -> bytes:
    """Return a file of header and tensors with their checksum."""
    header += b" " * (-len(header) % 8)
    blank = struct.pack("<Q", len(header)) + header + body
    position = blank.find(MARK) + len(MARK)
    if position < len(MARK):
        return blank
    return blank[:position] + hashlib.sha256(blank).hexdigest().encode() + blank[position + 64 :]


def make_originals(folder: Path) -> list[bytes]:
    """Return one file for every type of layer and memory."""
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
    """Return every container and key of a JSON value, the deepest last."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def mutate(value: Any, rng: random.Random) -> None:
    """Change one place of a JSON value, most often a number."""
    spots = list(places(value))
    if not spots:
        return
    numbers = [(holder, key) for holder, key in spots if type(holder[key]) is int]
    holder, key = rng.choice(numbers if numbers and rng.random() < 0.6 else spots)
    inner, way = holder[key], rng.randrange(6)
    if type(inner) is int and way < 3:
        other = rng.choice(numbers)
        neighbours = (inner - 1, inner + 1, inner * 2, other[0][other[1]])
        holder[key] = rng.choice(NUMBERS if way < 2 else neighbours)
    elif isinstance(inner, list) and inner and way < 4:
        holder[key] = inner * rng.choice((2, LONG)) if way < 2 else inner[:-1]
    elif isinstance(holder, dict) and way == 4:
        other_key = rng.choice([k for _, k in spots if isinstance(k, str)])
        holder[other_key] = copy.deepcopy(inner)
    elif isinstance(holder, dict) and way == 5:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))


def make_forgery(files: list[bytes], rng: random.Random) -> bytes:
    def edit(entry: Any, outer: Any) -> None:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutate(entry if rng.random() < 0.85 else outer, rng)

    return forge(rng.choice(files), edit)


def list_paged_layers(states: Any) -> Iterator[PagedLayer]:
    for state in states:
        leaves = state.values() if isinstance(state, dict) else [state]
        yield from (leaf for leaf in leaves if isinstance(leaf, PagedLayer))


def use_cache(cache: Cache, folder: Path) -> None:
    """Run every operation of a cache; an error of kvant is a valid outcome."""
    save(cache, folder / "again")
    assert load(folder / "again").length == cache.length
    cache.checkpoint()
    with suppress(MemoryError):  # a fork allocates the capacity that the header requests
        if cache.batch:
            cache.fork().select([0])
    cache.rewind(cache.reachable(max(0, cache.length - 3)))
    for state in list_paged_layers(cache):
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
    """Return the outcome of a forgery in a word."""
    path = folder / "forged"
    path.write_bytes(data)
    try:
        cache = load(path)
    except CacheFileError as error:
        assert str(path) in str(error) and len(str(error)) < 2000, str(error)[:300]
        return "refused"
    assert cache.nbytes_used <= 2 * len(data), f"{cache.nbytes_used} bytes of {len(data)}"
    use_cache(cache, folder)
    return "taken"


def raise_stuck(*_: Any) -> None:
    raise StuckForgery


def fuzz(seed: int, count: int | None, seconds: float) -> Counter[str]:
    """Try forgeries; save the first with another outcome."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rng, outcomes, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    torch.manual_seed(seed)
    signal.signal(signal.SIGALRM, raise_stuck)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make_originals(folder)
        for file in files:
            assert attempt(forge(file, lambda entry, outer: None), folder) == "taken"
        address_space = (
            int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        )
        resource.setrlimit(resource.RLIMIT_AS, (address_space + ROOM, resource.RLIM_INFINITY))
        while time.monotonic() < end and (count is None or outcomes.total() < count):
            data = make_forgery(files, rng)
            gc.collect()  # what the last forgery allocated would count against this one
            signal.alarm(HANGS)
            try:
                outcomes[attempt(data, folder)] += 1
            except BaseException:
                path = Path(tempfile.gettempdir()) / f"forged-{seed}-{outcomes.total()}"
                path.write_bytes(data)
                print(
                    f"forgery {outcomes.total()} of seed {seed} is kept in {path}", file=sys.stderr
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
