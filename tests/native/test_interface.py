"""Test that the C interface touches only the memory stated in its requests, however malformed."""

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
from kvant.native import get_library, header, rotate_rows
from kvant.page_table import FIRST_OPEN, FIRST_SEALED, FIRST_VISIBLE, LENGTH, STOP_SEALED
from native.cases import AFFINE, FOUR, FP8, Case, nbytes_of
from native.interface import ENTRIES, STRUCTS, Pointer, all_places, load_functions, places
from native.memory import make_memory

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
DECLARED = {s.c_name: s for s in vars(header).values() if isinstance(s, header.NativeStruct)}


@pytest.fixture(scope="module")
def functions() -> ctypes.CDLL:
    library = get_library().functions
    assert library is not None
    return load_functions(library._name)


def is_rich(case: Case) -> bool:
    """Whether every dimension exceeds one."""
    r = case.request
    if case.entry == "attend":
        e, keys, values = (case.structs[path] for path in ("extent", "keys", "values"))
        many = min(e.batch, r.heads, e.sealed.width, e.open.width, r.num_own, r.queries) > 1
        slots = all(field.nbytes > 2 * field.slot for field in (keys.codes, keys.open, values.open))
        # Pages of sinks are read in any case; others may start after all rows.
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
        weight = case.structs["weight"]
        return min(r.count, weight.outs) > 1 and weight.format == AFFINE
    if case.entry == "map":
        strides = (r.a.stride, r.b.stride, r.out.stride)
        every = [getattr(stride, name) for stride in strides for name in FOUR]
        return min(getattr(r.shape, name) for name in FOUR) > 1 and min(every) > 0
    if case.entry == "choose":
        e = case.structs["extent"]
        many = min(e.batch, r.heads, r.queries, e.sealed.width, r.num_chosen) > 1
        return many and r.bounds.nbytes > 2 * r.bounds.slot
    return min(r.batch, r.heads, r.count) > 1


@cache
def find_seeds(entry: str, path: str | None) -> tuple[int, ...]:
    """Return the seeds of two rich requests, or of two that use this pointer."""
    memory, result = make_memory(), []
    for seed in range(10_000):
        memory.free()
        case = Case(entry, random.Random(seed), memory)
        if len(case.contents.get(path, b"")) >= 16 if path else is_rich(case):
            result.append(seed)
        if len(result) == 2:
            return tuple(result)
    raise AssertionError(f"{entry}: no such request")


def make_cases(entry: str, path: str | None = None) -> Iterator[Callable[[], Case]]:
    """Return requests that can be rebuilt from their seed."""
    memory = make_memory()

    def make_case(seed: int) -> Case:
        memory.free()
        return Case(entry, random.Random(seed), memory)

    return (partial(make_case, seed) for seed in find_seeds(entry, path))


def list_pointers() -> list[tuple[str, str]]:
    return [
        (entry, place.path)
        for entry in ENTRIES
        for place in all_places(entry)
        if place.kind is Pointer
    ]


@pytest.mark.parametrize("name", STRUCTS)
def test_every_pointer_has_its_byte_count(name: str) -> None:
    paths = [place.path for place in places(STRUCTS[name]())]
    for place in places(STRUCTS[name]()):
        if place.kind is Pointer:
            assert paths[paths.index(place.path) + 1] == nbytes_of(place.path)


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_are_those_of_the_header(name: str) -> None:
    struct_type, declared = STRUCTS[name], DECLARED[name]
    fields = [*places(struct_type())]
    assert list(declared.names) == [field.path for field in fields]
    assert declared.doubles == {f.path for f in fields if f.kind is ctypes.c_double}
    assert len(declared.pack(*declared.null)) == ctypes.sizeof(struct_type)


def test_every_declared_struct_is_in_the_header() -> None:
    assert DECLARED.keys() == STRUCTS.keys()


