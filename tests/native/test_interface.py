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
from kvant.attention.native import structs
from kvant.native import (
    MAP_STRUCT,
    MULTIPLY_STRUCT,
    NORM_STRUCT,
    ROTATE_STRUCT,
    STEP_STRUCT,
    get_library,
    rotate_rows,
)
from kvant.page_table import FIRST_OPEN, FIRST_SEALED, FIRST_VISIBLE, LENGTH, STOP_SEALED
from native.cases import AFFINE, FOUR, FP8, Case, nbytes_of
from native.interface import ENTRIES, STRUCTS, Pointer, all_places, loaded, places
from native.memory import memory

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
RECORDS = {
    "kvant_side": structs.SIDE_STRUCT,
    "kvant_extent": structs.PAGE_TABLE_STRUCT,
    "kvant_request": structs.ATTEND_STRUCT,
    "kvant_store_request": structs.STORE_STRUCT,
    "kvant_steps": structs.PLAN_STRUCT,
    "kvant_rotate_request": ROTATE_STRUCT,
    "kvant_norm_request": NORM_STRUCT,
    "kvant_choose_request": structs.CHOOSE_STRUCT,
    "kvant_multiply_request": MULTIPLY_STRUCT,
    "kvant_map_request": MAP_STRUCT,
    "kvant_step": STEP_STRUCT,
}


@pytest.fixture(scope="module")
def functions() -> ctypes.CDLL:
    found = get_library().functions
    assert found is not None
    return loaded(found._name)


def rich(case: Case) -> bool:
    """Is there more than one of everything?"""
    r = case.request
    if case.entry == "attend":
        e, keys, values = (case.structs[path] for path in ("extent", "keys", "values"))
        many = min(e.batch, r.heads, e.sealed.width, e.open.width, r.num_own, r.queries) > 1
        slots = all(field.nbytes > 2 * field.slot for field in (keys.codes, keys.open, values.open))
        # Pages of sinks are read whatever the page is: others may begin behind all rows.
        return many and slots and keys.format == AFFINE and e.sinks > 0
    if case.entry == "store":
        sides = case.structs["side[0].stored"], case.structs["side[1].stored"]
        steps = case.structs["steps"]
        many = min(r.batch, r.heads, r.count, r.sides, steps.num_writes, steps.num_seals) > 1
        many = many and steps.num_copies == 1 and r.count > r.page
        slots = all(side.open.nbytes > 2 * side.open.slot for side in sides)
        return many and slots and all(side.format == AFFINE for side in sides)
    if case.entry == "norm":
        return r.count > 1
    if case.entry == "multiply":
        return min(r.count, r.outs) > 1
    if case.entry == "map":
        strides = (r.a.stride, r.b.stride, r.out.stride)
        every = [getattr(one, name) for one in strides for name in FOUR]
        return min(getattr(r.shape, name) for name in FOUR) > 1 and min(every) > 0
    if case.entry == "choose":
        e = case.structs["extent"]
        many = min(e.batch, r.heads, r.queries, e.sealed.width, r.num_chosen) > 1
        return many and r.bounds.nbytes > 2 * r.bounds.slot
    return min(r.batch, r.heads, r.count) > 1


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
        for entry in ENTRIES
        for place in all_places(entry)
        if place.kind is Pointer
    ]


@pytest.mark.parametrize("name", STRUCTS)
def test_each_pointer_travels_with_its_bytes(name: str) -> None:
    paths = [place.path for place in places(STRUCTS[name]())]
    for place in places(STRUCTS[name]()):
        if place.kind is Pointer:
            assert paths[paths.index(place.path) + 1] == nbytes_of(place.path)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_as_long_as_its_struct(name: str) -> None:
    assert RECORDS[name].size == ctypes.sizeof(STRUCTS[name])


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
        assert case.call(functions) is not None or (entry, path) in OPTIONAL


OPTIONAL = {
    ("multiply", "bias"),
    *(("attend", name) for name in ("lse", "sink_logits", "chosen")),
}

