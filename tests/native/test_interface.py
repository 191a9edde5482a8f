"""The C interface touches what its requests state and nothing else, whatever else they say."""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import Cache, attend
from kvant.attention.native import interface, sealing
from kvant.native import library, rotated, rotation, rows
from native.cases import AFFINE, FP8, Case, nbytes_of
from native.interface import ENTRIES, STRUCTS, Pointer, loaded, places
from native.memory import memory

pytestmark = pytest.mark.skipif(
    library().functions is None, reason="the native library is not here"
)
RECORDS = {
    "attend": interface.RECORD,
    "seal": sealing.RECORD,
    "rotate": rotation.RECORD,
    "put": rows.RECORD,
}


@pytest.fixture(scope="module")
def functions() -> ctypes.CDLL:
    found = library().functions
    assert found is not None
    return loaded(found._name)


def rich(case: Case) -> bool:
    """Is there more than one of everything?"""
    r = case.request
    if case.entry == "attend":
        many = min(r.batch, r.heads, r.num_pages, r.num_dense, r.num_sinks, r.queries) > 1
        return many and r.keys.format == AFFINE
    if case.entry == "seal":
        return min(r.batch, r.heads, r.pages) > 1 and r.format == AFFINE
    return min(r.batch, r.heads, r.count) > 1 and getattr(r, "sides", 2) == 2


@cache
def seeds(entry: str, path: str | None) -> tuple[int, ...]:
    """Of two rich requests, or of two that lead to memory by this pointer."""
    given, found = memory(), []
    for seed in range(10_000):
        given.free()
        case = Case(entry, random.Random(seed), given)
        if len(case.contents.get(path, b"")) >= 16 if path else rich(case):
            found.append(seed)
        if len(found) == 2:
            return tuple(found)
    raise AssertionError(f"{entry}: no such request")


def cases(entry: str, path: str | None = None) -> Iterator[Callable[[], Case]]:
    """Each request can be made again, as it was."""
    given = memory()

    def made(seed: int) -> Case:
        given.free()
        return Case(entry, random.Random(seed), given)

    return (partial(made, seed) for seed in seeds(entry, path))


def pointers() -> list[tuple[str, str]]:
    return [
        (entry, place.path)
        for entry, name in ENTRIES.items()
        for place in places(STRUCTS[name]())
        if place.kind is Pointer
    ]


@pytest.mark.parametrize("name", ENTRIES.values())
def test_each_pointer_travels_with_its_bytes(name: str) -> None:
    paths = [place.path for place in places(STRUCTS[name]())]
    for place in places(STRUCTS[name]()):
        if place.kind is Pointer:
            assert paths[paths.index(place.path) + 1] == nbytes_of(place.path)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_record_is_as_long_as_its_struct(entry: str) -> None:
    assert RECORDS[entry].size == ctypes.sizeof(STRUCTS[ENTRIES[entry]])


@pytest.mark.parametrize("missing", [1, 16])
@pytest.mark.parametrize(("entry", "path"), pointers())
def test_a_byte_too_few_is_refused(
    functions: ctypes.CDLL, entry: str, path: str, missing: int
) -> None:
    """The memory is as short as it is said to be, and a page that nobody may touch follows."""
    for make in cases(entry, path):
        assert make().call(functions) is None
        case = make()
        content, written = case.contents[path][missing:], path in case.written
        case.hold(path, len(content) if written else content, written=written)
        assert case.call(functions) is not None
        case = make()
        case.places()[path].set(0)
        assert case.call(functions) is not None or path.split(".")[-1] in ("lse", "sink_logits")


BEYOND = {
    "attend": {
        "batch heads queries page num_pages num_dense num_sinks": lambda was: 3 * was + 1,
        "keys.dense.batch values.dense.head keys.dense.row values.sinks.row": lambda was: 3 * was,
        "keys.codes.slot values.codes.head keys.scale.slot keys.bias.head": lambda was: 3 * was,
        "q.batch q.head q.row": lambda was: 3 * was,
        "keys.format values.dtype q_dtype out_dtype": lambda was: 4,
        "keys.bits": lambda was: 7,
        "keys.group": lambda was: was + 16,
        "keys.dim values.dim": lambda was: was - 8,
        "group threads columns": lambda was: 0,
        "first_page dense_from": lambda was: 1 << 60,
        "tail dense_until own_from window mask_sinks chunk": lambda was: -2,
        "table_stride": lambda was: 3 * was,
    },
    "seal": {
        "batch pages heads page rows.batch rows.head rows.row": lambda was: 3 * was,
        "dtype arrangement": lambda was: 3,
        "format": lambda was: 0,
        "bits": lambda was: 7,
        "dim": lambda was: was - 8,
        "group": lambda was: was + 1,
        "threads": lambda was: 1 << 40,
    },
    "rotate": {
        "batch heads count rows.batch rows.head rows.row": lambda was: 3 * was,
        "dtype": lambda was: 3,
        "dim": lambda was: was - 8,
        "threads": lambda was: 0,
    },
    "put": {
        "batch heads count slot": lambda was: 3 * was + 3,
        "sides": lambda was: 3,
        "side[0].rows.batch side[1].rows.head side[1].rows.row": lambda was: 3 * was,
        "side[0].batch side[1].head side[0].slots side[0].bytes": lambda was: 3 * was,
    },
}
NUMBERS = [
    (entry, path, lie)
    for entry, lies in BEYOND.items()
    for names, lie in lies.items()
    for path in names.split()
]


