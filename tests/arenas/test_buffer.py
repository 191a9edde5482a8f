"""Growth, spans and slots of a private arena, with units whose value is their number."""

from __future__ import annotations

import weakref

import pytest
import torch

from kvant.arenas import GROWING, Buffer, Growth, Slab, Span

CPU = torch.device("cpu")
WIDE = {"a": Slab((2, GROWING, 3), torch.float32), "b": Slab((2, 1, GROWING, 4), torch.uint8)}


def units(first: int, stop: int) -> dict[str, torch.Tensor]:
    number = torch.arange(first, stop)
    return {
        "a": number.view(1, -1, 1).repeat(2, 1, 3).float(),
        "b": number.view(1, 1, -1, 1).repeat(2, 1, 1, 4).to(torch.uint8),
    }


def buffer(step: int = 4, at_once: int | None = None, bound: int | None = None) -> Buffer:
    return Buffer(WIDE, Growth(step, at_once, bound), CPU)


def grown(span: Span, count: int) -> Span:
    return span.extended(units(span.stop, span.stop + count), count)


def told(span: Span) -> list[int]:
    """The unit numbers, if both slabs and both sequences say the same."""
    tensors = span.tensors()
    a, b = tensors["a"], tensors["b"]
    assert torch.equal(a, a[:1, :, :1].expand_as(a))
    assert torch.equal(b, b[:1, :, :, :1].expand_as(b))
    assert a[0, :, 0].tolist() == b[0, 0, :, 0].tolist()
    return [int(n) for n in b[0, 0, :, 0].tolist()]


@pytest.mark.parametrize(
    ("growth", "expected"),
    [
        (Growth(1), [1, 2, 3, 255, 256, 257]),
        (Growth(256), [256, 256, 256, 256, 256, 512]),
        (Growth(256, at_once=300), [300, 300, 300, 300, 300, 300]),
        (Growth(100, bound=250), [100, 100, 100, 255, 256, 257]),
        (Growth(256, at_once=300, bound=255), [255, 255, 255, 255, 256, 257]),
    ],
)
def test_slots_for_a_need(growth: Growth, expected: list[int]) -> None:
    assert [growth.slots(need) for need in (1, 2, 3, 255, 256, 257)] == expected


def test_an_unbounded_buffer_takes_slots_step_by_step() -> None:
    span, taken = Span(buffer(step=4)), []
    for _ in range(10):
        span = grown(span, 1)
        taken.append(span.arena.taken)
    assert taken == [4, 4, 4, 4, 8, 8, 8, 8, 12, 12]
    assert told(span) == list(range(10))


def test_concat_takes_exactly_what_there_is() -> None:
    span, taken = Span(buffer(step=1)), []
    for _ in range(4):
        span = grown(span, 1)
        taken.append((span.arena.taken, span.arena.reserved))
    assert taken == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_capacity_is_taken_with_the_first_unit_and_never_moves() -> None:
    span = grown(Span(buffer(at_once=9)), 1)
    place = span.arena.slots()["a"].data_ptr()
    for _ in range(8):
        span = grown(span, 1)
    assert (span.arena.taken, span.arena.reserved) == (9, 9)
    assert span.arena.slots()["a"].data_ptr() == place


def test_an_empty_buffer_has_no_bytes() -> None:
    assert (buffer(at_once=9).nbytes, buffer().reserved) == (0, 0)


def test_bytes_count_what_is_taken_and_not_what_is_reserved() -> None:
    span = Span(buffer(step=4))
    for _ in range(9):
        span = grown(span, 1)
    unit = 2 * 3 * 4 + 2 * 4
    assert span.arena.unit_nbytes == unit
    assert span.arena.reserved > span.arena.taken
    assert span.arena.nbytes == 12 * unit
    assert span.nbytes_used == 9 * unit


def test_growth_reserves_twice_and_seldom_copies() -> None:
    span, moves, place = Span(buffer(step=4)), 0, 0
    for _ in range(256):
        span = grown(span, 1)
        moves += span.arena.slots()["a"].data_ptr() != place
        place = span.arena.slots()["a"].data_ptr()
    assert moves <= 8  # 64 steps of 4, each of them a copy if nothing were reserved
    assert told(span) == list(range(256))


def test_a_bounded_buffer_never_passes_its_bound() -> None:
    span, seen = Span(buffer(step=4, bound=10)), []
    for length in range(1, 60):
        span = grown(span, 1).cut(length - 7, length)
        seen.append(span.arena.taken)
        assert told(span) == list(range(max(0, length - 7), length))
    assert max(seen) == 10
    assert span.arena.reserved == 10


def test_slots_after_a_compaction_start_at_zero() -> None:
    span = grown(Span(buffer(step=4, bound=10)), 10).cut(6, 10)
    assert span.arena.base == 0
    span = grown(span, 1)
    assert span.arena.base == 6
    assert span.arena.slots()["b"][0, :5, 0].tolist() == [6, 7, 8, 9, 10]
    assert told(span) == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: buffer(step=64), 1),  # in place
        (lambda: buffer(step=4), 60),  # grown
        (lambda: buffer(step=4, bound=10), 5),  # compacted
    ],
    ids=["in place", "grown", "compacted"],
)
def test_the_span_before_an_append_reads_what_it_read(make, count: int) -> None:
    older = grown(Span(make()), 8).cut(3, 8)
    assert told(older) == [3, 4, 5, 6, 7]
    newer = grown(older, count)
    assert told(newer) == list(range(3, 8 + count))
    assert told(older) == [3, 4, 5, 6, 7]


