"""Requests that are as they should be, with memory of exactly the bytes that they lead to."""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

from native.interface import ENTRIES, STRUCTS, Place, places
from native.memory import Allocated, Guarded

SIZES = (4, 2, 2)  # by kvant_dtype
RAW, AFFINE, CODEBOOK, FP8 = range(4)
EMPTY = b"\x5a"  # what memory holds that is to be written


class Case:
    """A request, and what its pointers lead to."""

    def __init__(self, entry: str, rng: random.Random, memory: Guarded | Allocated) -> None:
        self.entry, self.rng, self.memory = entry, rng, memory
        self.request = STRUCTS[ENTRIES[entry]]()
        self.contents: dict[str, bytes] = {}  # by the path of a pointer
        self.written: set[str] = set()
        BUILDERS[entry](self)

    def places(self) -> dict[str, Place]:
        return {place.path: place for place in places(self.request)}

    def hold(self, path: str, content: bytes | int, *, written: bool = False) -> None:
        """Make a pointer lead to this, or to so many bytes."""
        if written:
            assert isinstance(content, int)
            content = EMPTY * content
            self.written.add(path)
        elif isinstance(content, int):
            content = self.rng.randbytes(content)
        self.contents[path] = content
        found = self.places()
        found[path].set(self.memory.take(content))
        found[nbytes_of(path)].set(len(content))

    def strides(self, path: str, counts: tuple[int, ...], row: int, size: int, **how: Any) -> None:
        """Rows [batch, head, row], in any order and with gaps, of so many bytes each."""
        rng, found = self.rng, self.places()
        names = [name for name in ("batch", "slot", "head", "row") if path + name in found]
        order = list(range(len(counts)))
        if len(counts) == 3 and rng.random() < 0.3:
            order = [0, 2, 1]  # rows first, then heads
        stride, reach = row + size * rng.choice((0, 0, 0, 3)), row
        for i in reversed(order):
            found[path + names[i]].set(stride)
            reach += max(counts[i] - 1, 0) * stride
            stride = max(counts[i], 1) * stride + size * rng.choice((0, 0, 0, 5))
        if 0 not in counts:
            self.hold(path + "data", reach, **how)

    def call(self, functions: ctypes.CDLL) -> str | None:
        """What it refuses; what must not have changed is compared."""
        refusal = getattr(functions, f"kvant_{self.entry}")(ctypes.byref(self.request))
        found = self.places()
        for path, content in self.contents.items():
            address = found[path].value
            if not address:
                continue
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


def form(rng: random.Random, dim: int) -> tuple[int, int, int]:
    """A format, its bits and its group."""
    bits = [b for b in (2, 3, 4, 5, 6, 8) if b not in (3, 5) or dim % 32 == 0]
    kind = rng.choice((AFFINE, AFFINE, CODEBOOK, FP8))
    if kind == AFFINE:
        return kind, rng.choice(bits), rng.choice((16, 32, 64, 128))
    return kind, 8 if kind == FP8 else rng.choice([b for b in bits if b <= 4]), dim