BEYOND = {
    "attend": {
        "extent.batch heads queries num_own extent.page": lambda was: 3 * was + 1,
        "extent.sealed.width extent.open.width": lambda was: 3 * was + 9,
        "own_keys.batch own_values.head own_keys.row": lambda was: 3 * was,
        "keys.open.slot values.open.head keys.open.row": lambda was: 3 * was,
        "keys.codes.slot values.codes.head keys.scale.slot keys.bias.head": lambda was: 3 * was,
        "q.batch q.head q.row extent.sealed.stride extent.open.stride": lambda was: 3 * was,
        "keys.format values.dtype q_dtype out_dtype": lambda was: 4,
        "keys.bits": lambda was: 7,
        "keys.group": lambda was: was + 16,
        "keys.dim values.dim": lambda was: was - 8,
        "keys.arrangement group threads": lambda was: 0,
        "extent.tail extent.dense_until extent.sinks num_dense": lambda was: -2,
        "window mask_sinks chunk": lambda was: -2,
    },
    "store": {
        "batch heads count page": lambda was: 3 * was + 1,
        "steps.num_copies steps.num_writes steps.num_seals": lambda was: 3 * was + 1,
        "side[0].rows.batch side[1].rows.head side[0].rows.row": lambda was: 3 * was,
        "side[0].stored.open.slot side[1].stored.open.head": lambda was: 3 * was,
        "side[0].stored.open.row side[1].stored.codes.slot": lambda was: 3 * was,
        "side[1].stored.scale.head side[0].stored.bias.slot": lambda was: 3 * was,
        "side[0].stored.dtype side[1].stored.arrangement sides": lambda was: 3,
        "side[0].stored.format": lambda was: 4,
        "side[1].stored.bits": lambda was: 7,
        "side[1].stored.dim": lambda was: was - 8,
        "side[0].stored.group": lambda was: was + 1,
        "threads": lambda was: 1 << 40,
    },
    "rotate": {
        "batch heads count rows.batch rows.head rows.row": lambda was: 3 * was,
        "dtype": lambda was: 3,
        "dim": lambda was: was - 8,
        "threads": lambda was: 0,
    },
    "norm": {
        "count": lambda was: 3 * was,
        "dtype": lambda was: 3,
        "dim": lambda was: was - 16,
        "threads": lambda was: 0,
    },
    "multiply": {
        "count width outs": lambda was: 3 * was,
        "part": lambda was: was + 1,
        "threads": lambda was: 0,
    },
    "map": {
        "shape.first shape.third shape.last a.stride.first b.stride.second": lambda was: 3 * was,
        "out.stride.third out.stride.last": lambda was: 3 * was,
        "operation": lambda was: 5,
        "dtype": lambda was: 3,
        "threads": lambda was: 0,
    },
    "choose": {
        "extent.batch heads group queries num_chosen": lambda was: 3 * was + 20,
        "extent.sealed.width": lambda was: 3 * was + 9,
        "q.batch q.head q.row extent.sealed.stride bounds.slot bounds.head": lambda was: 3 * was,
        "dtype q_dtype": lambda was: 3,
        "dim": lambda was: was - 8,
        "threads": lambda was: 0,
    },
}
NUMBERS = [
    (entry, path, lie)
    for entry, lies in BEYOND.items()
    for names, lie in lies.items()
    for path in names.split()
]


HUGE = (-2, -(1 << 63), 1 << 31, (1 << 63) - 1)


@pytest.mark.parametrize(
    ("entry", "path", "lie", "sizes"),
    [
        *((*number, (0, HUGE[i % 4])) for i, number in enumerate(NUMBERS)),  # 0: the lie itself
        *(pytest.param(*number, (0, *HUGE), marks=pytest.mark.laws) for number in NUMBERS),
    ],
)
def test_a_number_that_leads_too_far_is_refused(
    functions: ctypes.CDLL,
    entry: str,
    path: str,
    lie: Callable[[int], int],
    sizes: tuple[int, ...],
) -> None:
    for make in cases(entry):
        for huge in sizes:
            case = make()
            place = case.places()[path]
            place.set(huge or lie(place.value))
            refusal = case.call(functions)
            assert huge > 0 or refusal is not None