@pytest.mark.parametrize(("entry", "path", "lie"), NUMBERS)
def test_a_number_that_leads_too_far_is_refused(
    functions: ctypes.CDLL, entry: str, path: str, lie: Callable[[int], int]
) -> None:
    for make in cases(entry):
        for huge in (0, -2, -(1 << 63), 1 << 31, (1 << 63) - 1):
            case = make()
            place = case.places()[path]
            place.set(huge or lie(place.value))
            refusal = case.call(functions)
            assert huge > 0 or refusal is not None


@pytest.mark.parametrize("entry", [-1, 7, 1 << 31, 1 << 62, -(1 << 63)])
def test_a_page_that_is_not_there_is_refused(functions: ctypes.CDLL, entry: int) -> None:
    for make in cases("attend"):
        count = len(make().contents["page_table"]) // 8
        for at in range(count - make().request.num_pages, count):
            case = make()
            table = bytearray(case.contents["page_table"])
            struct.pack_into("@q", table, 8 * at, entry + 100 if entry == 7 else entry)
            case.hold("page_table", bytes(table))
            assert (
                case.call(functions)
                == "page_table: slots that the codes, scales and biases do not have"
            )


@pytest.mark.parametrize("start", [-1, 1 << 62, -(1 << 63)])
def test_a_sequence_that_begins_nowhere_is_refused(functions: ctypes.CDLL, start: int) -> None:
    for make in cases("attend"):
        case = make()
        case.hold("start", case.contents["start"][8:] + struct.pack("@q", start))
        assert case.call(functions) == "start: no column that can be counted"


@pytest.mark.parametrize(("entry", "path"), [("attend", "keys."), ("seal", "")])
def test_a_bias_of_other_codes_is_refused(functions: ctypes.CDLL, entry: str, path: str) -> None:
    """Kernels go by it wherever there is one."""
    for make in cases(entry):
        case = make()
        found = case.places()
        for name, value in (("format", FP8), ("bits", 8), ("group", found[f"{path}dim"].value)):
            found[path + name].set(value)
        assert case.call(functions) == "bias: only affine codes have one"


@pytest.mark.parametrize("path", ["page_table", "start"])
@pytest.mark.parametrize("over", ["out", "lse"])
def test_outputs_over_the_table_are_refused(functions: ctypes.CDLL, path: str, over: str) -> None:
    """Kernels go by the table while others of them write."""
    for make in cases("attend"):
        case = make()
        case.hold(over, case.contents[path] + bytes(1 << 20))
        found = case.places()
        found[path].set(found[over].value)
        assert case.call(functions) == "out: memory that says where rows lie"


def test_python_says_what_is_refused() -> None:
    state: Any = Cache(1, "affine8,tail=0,prefill=stored")[0]
    view = state.append(*torch.randn(2, 1, 2, 200, 32))
    q = torch.randn(1, 2, 1, 32)
    attend(q, view, backend="native")
    lost = replace(view, page_table=view.page_table + 1000)
    with pytest.raises(RuntimeError, match="refuses what it was asked: page_table: slots"):
        attend(q, lost, backend="native")
    with pytest.raises(RuntimeError, match="signs: fewer than channels"):
        rotated(torch.randn(1, 1, 1, 64), (ctypes.c_float * 32)(), last=False)


def test_no_sequence_has_nothing_to_attend_to(functions: ctypes.CDLL) -> None:
    """Bug: the number of threads was divided by that of sequences."""
    case = Case("attend", random.Random(1), memory())
    case.request.batch = 0
    assert case.call(functions) is None


def test_random_requests_touch_nothing_else(functions: ctypes.CDLL) -> None:
    run = [sys.executable, "-m", "native.fuzz", functions._name, "--iterations", "400"]
    done = subprocess.run(run, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
