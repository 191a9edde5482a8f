"""Valid requests, with memory of exactly the sizes that they state."""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

from native.interface import ENTRIES, POINTED, STRUCTS, Field, places
from native.memory import Allocated, Guarded

SIZES = (4, 2, 2)  # by kvant_dtype
RAW, AFFINE, CODEBOOK, FP8 = range(4)
COPY, NEGATE, ADD, MULTIPLY, LOOK_UP = range(5)
FOUR = ("first", "second", "third", "last")
EMPTY = b"\x5a"  # initial content of memory to be written


class Case:
    """A request, and the memory that its pointers lead to."""

    def __init__(self, entry: str, rng: random.Random, arena: Guarded | Allocated) -> None:
        self.entry, self.rng, self.memory = entry, rng, arena
        self.request = STRUCTS[ENTRIES[entry]]()
        self.structs = {p: STRUCTS[name]() for p, name in POINTED.get(entry, {}).items()}
        self.contents: dict[str, bytes] = {}  # by the path of a pointer
        self.lies_at: dict[str, int] = {}
        self.written: set[str] = set()
        self.readable: dict[str, list[int]] = {}  # entries of a table
        BUILDERS[entry](self)

    def places(self) -> dict[str, Field]:
        fields = [*places(self.request)]
        for path, pointed in self.structs.items():
            fields += places(pointed, f"{path}.")
        return {place.path: place for place in fields}

    def hold(self, path: str, content: bytes | int, *, is_output: bool = False) -> None:
        """Point a pointer at these bytes, or at that many bytes."""
        if is_output:
            assert isinstance(content, int)
            content = EMPTY * content
            self.written.add(path)
        elif isinstance(content, int):
            content = self.rng.randbytes(content)
        self.contents[path] = content
        fields = self.places()
        self.lies_at[path] = self.memory.take(content)
        fields[path].set(self.lies_at[path])
        fields[nbytes_of(path)].set(len(content))

    def strides(
        self, path: str, counts: tuple[int, ...], row: int, size: int, **options: Any
    ) -> None:
        """Return strides of rows [batch, head, row] in any order and with gaps."""
        rng, fields = self.rng, self.places()
        names = [name for name in ("batch", "slot", "head", "row") if path + name in fields]
        order = list(range(len(counts)))
        if len(counts) == 3 and rng.random() < 0.3:
            order = [0, 2, 1]  # rows first, then heads
        stride, reach = row + size * rng.choice((0, 0, 0, 3)), row
        for i in reversed(order):
            fields[path + names[i]].set(stride)
            reach += max(counts[i] - 1, 0) * stride
            stride = max(counts[i], 1) * stride + size * rng.choice((0, 0, 0, 5))
        if 0 not in counts:
            self.hold(path + "data", reach, **options)

    def call(self, functions: ctypes.CDLL) -> str | None:
        """Call the library and return its refusal; compare memory that must not change."""
        for path, pointed in self.structs.items():
            if (content := self.contents.get(path)) is not None:
                self.contents[path] = bytes(pointed)[: len(content)]
                ctypes.memmove(self.lies_at[path], self.contents[path], len(content))
        refusal = getattr(functions, f"kvant_{self.entry}")(ctypes.byref(self.request))
        for path, content in self.contents.items():
            address = self.lies_at[path]
            assert self.memory.intact(address), f"{path}: what lies before it is overwritten"
            if refusal is not None or path not in self.written:
                same = ctypes.string_at(address, len(content)) == content
                assert same, f"{path}: overwritten, {refusal}"
        return None if refusal is None else refusal.decode()


def nbytes_of(path: str) -> str:
    *inside, name = path.split(".")
    return ".".join([*inside, "nbytes" if name == "data" else f"{name}_nbytes"])


def set_all(case: Case, **numbers: int | float) -> None:
    for name, value in numbers.items():
        setattr(case.request, name, value)