def test_an_append_after_an_undone_one_overwrites_it() -> None:
    older = grown(Span(buffer(step=4)), 6)
    wrong = {name: tensor + 100 for name, tensor in units(6, 8).items()}
    older.extended(wrong, 2)
    assert told(grown(older, 3)) == list(range(9))


def test_release_gives_back_what_lies_beyond_the_bound() -> None:
    span = grown(Span(buffer(step=4, bound=10)), 50).cut(44, 50)
    assert span.arena.taken == 50
    settled = span.settled()
    assert (settled.arena.taken, settled.arena.reserved) == (10, 10)
    assert told(settled) == [44, 45, 46, 47, 48, 49]
    assert settled.arena is not span.arena


def test_release_within_the_bound_copies_nothing() -> None:
    span = grown(Span(buffer(step=4, bound=10)), 9).cut(5, 9)
    assert span.settled().arena is span.arena


def test_a_released_buffer_goes_on() -> None:
    span = grown(Span(buffer(step=4, bound=10)), 50).cut(44, 50).settled()
    for _ in range(30):
        span = grown(span, 1).cut(span.stop - 5, span.stop + 1)
    assert told(span) == [74, 75, 76, 77, 78, 79]
    assert span.arena.taken == 10


def test_a_share_is_independent_both_ways() -> None:
    span = grown(Span(buffer(step=4)), 6)
    twin = span.shared()
    span.arena.slots()["a"].zero_()
    span.arena.slots()["b"].zero_()
    assert told(twin) == list(range(6))
    assert twin.arena.nbytes == span.arena.nbytes
    assert told(grown(twin, 3)) == list(range(9))
    assert told(span) == [0] * 6


def test_select_takes_sequences_in_order_with_repeats() -> None:
    span = grown(Span(buffer(step=4)), 3)
    for tensor in span.tensors().values():
        tensor[1] += 50
    picked = span.selected(torch.tensor([1, 0, 1]))
    tags = picked.tensors()["a"][:, :, 0]
    assert tags.tolist() == [[50, 51, 52], [0, 1, 2], [50, 51, 52]]
    assert picked.arena.nbytes == span.arena.nbytes // 2 * 3
    assert span.arena.slabs["a"].shape[0] == 2


def test_cut_outside_a_span_is_empty() -> None:
    span = grown(Span(buffer()), 6).cut(2, 5)
    cuts = [(span.cut(a, b).first, len(span.cut(a, b))) for a, b in ((0, 9), (3, 4), (7, 9))]
    assert cuts == [(2, 3), (3, 1), (5, 0)]
    assert len(span.cut(0, 1)) == 0


def test_a_span_may_begin_anywhere_and_takes_what_it_would_have_grown_to() -> None:
    placed = [
        Span.adopted(buffer(step=4), 20, units(20, 23), 23),
        Span.adopted(buffer(step=4, bound=10), 20, units(20, 23), 23),
        Span.adopted(buffer(step=1, at_once=30), 20, units(20, 23), 23),
    ]
    assert [told(span) for span in placed] == [[20, 21, 22]] * 3
    assert [told(grown(span, 2)) for span in placed] == [[20, 21, 22, 23, 24]] * 3
    assert placed[1].arena.taken == 10


def test_a_buffer_made_in_inference_mode_is_writable_outside() -> None:
    with torch.inference_mode():
        span = grown(Span(buffer(step=2)), 3)
    span = grown(span, 1)
    assert told(span) == [0, 1, 2, 3]
    assert not span.arena.slots()["a"].is_inference()


def test_a_buffer_selected_and_shared_in_inference_mode_is_writable_outside() -> None:
    span = grown(Span(buffer(step=2)), 3)
    with torch.inference_mode():
        twins = [span.selected(torch.tensor([0, 1])), span.shared()]
    assert [told(grown(twin, 1)) for twin in twins] == [[0, 1, 2, 3]] * 2


def test_fields_of_pages_keep_their_axis() -> None:
    """Per-page fields have one row where others have a page of them."""
    slabs = {
        "codes": Slab((1, GROWING, 2, 64, 5), torch.uint8),
        "scale": Slab((1, GROWING, 2, 1, 5), torch.float16),
    }
    pages = {
        "codes": torch.arange(3).view(1, 3, 1, 1, 1).expand(1, 3, 2, 64, 5).to(torch.uint8),
        "scale": torch.arange(3).view(1, 3, 1, 1, 1).expand(1, 3, 2, 1, 5).half(),
    }
    span = Span(Buffer(slabs, Growth(1), CPU)).extended(pages, 3).cut(1, 3)
    assert span.tensors()["codes"][0, :, 1, 63, 4].tolist() == [1, 2]
    assert span.tensors()["scale"][0, :, 1, 0, 4].tolist() == [1, 2]
    assert span.arena.unit_nbytes == 2 * 64 * 5 + 2 * 5 * 2


def test_memory_that_units_have_left_is_held_by_no_span() -> None:
    before = grown(Span(buffer(step=1)), 3)
    assert before.placed.table.shape == (2, 3)
    left = weakref.ref(before.arena.located(0)[0]["a"])
    inside = weakref.ref(before.placed.sides["a"][""])
    after = grown(before, 1)  # into other memory
    assert left() is None and inside() is None
    assert told(before) == [0, 1, 2] and told(after) == [0, 1, 2, 3]