def groups(kind: int, dim: int, group: int) -> int:
    return -(-dim // group) if kind == AFFINE else 1


def attend(case: Case) -> None:
    rng, r = case.rng, case.request
    batch, heads = rng.randint(1, 2), rng.randint(1, 3)
    group, queries = rng.choice((1, 1, 2, 4, 7, 16)), rng.choice((1, 1, 1, 2, 16, 17, 40))
    page, num_pages, first = rng.choice((64, 64, 128)), rng.randint(0, 3), rng.randint(0, 2)
    dense, sinks = rng.choice((0, 1, 5, 63, 64, 70)), rng.choice((0, 0, 1, 5))
    there = (first + num_pages) * page
    begin = rng.choice((there, max(0, there - page), rng.randint(0, there)))
    columns = max(queries, rng.choice((begin + dense, rng.randint(1, there + dense + 9))))
    set_all(case, batch=batch, heads=heads, group=group, queries=queries, page=page)
    set_all(case, first_page=first, num_pages=num_pages, dense_from=begin, num_dense=dense)
    set_all(case, num_sinks=sinks, columns=columns, threads=rng.randint(1, 3))
    set_all(case, tail=rng.choice((-1, 0, 0, 9, 70)), dense_until=rng.choice((0, 0, 90)))
    set_all(case, own_from=rng.choice((columns, columns, there, rng.randint(0, columns))))
    set_all(case, causal=rng.randint(0, 1), window=rng.choice((0, 0, 1, 40, 100)))
    set_all(case, mask_sinks=rng.choice((0, sinks, 3)), chunk=rng.choice((0, 0, 50)))
    set_all(case, scale=rng.random(), softcap=rng.choice((0.0, 0.0, 5.0)))
    slots = num_pages * batch + rng.randint(0, 2)
    for name in ("keys", "values"):
        side(case, name, slots if num_pages else 0)
    stride = num_pages + rng.randint(0, 2)
    entries = [rng.randrange(slots) if num_pages else 0 for _ in range((batch - 1) * stride)]
    entries += [rng.randrange(slots) for _ in range(num_pages - 1)] + [slots - 1] * (num_pages > 0)
    r.table_stride = stride
    if num_pages:
        case.hold("page_table", struct.pack(f"@{len(entries)}q", *entries))
    starts = [rng.choice((0, 0, 3, 70, columns + 1)) for _ in range(batch)]
    case.hold("start", struct.pack(f"@{batch}q", *starts))
    r.q_dtype, r.out_dtype = rng.randrange(3), rng.randrange(3)
    size, all_heads = SIZES[r.q_dtype], heads * group
    case.strides("q.", (batch, all_heads, queries), r.keys.dim * size, size)
    rows = batch * all_heads * queries
    case.hold("out", rows * r.values.dim * SIZES[r.out_dtype], written=True)
    if rng.random() < 0.5:
        case.hold("lse", rows * 4, written=True)
    if rng.random() < 0.3:
        case.hold("sink_logits", all_heads * 4)


def side(case: Case, name: str, slots: int) -> None:
    rng, r = case.rng, case.request
    own = getattr(r, name)
    own.dim, own.dtype = rng.choice((16, 32, 32, 48, 64, 80, 128, 256)), rng.randrange(3)
    own.format, own.bits, own.group = (
        (RAW, 0, own.dim) if rng.random() < 0.2 else form(rng, own.dim)
    )
    size = SIZES[own.dtype]
    for rows, count in (("dense", r.num_dense), ("sinks", r.num_sinks)):
        case.strides(f"{name}.{rows}.", (r.batch, r.heads, count), own.dim * size, size)
    if own.format == CODEBOOK:
        case.hold(f"{name}.levels", 4 << own.bits)
    width = own.dim * (8 * size if own.format == RAW else own.bits) // 8
    fields = {"codes": width}
    if own.format != RAW:
        fields["scale"] = 2 * groups(own.format, own.dim, own.group)
    if own.format == AFFINE:
        fields["bias"] = fields["scale"]
    for field, each in fields.items():
        case.strides(f"{name}.{field}.", (slots, r.heads), r.page * each, size)


def seal(case: Case) -> None:
    rng, r = case.rng, case.request
    set_all(case, dim=rng.choice((16, 32, 48, 64, 80, 128, 256)), dtype=rng.randrange(3))
    set_all(case, batch=rng.randint(0, 2), pages=rng.randint(1, 2), heads=rng.randint(1, 3))
    set_all(case, page=rng.choice((16, 64, 80)), corrected=rng.randint(0, 1))
    set_all(case, arrangement=rng.randrange(3), threads=rng.randint(1, 2))
    r.format, r.bits, r.group = form(rng, r.dim)
    size, rows = SIZES[r.dtype], r.batch * r.pages * r.heads * r.page
    case.strides("rows.", (r.batch, r.heads, r.pages * r.page), r.dim * size, size)
    if r.format == CODEBOOK:
        case.hold("levels", 4 << r.bits)
        case.hold("boundaries", (4 << r.bits) - 4)
    params = rows * 2 * groups(r.format, r.dim, r.group)
    case.hold("codes", rows * r.dim * r.bits // 8, written=True)
    case.hold("scale", params, written=True)
    if r.format == AFFINE:
        case.hold("bias", params, written=True)


def rotate(case: Case) -> None:
    rng, r = case.rng, case.request
    set_all(case, dim=16 * rng.randint(1, 16), dtype=rng.randrange(3), last=rng.randint(0, 1))
    set_all(case, batch=rng.randint(1, 2), heads=rng.randint(1, 3), count=rng.choice((0, 1, 5, 70)))
    r.threads = rng.randint(1, 2)
    size = SIZES[r.dtype]
    case.strides("rows.", (r.batch, r.heads, r.count), r.dim * size, size)
    case.hold("signs", 4 * r.dim)
    case.hold("out", r.batch * r.heads * r.count * r.dim * size, written=True)


def put(case: Case) -> None:
    rng, r = case.rng, case.request
    set_all(case, sides=rng.randint(1, 2), batch=rng.randint(1, 2), heads=rng.randint(1, 3))
    set_all(case, slot=rng.randint(0, 9), count=rng.choice((0, 1, 1, 5)))
    for i in range(r.sides):
        own = r.side[i]
        size, own.slots = rng.choice((2, 4)), r.slot + r.count + rng.randint(0, 2)
        own.bytes = size * rng.randint(1, 99)
        own.head = own.slots * own.bytes + rng.choice((0, 0, 7))
        own.batch = r.heads * own.head + rng.choice((0, 0, 7))
        case.strides(f"side[{i}].rows.", (r.batch, r.heads, r.count), own.bytes, size)
        reach = (r.batch - 1) * own.batch + (r.heads - 1) * own.head + own.slots * own.bytes
        case.hold(f"side[{i}].room", reach if own.slots else 0, written=True)


BUILDERS = {"attend": attend, "seal": seal, "rotate": rotate, "put": put}