SLOTS_OF = {
    "sealed": "sealed: slots that the codes, scales and biases do not have",
    "open": "open: slots that the open pages do not have",
}


@pytest.mark.parametrize("table", SLOTS_OF)
@pytest.mark.parametrize("slot", [-1, 100, 1 << 31, 1 << 62, -(1 << 63)])
def test_a_page_that_is_not_there_is_refused(functions: ctypes.CDLL, slot: int, table: str) -> None:
    path = f"extent.{table}.data"
    for make in cases("attend", path):
        for at in make().readable[table]:
            case = make()
            entries = bytearray(case.contents[path])
            struct.pack_into("@q", entries, 8 * at, slot)
            case.hold(path, bytes(entries))
            assert case.call(functions) == SLOTS_OF[table]


@pytest.mark.parametrize("number", [LENGTH, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, FIRST_VISIBLE])
@pytest.mark.parametrize("value", [1 << 62, -(1 << 63), (1 << 63) - 1])
def test_a_sequence_that_is_nowhere_is_refused(
    functions: ctypes.CDLL, number: int, value: int
) -> None:
    for make in cases("attend"):
        case = make()
        numbers = bytearray(case.contents["extent.numbers"])
        struct.pack_into("@q", numbers, len(numbers) - 56 + 8 * number, value)
        case.hold("extent.numbers", bytes(numbers))
        refusal = case.call(functions)
        assert refusal is not None and refusal.startswith("numbers: ")


LIMITS = {  # of each number: below zero, or beyond what there is
    "copies": ("open", "open"),
    "writes": ("batch", "open", "page", "page", "count"),
    "seals": ("batch", "sealed", "open", "count"),
}