def draw_format(rng: random.Random, dim: int) -> tuple[int, int, int]:
    """Set a format, its bits and its group."""
    bits = [b for b in (2, 3, 4, 5, 6, 8) if b not in (3, 5) or dim % 32 == 0]
    codec = rng.choice((AFFINE, AFFINE, CODEBOOK, FP8))
    if codec == AFFINE:
        return codec, rng.choice(bits), rng.choice((16, 32, 64, 128))
    return codec, 8 if codec == FP8 else rng.choice([b for b in bits if b <= 4]), dim


def count_groups(codec: int, dim: int, group: int) -> int:
    return -(-dim // group) if codec == AFFINE else 1


def attend(case: Case) -> None:
    rng, r, e = case.rng, case.request, case.structs["extent"]
    e.batch, r.heads = rng.randint(1, 2), rng.randint(1, 3)
    r.group, r.queries = rng.choice((1, 1, 2, 4, 7, 16)), rng.choice((1, 1, 1, 2, 16, 17, 40))
    e.page, e.tail = rng.choice((64, 64, 128)), rng.choice((-1, 0, 0, 9, 70))
    e.dense_until, e.sinks = rng.choice((0, 0, 90)), rng.choice((0, 0, 1, 5, 70))
    r.num_own = rng.choice((0, 0, r.queries, 70))
    r.num_dense = rng.choice((0, r.num_own, 70))
    set_all(case, causal=rng.randint(0, 1), window=rng.choice((0, 0, 1, 40, 100)))
    set_all(case, mask_sinks=rng.choice((0, e.sinks, 3)), chunk=rng.choice((0, 0, 50)))
    set_all(
        case, scale=rng.random(), softcap=rng.choice((0.0, 0.0, 5.0)), threads=rng.randint(1, 3)
    )
    numbers = [draw_sequence_numbers(rng, e) for _ in range(e.batch)]
    case.hold(
        "extent.numbers", struct.pack(f"@{7 * e.batch}q", *(n for row in numbers for n in row))
    )
    ranges = [list_readable_pages(r, e, row) for row in numbers]
    slots = [
        assign_slots(case, name, [page_range[name] for page_range in ranges])
        for name in ("sealed", "open")
    ]
    for name in ("keys", "values"):
        side_struct = case.structs[name]
        side_struct.arrangement = 1 if name == "keys" else 2
        make_side(case, name, r.heads, e.page, *slots)
        size = SIZES[side_struct.dtype]
        counts = (e.batch, r.heads, r.num_own)
        case.strides(f"own_{name}.", counts, side_struct.dim * size, size)
        case.hold(name, ctypes.sizeof(side_struct))
    case.hold("extent", ctypes.sizeof(e))
    r.q_dtype, r.out_dtype = rng.randrange(3), rng.randrange(3)
    size, all_heads = SIZES[r.q_dtype], r.heads * r.group
    keys, values = case.structs["keys"], case.structs["values"]
    case.strides("q.", (e.batch, all_heads, r.queries), keys.dim * size, size)
    rows = e.batch * all_heads * r.queries
    case.hold("out", rows * values.dim * SIZES[r.out_dtype], is_output=True)
    if rng.random() < 0.5:
        case.hold("lse", rows * 4, is_output=True)
    if rng.random() < 0.3:
        case.hold("sink_logits", all_heads * 4)
    if slots[0] and rng.random() < 0.4:
        draw_selection(case, [page_range["sealed"] for page_range in ranges])


def draw_selection(case: Case, pages: list[set[int]]) -> None:
    """Select sealed pages of each sequence, equally many for each of its heads."""
    rng, r = case.rng, case.request
    counts = [
        [rng.randint(0, len(sequence_pages)) for _ in range(r.queries)] for sequence_pages in pages
    ]
    r.num_chosen = max(map(max, counts)) + rng.randint(0, 1)
    numbers: list[int] = []
    for sequence_pages, count_ in zip(pages, counts, strict=True):
        for count in count_ * r.heads:
            selected = sorted(rng.sample(sorted(sequence_pages), count))
            numbers += selected + [-1] * (r.num_chosen - count)
    case.hold("chosen", struct.pack(f"@{len(numbers)}q", *numbers))


def draw_sequence_numbers(rng: random.Random, e: Any) -> tuple[int, ...]:
    """Return the values of a sequence in the order of the interface."""
    length, padding = rng.choice((-9, 1, 40, 64, 200, 333)), rng.choice((0, 0, 3, 90))
    pages = max(0, length) // e.page
    stop = rng.randint(0, pages)
    first, opened = rng.randint(0, stop), rng.randint(0, pages)
    return length, padding, first, stop, opened, rng.choice((0, 0, 0, 10)), length


def list_readable_pages(r: Any, e: Any, numbers: tuple[int, ...]) -> dict[str, set[int]]:
    """Return the pages of a sequence that a query may read."""
    end, _, first, stop, opened, first_position, _ = numbers
    first_new = end - r.num_own
    due = max(0, end - e.tail) // e.page * e.page if e.tail >= 0 and end >= e.dense_until else 0
    seam = min(due, end - r.num_dense) if due else 0
    sinks = min(-(-e.sinks // e.page) * e.page, first_new)

    def pages(low: int, high: int) -> set[int]:
        return set(range(low // e.page, -(-high // e.page))) if low < high else set()

    return {
        "sealed": pages(max(first * e.page, first_position), min(stop * e.page, seam)),
        "open": pages(max(opened * e.page, first_position), first_new) | pages(0, sinks),
    }


def assign_slots(case: Case, name: str, pages: list[set[int]]) -> int:
    """Assign slots to these pages of each sequence, and return the number of slots."""
    rng, e = case.rng, case.structs["extent"]
    struct_, every = getattr(e, name), set().union(*pages)
    if not every:
        return 0
    slots = len(every) * e.batch + rng.randint(0, 2)
    struct_.width = max(every) + 1 + rng.randint(0, 2)
    struct_.stride = struct_.width + rng.randint(0, 2)
    count = (e.batch - 1) * struct_.stride + struct_.width
    entries = [rng.choice((-1, 1 << 62)) for _ in range(count)]  # never read
    case.readable[name] = read = [
        b * struct_.stride + page
        for b, sequence_pages in enumerate(pages)
        for page in sorted(sequence_pages)
    ]
    for position in read:
        entries[position] = rng.randrange(slots)
    entries[rng.choice(read)] = slots - 1
    case.hold(f"extent.{name}.data", struct.pack(f"@{count}q", *entries))
    return slots


def make_side(
    case: Case, path: str, heads: int, page: int, sealed: int, opened: int, **options: Any
) -> None:
    """Allocate memory for these numbers of sealed and open slots."""
    rng, struct = case.rng, case.structs[path]
    struct.dim, struct.dtype = rng.choice((16, 32, 32, 48, 64, 80, 128, 256)), rng.randrange(3)
    struct.format, struct.bits, struct.group = (
        (RAW, 0, struct.dim) if rng.random() < 0.2 else draw_format(rng, struct.dim)
    )
    struct.corrected = rng.randint(0, 1)
    size = SIZES[struct.dtype]
    if struct.format == CODEBOOK:
        case.hold(f"{path}.levels", 4 << struct.bits)
        case.hold(f"{path}.boundaries", (4 << struct.bits) - 4)
    case.strides(f"{path}.open.", (opened, heads, page), struct.dim * size, size, **options)
    width = struct.dim * (8 * size if struct.format == RAW else struct.bits) // 8
    fields = {"codes": width}
    if struct.format != RAW:
        fields["scale"] = 2 * count_groups(struct.format, struct.dim, struct.group)
    if struct.format == AFFINE:
        fields["bias"] = fields["scale"]
    for field, each in fields.items():
        unit = size if field == "codes" and struct.format == RAW else 1 if field == "codes" else 2
        case.strides(f"{path}.{field}.", (sealed, heads), page * each, unit, **options)


def store(case: Case) -> None:
    rng, r = case.rng, case.request
    set_all(case, sides=rng.randint(1, 2), batch=rng.randint(0, 3), heads=rng.randint(1, 3))
    set_all(case, page=rng.choice((16, 64, 80)), count=rng.choice((0, 1, 1, 5, 100)))
    r.threads = rng.randint(1, 2)
    opened = rng.choice((0, 1, 4)) if r.batch else 0
    sealed = rng.choice((0, 0, 3)) if opened or (r.batch and r.count >= r.page) else 0
    copies = [(rng.randrange(opened), opened - 1)] if opened and rng.random() < 0.7 else []
    writes = []
    for _ in range(rng.randint(0, 3) if opened else 0):
        rows = rng.randint(0, min(r.count, r.page))
        row, column = rng.randint(0, r.page - rows), rng.randint(0, r.count - rows)
        writes.append((rng.randrange(r.batch), rng.randrange(opened), row, rows, column))
    if opened and not copies:
        writes.append((0, opened - 1, 0, 0, 0))
    seals = []
    for slot in range(sealed):
        whole = r.count >= r.page and (not opened or rng.random() < 0.5)
        source = -1 if whole else rng.randrange(opened)
        column = rng.randint(0, r.count - r.page) if whole else -5
        seals.append((rng.randrange(r.batch), slot, source, column))
    for name, steps in (("copies", copies), ("writes", writes), ("seals", seals)):
        setattr(case.structs["steps"], f"num_{name}", len(steps))
        flat = [n for step in steps for n in step]
        if flat:
            case.hold(f"steps.{name}", struct.pack(f"@{len(flat)}q", *flat))
    case.hold("steps", bytes(ctypes.sizeof(case.structs["steps"])))
    for i in range(r.sides):
        path = f"side[{i}]"
        struct_ = case.structs[f"{path}.stored"]
        struct_.arrangement = rng.randrange(3)
        make_side(case, f"{path}.stored", r.heads, r.page, sealed, opened, is_output=True)
        case.hold(f"{path}.stored", ctypes.sizeof(struct_))
        size = SIZES[struct_.dtype]
        case.strides(f"{path}.rows.", (r.batch, r.heads, r.count), struct_.dim * size, size)


def rotate(case: Case) -> None:
    rng, r = case.rng, case.request
    set_all(case, dim=16 * rng.randint(1, 16), dtype=rng.randrange(3), last=rng.randint(0, 1))
    set_all(case, batch=rng.randint(1, 2), heads=rng.randint(1, 3), count=rng.choice((0, 1, 5, 70)))
    r.threads = rng.randint(1, 2)
    size = SIZES[r.dtype]
    case.strides("rows.", (r.batch, r.heads, r.count), r.dim * size, size)
    case.hold("signs", 4 * r.dim)
    case.hold("out", r.batch * r.heads * r.count * r.dim * size, is_output=True)


def norm(case: Case) -> None:
    rng, r = case.rng, case.request
    set_all(case, dim=32 * rng.choice((1, 2, 3, 4, 32, 33)), dtype=rng.randrange(3))
    set_all(case, count=rng.choice((0, 1, 5, 70)), eps=rng.random(), threads=rng.randint(1, 2))
    size = SIZES[r.dtype]
    case.hold("rows", r.count * r.dim * size)
    case.hold("weight", r.dim * size)
    case.hold("out", r.count * r.dim * size, is_output=True)


def choose(case: Case) -> None:
    rng, r, e = case.rng, case.request, case.structs["extent"]
    e.batch, e.page, e.tail = rng.randint(1, 2), 64, 0
    r.heads, r.group, r.queries = rng.randint(1, 3), rng.choice((1, 2, 7)), rng.choice((1, 1, 5))
    set_all(case, dim=16 * rng.randint(1, 16), dtype=rng.randrange(3), q_dtype=rng.randrange(3))
    r.threads = rng.randint(1, 3)
    numbers = [n for _ in range(e.batch) for n in draw_sequence_numbers(rng, e)]
    case.hold("extent.numbers", struct.pack(f"@{len(numbers)}q", *numbers))
    ranges, read, limit = list[int](), [set[int]() for _ in range(e.batch)], 0
    for b in range(e.batch):
        for _ in range(r.queries):
            low, first, stop, high = sorted(rng.randint(0, 9) for _ in range(4))
            count = rng.randint(0, stop - first)
            ranges += (low, first, stop, high, count)
            read[b] |= set(range(first, stop))
            limit = max(limit, first - low + high - stop + count)
    slots = assign_slots(case, "sealed", read)
    assign_slots(case, "open", [{0}] * e.batch)
    case.hold("extent", ctypes.sizeof(e))
    size, q_size = SIZES[r.dtype], SIZES[r.q_dtype]
    case.strides("q.", (e.batch, r.heads * r.group, r.queries), r.dim * q_size, q_size)
    case.strides("bounds.", (slots, r.heads), 2 * r.dim * size, size)
    case.hold("ranges", struct.pack(f"@{len(ranges)}q", *ranges))
    r.num_chosen = limit + rng.randint(0, 2)
    case.hold("chosen", 8 * e.batch * r.heads * r.queries * r.num_chosen, is_output=True)


def multiply(case: Case) -> None:
    rng, r, w = case.rng, case.request, case.structs["weight"]
    set_all(case, count=rng.choice((0, 1, 5, 6, 7, 13, 33, 140)), threads=rng.randint(1, 2))
    set_all(case, dtype=rng.randrange(3), bias_dtype=rng.randrange(3))
    w.outs, w.format = rng.choice((0, 1, 63, 64, 200)), rng.choice((RAW, AFFINE, AFFINE))
    if w.format == RAW:
        w.width, w.dtype = 32 * rng.randint(1, 40), rng.choice((1, 2))
        case.hold("weight.codes", w.outs * w.width * 2)
    else:
        w.bits, w.group = rng.choice((2, 3, 4, 5, 6, 8)), rng.choice((16, 32, 64, 128))
        w.part = max(w.group, 32) * rng.randint(1, 256 // max(w.group, 32))
        w.width = w.part * rng.randint(1, 3)
        rows = (w.outs + 63) // 64 * 64
        case.hold("weight.codes", rows * w.width * w.bits // 8)
        case.hold("weight.scale", rows * w.width // w.group * 2)
        if rng.random() < 0.5:
            case.hold("weight.bias", rows * w.width // w.group * 2)
    case.hold("weight", ctypes.sizeof(w))
    case.hold("rows", r.count * w.width * SIZES[r.dtype])
    if rng.random() < 0.5:
        case.hold("bias", w.outs * SIZES[r.bias_dtype])
    case.hold("out", r.count * w.outs * SIZES[r.dtype], is_output=True)


def map_numbers(case: Case) -> None:
    rng, r = case.rng, case.request
    set_all(case, operation=rng.randrange(5), dtype=rng.randrange(3), threads=rng.randint(1, 2))
    if r.operation == LOOK_UP:
        r.dtype = rng.choice((1, 2))
    size, shape = SIZES[r.dtype], [rng.choice((0, 1, 2, 3, 17, 32)) for _ in range(4)]
    for name, count in zip(FOUR, shape, strict=True):
        setattr(r.shape, name, count)
    for side in ("a", "b", "out"):
        if side == "b" and r.operation not in (ADD, MULTIPLY):
            continue
        stride, reach = size, size if all(shape) else 0
        for name, count in reversed(list(zip(FOUR, shape, strict=True))):
            step = 0 if side != "out" and rng.random() < 0.2 else stride
            setattr(getattr(r, side).stride, name, step)
            reach += max(count - 1, 0) * step if reach else 0
            stride *= max(count, 1)
        case.hold(f"{side}.data", reach, is_output=side == "out")
    if r.operation == LOOK_UP:
        case.hold("b.data", 2 * 2**16)


BUILDERS = {
    "attend": attend,
    "store": store,
    "rotate": rotate,
    "norm": norm,
    "choose": choose,
    "multiply": multiply,
    "map": map_numbers,
}