@pytest.mark.parametrize("missing", [1, 16])
@pytest.mark.parametrize(("entry", "path"), list_pointers())
def test_short_buffer_is_refused(
    functions: ctypes.CDLL, entry: str, path: str, missing: int
) -> None:
    """The memory is as short as stated, and an inaccessible page follows."""
    for make in make_cases(entry, path):
        assert make().call(functions) is None
        case = make()
        content, is_output = case.contents[path][missing:], path in case.written
        case.hold(path, len(content) if is_output else content, is_output=is_output)
        assert case.call(functions) is not None
        case = make()
        case.places()[path].set(0)
        assert case.call(functions) is not None or (entry, path) in OPTIONAL


OPTIONAL = {
    *(("multiply", name) for name in ("bias", "weight.bias")),
    *(("attend", name) for name in ("lse", "sink_logits", "chosen")),
}

BEYOND = {
    "attend": {
        "extent.batch heads queries num_own extent.page": lambda value: 3 * value + 1,
        "extent.sealed.width extent.open.width": lambda value: 3 * value + 9,
        "own_keys.batch own_values.head own_keys.row": lambda value: 3 * value,
        "keys.open.slot values.open.head keys.open.row": lambda value: 3 * value,
        "keys.codes.slot values.codes.head keys.scale.slot keys.bias.head": lambda value: 3 * value,
        "q.batch q.head q.row extent.sealed.stride extent.open.stride": lambda value: 3 * value,
        "keys.format values.dtype q_dtype out_dtype": lambda value: 4,
        "keys.bits": lambda value: 7,
        "keys.group": lambda value: value + 16,
        "keys.dim values.dim": lambda value: value - 8,
        "keys.arrangement group threads": lambda value: 0,
        "extent.tail extent.dense_until extent.sinks num_dense": lambda value: -2,
        "window mask_sinks chunk": lambda value: -2,
    },
    "store": {
        "batch heads count page": lambda value: 3 * value + 1,
        "steps.num_copies steps.num_writes steps.num_seals": lambda value: 3 * value + 1,
        "side[0].rows.batch side[1].rows.head side[0].rows.row": lambda value: 3 * value,
        "side[0].stored.open.slot side[1].stored.open.head": lambda value: 3 * value,
        "side[0].stored.open.row side[1].stored.codes.slot": lambda value: 3 * value,
        "side[1].stored.scale.head side[0].stored.bias.slot": lambda value: 3 * value,
        "side[0].stored.dtype side[1].stored.arrangement sides": lambda value: 3,
        "side[0].stored.format": lambda value: 4,
        "side[1].stored.bits": lambda value: 7,
        "side[1].stored.dim": lambda value: value - 8,
        "side[0].stored.group": lambda value: value + 1,
        "threads": lambda value: 1 << 40,
    },
    "rotate": {
        "batch heads count rows.batch rows.head rows.row": lambda value: 3 * value,
        "dtype": lambda value: 3,
        "dim": lambda value: value - 8,
        "threads": lambda value: 0,
    },
    "norm": {
        "count": lambda value: 3 * value,
        "dtype": lambda value: 3,
        "dim": lambda value: value - 16,
        "threads": lambda value: 0,
    },
    "multiply": {
        "count weight.width weight.outs": lambda value: 3 * value,
        "weight.part": lambda value: value + 1,
        "weight.bits": lambda value: 7,
        "weight.group": lambda value: 3 * value,
        "weight.format dtype": lambda value: 3,
        "threads": lambda value: 0,
    },
    "map": {
        "shape.first shape.third shape.last a.stride.first b.stride.second": lambda value: (
            3 * value
        ),
        "out.stride.third out.stride.last": lambda value: 3 * value,
        "operation": lambda value: 5,
        "dtype": lambda value: 3,
        "threads": lambda value: 0,
    },
    "choose": {
        "extent.batch heads group queries num_chosen": lambda value: 3 * value + 20,
        "extent.sealed.width": lambda value: 3 * value + 9,
        "q.batch q.head q.row extent.sealed.stride bounds.slot bounds.head": lambda value: (
            3 * value
        ),
        "dtype q_dtype": lambda value: 3,
        "dim": lambda value: value - 8,
        "threads": lambda value: 0,
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
        *((*number, (0, HUGE[i % 4])) for i, number in enumerate(NUMBERS)),  # 0: the change itself
        *(pytest.param(*number, (0, *HUGE), marks=pytest.mark.laws) for number in NUMBERS),
    ],
)
def test_number_out_of_range_is_refused(
    functions: ctypes.CDLL,
    entry: str,
    path: str,
    lie: Callable[[int], int],
    sizes: tuple[int, ...],
) -> None:
    for make in make_cases(entry):
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
def test_missing_page_is_refused(functions: ctypes.CDLL, slot: int, table: str) -> None:
    path = f"extent.{table}.data"
    for make in make_cases("attend", path):
        for position in make().readable[table]:
            case = make()
            entries = bytearray(case.contents[path])
            struct.pack_into("@q", entries, 8 * position, slot)
            case.hold(path, bytes(entries))
            assert case.call(functions) == SLOTS_OF[table]