@pytest.mark.parametrize(
    ("steps", "at"), [(steps, at) for steps, limits in LIMITS.items() for at in range(len(limits))]
)
@pytest.mark.parametrize("value", [-7, 100_000, 1 << 62, -(1 << 63), (1 << 63) - 1])
def test_a_step_to_where_nothing_is_is_refused(
    functions: ctypes.CDLL, steps: str, at: int, value: int
) -> None:
    served = 0
    for make in cases("store", f"steps.{steps}"):
        width = len(LIMITS[steps])
        for step in range(len(make().contents[f"steps.{steps}"]) // 8 // width):
            case = make()
            numbers = bytearray(case.contents[f"steps.{steps}"])
            source = struct.unpack_from("@q", numbers, 8 * (width * step + 2))[0] if at == 3 else -1
            struct.pack_into("@q", numbers, 8 * (width * step + at), value)
            case.hold(f"steps.{steps}", bytes(numbers))
            refusal = case.call(functions)
            unread = (steps, at) == ("seals", 3) and source >= 0
            served += refusal is None
            assert unread or (refusal is not None and refusal.startswith(f"{steps}: "))
    assert not served or (steps, at) == ("seals", 3)


@pytest.mark.parametrize("value", [9, 100_000, 1 << 62, (1 << 63) - 1])
def test_a_choice_of_what_is_not_there_is_refused(functions: ctypes.CDLL, value: int) -> None:
    for make in cases("attend", "chosen"):
        numbers = struct.unpack(
            f"@{len(make().contents['chosen']) // 8}q", make().contents["chosen"]
        )
        for at in [i for i, n in enumerate(numbers) if n >= 0]:
            case = make()
            given = [*numbers[:at], value, *numbers[at + 1 :]]
            case.hold("chosen", struct.pack(f"@{len(given)}q", *given))
            assert (case.call(functions) or "").startswith("chosen: pages that are not there")
        case = make()
        case.request.num_chosen *= value
        assert case.call(functions) is not None


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("value", [-1, 1000, 1 << 41, 1 << 62, -(1 << 63), (1 << 63) - 1])
def test_ranges_that_lead_nowhere_are_refused(functions: ctypes.CDLL, at: int, value: int) -> None:
    for make in cases("choose"):
        for query in range(len(make().contents["ranges"]) // 40):
            case = make()
            ranges = bytearray(case.contents["ranges"])
            struct.pack_into("@q", ranges, 40 * query + 8 * at, value)
            case.hold("ranges", bytes(ranges))
            assert case.call(functions) is not None


@pytest.mark.parametrize("slot", [-1, 100, 1 << 31, 1 << 62, -(1 << 63)])
def test_bounds_that_are_not_there_are_refused(functions: ctypes.CDLL, slot: int) -> None:
    path = "extent.sealed.data"
    for make in cases("choose", path):
        for at in make().readable["sealed"]:
            case = make()
            entries = bytearray(case.contents[path])
            struct.pack_into("@q", entries, 8 * at, slot)
            case.hold(path, bytes(entries))
            assert case.call(functions) == "bounds: fewer than slots"


@pytest.mark.parametrize(("entry", "path"), [("attend", "keys."), ("store", "side[0].stored.")])
def test_a_bias_of_other_codes_is_refused(functions: ctypes.CDLL, entry: str, path: str) -> None:
    """Kernels go by it wherever there is one."""
    for make in cases(entry):
        case = make()
        found = case.places()
        for name, value in (("format", FP8), ("bits", 8), ("group", found[f"{path}dim"].value)):
            found[path + name].set(value)
        assert case.call(functions) == "bias: only affine codes have one"


@pytest.mark.parametrize("path", ["extent.sealed.data", "extent.open.data", "extent.numbers"])
@pytest.mark.parametrize("over", ["out", "lse"])
def test_outputs_over_the_table_are_refused(functions: ctypes.CDLL, path: str, over: str) -> None:
    """Kernels go by the table while others of them write."""
    for make in cases("attend", path):
        case = make()
        case.hold(over, case.contents[path] + bytes(1 << 20))
        found = case.places()
        found[path].set(found[over].value)
        assert case.call(functions) == "out: memory that says where rows lie"


@pytest.mark.parametrize("path", ["keys", "values", "extent"])
def test_outputs_over_what_is_pointed_to_are_refused(functions: ctypes.CDLL, path: str) -> None:
    for make in cases("attend"):
        case = make()
        found = case.places()
        found["out"].set(case.lies_at[path])
        found["out_nbytes"].set(1 << 23)
        case.lies_at["out"] = case.memory.take(b"")
        case.contents["out"] = b""
        assert case.call(functions) == "out: memory that says where rows lie"


@pytest.mark.parametrize("steps", LIMITS)
def test_pages_over_the_steps_are_refused(functions: ctypes.CDLL, steps: str) -> None:
    for make in cases("store", f"steps.{steps}"):
        case = make()
        found = case.places()
        found["side[0].stored.open.data"].set(case.lies_at[f"steps.{steps}"] // 64 * 64)
        assert case.call(functions) == "stored: memory that says where rows go"


def test_python_says_what_is_refused() -> None:
    state: Any = Cache(1, "affine8,tail=0,prefill=stored")[0]
    view = state.append(*torch.randn(2, 1, 2, 200, 32))
    q = torch.randn(1, 2, 1, 32)
    attend(q, view, backend="native")
    extent = view.page_table
    lost = view._replace(
        page_table=replace(
            extent, sealed_table=extent.sealed_table + 1000, derived={}, derived_from_tables={}
        )
    )
    with pytest.raises(RuntimeError, match="refuses what it was asked: sealed: slots"):
        attend(q, lost, backend="native")
    with pytest.raises(RuntimeError, match="signs: fewer than channels"):
        rotate_rows(torch.randn(1, 1, 1, 64), (ctypes.c_float * 32)(), signs_last=False)


def test_no_sequence_has_nothing_to_attend_to(functions: ctypes.CDLL) -> None:
    """Bug: the number of threads was divided by that of sequences."""
    case = Case("attend", random.Random(1), memory())
    case.structs["extent"].batch = 0
    assert case.call(functions) is None


def test_random_requests_touch_nothing_else(functions: ctypes.CDLL) -> None:
    run = [sys.executable, "-m", "native.fuzz", functions._name, "--iterations", "400"]
    done = subprocess.run(run, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
