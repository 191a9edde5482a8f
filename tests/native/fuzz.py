"""Requests of random shapes to the native library, half of them with sizes that lie.

    PYTHONPATH=tests python -m native.fuzz LIBRARY --iterations 1000 --seed 1
    make fuzz SECONDS=600    # the same under sanitizers, for each instruction set

A request that tells the truth must be served. One that lies may be refused, and then nothing is
written; served or not, nothing beyond the bytes that it states may be touched. Every request is
made from the seed and its number, so `--first` goes back to one.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections import Counter

from native.cases import Case, nbytes_of
from native.interface import ENTRIES, STRUCTS, Field, Pointer, load_functions
from native.memory import make_memory

ODD = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    80,
    127,
    128,
    129,
    256,
    272,
    4096,
)
HUGE = tuple(
    sign * (1 << power) + by
    for power in (31, 32, 40, 61, 62)
    for sign in (1, -1)
    for by in (-1, 0, 1)
)
HUGE += ((1 << 63) - 1, -(1 << 63), -1, -2, -16)
# Memory that contains addresses of other memory.
TABLES = ("extent.numbers", "extent.sealed.data", "extent.open.data")
TABLES += ("steps.copies", "steps.writes", "steps.seals")
ENDLESS = 10_000  # rows at one address: valid, but endless work


def falsify(case: Case, rng: random.Random) -> None:
    """Change one number of a request, or of a table that it leads to."""
    tables = [path for path in TABLES if case.contents.get(path)]
    if tables and rng.random() < 0.1:
        path = rng.choice(tables)
        content = bytearray(case.contents[path])
        position = 8 * rng.randrange(len(content) // 8)
        content[position : position + 8] = ctypes.c_int64(rng.choice(ODD + HUGE))
        case.hold(path, bytes(content))
        return
    place = rng.choice(list(case.places().values()))
    if place.kind is Pointer:
        place.set(0)
    elif place.kind is ctypes.c_double:
        place.set(rng.choice((0.0, -1.0, 1e300, float("inf"), float("nan"))))
    elif place.name.endswith("nbytes"):
        shorten(case, place, rng)
    else:
        old_value = place.value
        neighbours = (
            old_value - 1,
            old_value + 1,
            old_value - 16,
            old_value + 16,
            old_value // 2,
            2 * old_value,
            3 * old_value,
        )
        value = rng.choice(rng.choice((neighbours, ODD, HUGE)))
        place.set(min(max(value, -(1 << 63)), (1 << 63) - 1))


def shorten(case: Case, place: Field, rng: random.Random) -> None:
    """State fewer bytes than before, or more than any memory has."""
    pointer = next(p for p in case.contents.keys() | {""} if not p or nbytes_of(p) == place.path)
    if not pointer or rng.random() < 0.1:
        place.set(-rng.choice((1, 8, 1 << 62)))
        return
    nbytes = max(0, place.value - rng.choice((1, 2, 4, 8, 16, 64, place.value // 2, place.value)))
    content = case.contents[pointer][:nbytes]
    is_output = pointer in case.written
    case.hold(pointer, nbytes if is_output else content, is_output=is_output)


def is_endless(case: Case) -> bool:
    sides = [
        struct for struct in case.structs.values() if isinstance(struct, STRUCTS["kvant_side"])
    ]
    r, flat = case.request, 0 in [side.open.row for side in sides]
    if case.entry == "store":
        return bool(r.page > ENDLESS and flat)
    if case.entry != "attend":
        return False
    endless_new_rows = r.num_own > ENDLESS and 0 in (r.own_keys.row, r.own_values.row)
    return bool(endless_new_rows or (flat and case.structs["extent"].page > ENDLESS))


def run_requests(path: str, seed: int, first: int, iterations: int, seconds: float) -> Counter[str]:
    functions, memory, outcomes = load_functions(path), make_memory(), Counter[str]()
    stop = time.monotonic() + seconds
    for number in range(first, first + iterations):
        if time.monotonic() > stop:
            break
        rng = random.Random(f"{seed}/{number}")
        case = Case(rng.choice(list(ENTRIES)), rng, memory)
        num_changes = rng.choice((0, 1, 1, 2))
        for _ in range(num_changes):
            falsify(case, rng)
        if is_endless(case):
            continue
        try:
            refusal = case.call(functions)
            assert num_changes or refusal is None, f"refused, though it is true: {refusal}"
        except AssertionError as error:
            raise SystemExit(f"{case.entry}, --seed {seed} --first {number}: {error}") from error
        outcomes["refused" if refusal else "served"] += 1
        outcomes[f"{case.entry}: {refusal or 'served'}"] += 1
        memory.free()
        if number % 1000 == 999:
            print(
                f"{number + 1}: {outcomes['served']} served, {outcomes['refused']} refused",
                flush=True,
            )
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--iterations", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    outcomes = run_requests(
        options.library, options.seed, options.first, options.iterations, options.seconds
    )
    served, refused = outcomes.pop("served", 0), outcomes.pop("refused", 0)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:>8}  {outcome}")
    print(f"{served + refused} requests: {served} served, {refused} refused")
    if min(served, refused) * 4 < served + refused:
        raise SystemExit("less than a quarter served, or refused: this proves little")


if __name__ == "__main__":
    main()