@pytest.mark.parametrize("number", [LENGTH, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, FIRST_VISIBLE])
@pytest.mark.parametrize("value", [1 << 62, -(1 << 63), (1 << 63) - 1])
def test_missing_sequence_is_refused(functions: ctypes.CDLL, number: int, value: int) -> None:
    for make in make_cases("attend"):
        case = make()
        numbers = bytearray(case.contents["extent.numbers"])
        struct.pack_into("@q", numbers, len(numbers) - 56 + 8 * number, value)
        case.hold("extent.numbers", bytes(numbers))
        refusal = case.call(functions)
        assert refusal is not None and refusal.startswith("numbers: ")


LIMITS = {  # of each number: below zero, or beyond the allocation
    "copies": ("open", "open"),
    "writes": ("batch", "open", "page", "page", "count"),
    "seals": ("batch", "sealed", "open", "count"),
}


@pytest.mark.parametrize(
    ("steps", "position"),
    [(steps, at) for steps, limits in LIMITS.items() for at in range(len(limits))],
)
@pytest.mark.parametrize("value", [-7, 100_000, 1 << 62, -(1 << 63), (1 << 63) - 1])
def test_step_to_a_missing_slot_is_refused(
    functions: ctypes.CDLL, steps: str, position: int, value: int
) -> None:
    served = 0
    for make in make_cases("store", f"steps.{steps}"):
        width = len(LIMITS[steps])
        for step in range(len(make().contents[f"steps.{steps}"]) // 8 // width):
            case = make()
            numbers = bytearray(case.contents[f"steps.{steps}"])
            source = (
                struct.unpack_from("@q", numbers, 8 * (width * step + 2))[0]
                if position == 3
                else -1
            )
            struct.pack_into("@q", numbers, 8 * (width * step + position), value)
            case.hold(f"steps.{steps}", bytes(numbers))
            refusal = case.call(functions)
            unread = (steps, position) == ("seals", 3) and source >= 0
            served += refusal is None
            assert unread or (refusal is not None and refusal.startswith(f"{steps}: "))
    assert not served or (steps, position) == ("seals", 3)


@pytest.mark.parametrize("value", [9, 100_000, 1 << 62, (1 << 63) - 1])
def test_selection_of_missing_pages_is_refused(functions: ctypes.CDLL, value: int) -> None:
    for make in make_cases("attend", "chosen"):
        numbers = struct.unpack(
            f"@{len(make().contents['chosen']) // 8}q", make().contents["chosen"]
        )
        for position in [i for i, n in enumerate(numbers) if n >= 0]:
            case = make()
            changed = [*numbers[:position], value, *numbers[position + 1 :]]
            case.hold("chosen", struct.pack(f"@{len(changed)}q", *changed))
            assert (case.call(functions) or "").startswith("chosen: pages ")
        case = make()
        case.request.num_chosen *= value
        assert case.call(functions) is not None


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("value", [-1, 1000, 1 << 41, 1 << 62, -(1 << 63), (1 << 63) - 1])
def test_ranges_out_of_bounds_are_refused(
    functions: ctypes.CDLL, position: int, value: int
) -> None:
    for make in make_cases("choose"):
        for query in range(len(make().contents["ranges"]) // 40):
            case = make()
            ranges = bytearray(case.contents["ranges"])
            struct.pack_into("@q", ranges, 40 * query + 8 * position, value)
            case.hold("ranges", bytes(ranges))
            assert case.call(functions) is not None


@pytest.mark.parametrize("slot", [-1, 100, 1 << 31, 1 << 62, -(1 << 63)])
def test_missing_bounds_are_refused(functions: ctypes.CDLL, slot: int) -> None:
    path = "extent.sealed.data"
    for make in make_cases("choose", path):
        for position in make().readable["sealed"]:
            case = make()
            entries = bytearray(case.contents[path])
            struct.pack_into("@q", entries, 8 * position, slot)
            case.hold(path, bytes(entries))
            assert case.call(functions) == "bounds: fewer than slots"


@pytest.mark.parametrize(("entry", "path"), [("attend", "keys."), ("store", "side[0].stored.")])
def test_bias_for_other_codes_is_refused(functions: ctypes.CDLL, entry: str, path: str) -> None:
    """Kernels use a bias wherever there is one."""
    for make in make_cases(entry):
        case = make()
        places = case.places()
        for name, value in (("format", FP8), ("bits", 8), ("group", places[f"{path}dim"].value)):
            places[path + name].set(value)
        assert case.call(functions) == "bias: only affine codes have one"


@pytest.mark.parametrize("path", ["extent.sealed.data", "extent.open.data", "extent.numbers"])
@pytest.mark.parametrize("over", ["out", "lse"])
def test_outputs_overlapping_the_table_are_refused(
    functions: ctypes.CDLL, path: str, over: str
) -> None:
    """Kernels read the table while other threads write."""
    for make in make_cases("attend", path):
        case = make()
        case.hold(over, case.contents[path] + bytes(1 << 20))
        places = case.places()
        places[path].set(places[over].value)
        assert (case.call(functions) or "").startswith("out: ")


@pytest.mark.parametrize("path", ["keys", "values", "extent"])
def test_outputs_overlapping_a_pointer_target_are_refused(
    functions: ctypes.CDLL, path: str
) -> None:
    for make in make_cases("attend"):
        case = make()
        places = case.places()
        places["out"].set(case.lies_at[path])
        places["out_nbytes"].set(1 << 23)
        case.lies_at["out"] = case.memory.take(b"")
        case.contents["out"] = b""
        assert (case.call(functions) or "").startswith("out: ")


@pytest.mark.parametrize("steps", LIMITS)
def test_pages_overlapping_the_steps_are_refused(functions: ctypes.CDLL, steps: str) -> None:
    for make in make_cases("store", f"steps.{steps}"):
        case = make()
        places = case.places()
        places["side[0].stored.open.data"].set(case.lies_at[f"steps.{steps}"] // 64 * 64)
        assert (case.call(functions) or "").startswith("stored: ")


def test_python_reports_the_refusal() -> None:
    state: Any = Cache(1, "affine8,tail=0,prefill=stored")[0]
    view = state.append(*torch.randn(2, 1, 2, 200, 32))
    q = torch.randn(1, 2, 1, 32)
    attend(q, view, backend="native")
    page_table = view.page_table
    lost = view._replace(
        page_table=replace(
            page_table,
            sealed_table=page_table.sealed_table + 1000,
            derived={},
            derived_from_tables={},
        )
    )
    with pytest.raises(RuntimeError, match="refuses a request: sealed: slots"):
        attend(q, lost, backend="native")
    with pytest.raises(RuntimeError, match="signs: fewer than channels"):
        rotate_rows(torch.randn(1, 1, 1, 64), (ctypes.c_float * 32)(), signs_last=False)


def test_zero_sequences_need_no_attention(functions: ctypes.CDLL) -> None:
    """Regression: the number of threads was divided by the number of sequences."""
    case = Case("attend", random.Random(1), make_memory())
    case.structs["extent"].batch = 0
    assert case.call(functions) is None


def test_random_requests_write_nothing_else(functions: ctypes.CDLL) -> None:
    run = [sys.executable, "-m", "native.fuzz", functions._name, "--iterations", "400"]
    process = subprocess.run(run, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
