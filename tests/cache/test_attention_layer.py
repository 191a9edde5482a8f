"""The rows of one attention layer: appends, reads, rewinds, windows, refusals."""

from __future__ import annotations

import random

import pytest
import torch

from cache.tagged import One, layer, put, recipe, rows, same, told
from kvant import CapacityError, LayerSpec, RewindError, SnapshotMismatch, attend
from kvant.codecs import Raw
from kvant.contracts import Snapshot
from kvant.retention import KeepAll, Window

SPECS = ("raw", "raw,step=1", "raw,capacity=640", "affine8", "affine4", "affine8,start=150")


@pytest.mark.parametrize("text", SPECS)
def test_reads_every_row_of_every_head_in_position_order(text: str) -> None:
    """A stride that is not the count once broke all heads but the first after 50 tokens."""
    state = One(layer(text))
    for count in (3, 1, 60, 1, 200, 0, 17, 1):
        put(state, count, batch=2, heads=3)
    for sequence in range(2):
        for head in range(3):
            tag = 1000 * (3 * sequence + head)
            assert told(state, sequence, head) == list(range(tag, tag + 283))


@pytest.mark.parametrize("text", SPECS)
def test_a_range_reads_its_rows_and_no_others(text: str) -> None:
    state = One(layer(text))
    put(state, 300)
    for start, stop in ((0, 1), (5, 9), (63, 65), (120, 300), (299, 300), (7, 7)):
        keys, values = state.read(start, stop)
        assert keys[0, 0, :, 0].tolist() == list(range(start, stop))
        assert torch.equal(keys, values)
    assert state.read(298)[0][0, 0, :, 0].tolist() == [298, 299]


@pytest.mark.parametrize("format_", ["affine8", "affine4,tail=20", "turbo2,tail=0"])
def test_all_is_dense_before_start_and_then_sealed_at_once(format_: str) -> None:
    state = One(layer(f"{format_},start=200"))
    keys, values = torch.randn(2, 1, 2, 200, 32)
    state.append(keys[:, :, :150], values[:, :, :150])
    for t in range(150, 199):
        state.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    assert not state.stats.sealed_pages
    assert (state.read()[0] - keys[:, :, :199]).abs().max() < 1e-5
    state.append(keys[:, :, 199:], values[:, :, 199:])
    due = state.spec.paging.count_due_pages(200)
    assert due >= 2 and sum(state.stats.sealed_pages.values()) == 2 * due
    moved = (state.read()[0] - keys).abs().amax(-1)
    assert moved[:, :, 64 * due :].max() < 1e-5 < moved[:, :, : 64 * due].min()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 11), (11, 12)])
def test_a_range_outside_the_rows_is_refused(start: int, stop: int) -> None:
    state = One(layer("raw"))
    put(state, 10)
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) of 10"):
        state.read(start, stop)


def test_a_range_that_a_window_let_go_is_refused_and_sinks_are_not() -> None:
    state = One(layer("raw,window=5,sinks=2,slack=0"))
    put(state, 30)
    assert state.read(0, 2)[0][0, 0, :, 0].tolist() == [0, 1]
    assert state.read(25, 30)[0][0, 0, :, 0].tolist() == [25, 26, 27, 28, 29]
    with pytest.raises(ValueError, match=r"\[25, 30\)"):
        state.read(24, 30)


def test_rows_enter_and_leave_sequence_first() -> None:
    state, twin = One(layer("affine8")), One(layer("affine8"))
    keys, values = torch.randn(2, 2, 3, 100, 16)
    state.append(keys.transpose(1, 2), values.transpose(1, 2), order="BTHD")
    twin.append(keys, values)
    same(state.snapshot(), twin.snapshot())
    for first, other in zip(state.read(order="BTHD"), twin.read(), strict=True):
        assert first.shape == (2, 100, 3, 16)
        assert torch.equal(first.transpose(1, 2), other)


def test_an_order_that_is_none_is_refused_when_reading() -> None:
    """read() once took any other word for head-first."""
    state = One(layer("raw"))
    put(state, 3)
    with pytest.raises(ValueError, match=r"'BTDH'.*'BHTD'"):
        state.read(order="BTDH")  # type: ignore[arg-type]


def test_rows_are_kept_in_the_dtype_they_come_in() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state = One(layer("affine8"))
        new = rows(0, 130, dtype=dtype)
        state.append(new, new.float())
        keys, values = state.read()
        assert (keys.dtype, values.dtype) == (dtype, torch.float32)


def test_the_dtype_of_the_spec_overrides_that_of_the_rows() -> None:
    state = One(layer("bf16"))
    put(state, 3)
    assert state.read()[0].dtype == torch.bfloat16


def test_an_append_copies_its_rows() -> None:
    state = One(layer("raw"))
    new = rows(0, 5)
    state.append(new, new)
    new.zero_()
    assert told(state) == [0, 1, 2, 3, 4]


def test_rows_that_need_gradients_are_welcome() -> None:
    state = One(layer("affine8"))
    new = torch.randn(1, 1, 70, 8, requires_grad=True)
    state.append(new, new)
    assert not state.read()[0].requires_grad


@pytest.mark.parametrize("text", ["raw,sinks=4", "affine8,sinks=4", "turbo3,window=9,sinks=4"])
@pytest.mark.parametrize("verb", ["append", "fork", "select", "restore"])
def test_what_was_made_in_inference_mode_goes_on_outside(text: str, verb: str) -> None:
    """Sinks forked or selected in inference mode once could not be written outside it."""
    expected, state = One(layer(text)), One(layer(text))
    keys, values = torch.randn(2, 1, 1, 90, 8)
    expected.append(keys[:, :, :2], values[:, :, :2])
    if verb != "append":
        state.append(keys[:, :, :2], values[:, :, :2])
    with torch.inference_mode():
        if verb == "append":
            state.append(keys[:, :, :2], values[:, :, :2])
        elif verb == "fork":
            state = state.fork()
        elif verb == "select":
            state.select(torch.tensor([0]))
        else:
            state.restore(state.snapshot())
    for each in (expected, state):
        each.append(keys[:, :, 2:], values[:, :, 2:])
    same(expected.snapshot(), state.snapshot())


def test_an_empty_append_changes_nothing() -> None:
    state = One(layer("affine8"))
    put(state, 100)
    before = state.snapshot()
    view = put(state, 0)
    same(before, state.snapshot())
    assert attend(torch.zeros(1, 1, 0, 8), view).shape == (1, 1, 0, 8)


def test_a_first_append_of_no_rows_gives_the_layer_a_shape() -> None:
    state = One(layer("raw"))
    put(state, 0, batch=2, heads=3)
    assert state.length == state.held == 0
    assert [r.shape for r in state.read()] == [(2, 3, 0, 8)] * 2


def test_padding_is_not_at_a_position() -> None:
    state = One(layer("raw"))
    new = rows(0, 4, batch=2)
    state.append(new, new, start=[0, 3])
    assert state.positions().tolist() == [[0, 1, 2, 3], [-1, -1, -1, 0]]


def test_each_padded_sequence_keeps_its_own_first_positions() -> None:
    state = One(layer("affine8,window=6,sinks=2,slack=0"))
    new = rows(0, 200, batch=2)
    state.append(new, new, start=[0, 70])
    for sequence, first in ((0, 0), (1, 70)):
        keys = state.read()[0][sequence, 0, :, 0] - 1000 * sequence
        places = state.positions()[sequence]
        seen = {int(p): int(k) for p, k in zip(places, keys, strict=True) if p >= 0}
        last = range(194 - first, 200 - first)
        assert seen == {p: p + first for p in (0, 1, *last)}


@pytest.mark.parametrize("slack", [0, 3])
def test_sinks_that_outnumber_the_window_are_not_read_before_they_come(slack: int) -> None:
    """With fewer tokens than sinks, read() once gave a row for each sink, come or not."""
    state = One(recipe(Raw(), Window(1, 8), slack=slack))
    held = []
    for count in range(1, 13):
        put(state, 1)
        known = [p for p in state.positions()[0].tolist() if p >= 0]
        assert told(state) == known
        held.append(state.held)
        assert state.held == len(known) <= count
    assert held[:8] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_exactly_the_window_and_the_sinks_are_held() -> None:
    state = One(layer("raw,window=5,sinks=2,slack=3"))
    put(state, 40)
    assert told(state) == [0, 1, 35, 36, 37, 38, 39]
    assert (state.length, state.held, state.max_held) == (40, 7, 7)


def test_a_view_is_valid_until_the_next_append() -> None:
    """A long chunk is let go when it is committed, but not from under its own view."""
    state = One(recipe(Raw(), Window(4), slack=0))
    view = put(state, 300)
    out = attend(torch.zeros(1, 1, 300, 8), view)[0, 0, :, 0]
    assert out[299] == 297.5
    assert out[150] == 148.5


def test_view_gives_older_queries_what_they_see() -> None:
    state = One(layer("affine8,window=30,sinks=0"))
    put(state, 100)
    out = attend(torch.zeros(1, 1, 5, 8), state.view(5))[0, 0, :, 0]
    assert [round(v, 3) for v in out.tolist()] == [80.5, 81.5, 82.5, 83.5, 84.5]


@pytest.mark.parametrize("queries", [0, 4, -1])
def test_a_view_for_more_tokens_than_there_are_is_refused(queries: int) -> None:
    state = One(layer("raw"))
    put(state, 3)
    with pytest.raises(ValueError, match=f"{queries} of 3 tokens"):
        state.view(queries)


def test_an_empty_layer_has_no_view() -> None:
    with pytest.raises(ValueError, match="append first"):
        One(layer("raw")).view()


@pytest.mark.parametrize("text", ["raw", "affine8", "turbo4", "turbo3,window=90,sinks=4"])
def test_a_rewind_within_slack_then_other_rows_is_as_if_it_never_happened(text: str) -> None:
    keys, values = torch.randn(2, 1, 2, 400, 32)
    for length in (64, 100, 128, 144, 192, 300):
        straight, detour = One(layer(text)), One(layer(text))
        for state in (straight, detour):
            state.append(keys[:, :, :length], values[:, :, :length])
        detour.append(torch.randn(1, 2, 16, 32), torch.randn(1, 2, 16, 32))
        detour.rewind(length)
        for state in (straight, detour):
            state.append(keys[:, :, length:], values[:, :, length:])
        same(straight.snapshot(), detour.snapshot())


def test_rewinds_one_after_the_other_reach_only_rows_that_are_there() -> None:
    state = One(recipe(Raw(), Window(5), slack=4, page=4))
    for _ in range(50):
        put(state, 1)
    for to in (48, 47, 46, 45):  # the page of the oldest row begins at 40
        state.rewind(to)
        assert told(state)[-5:] == list(range(to - 5, to))
    before = state.snapshot()
    with pytest.raises(RewindError, match="length 44 cannot be reached from 45"):
        state.rewind(44)
    same(before, state.snapshot())


def test_a_rewind_to_nothing_is_always_possible() -> None:
    state = One(layer("affine8,window=5,sinks=0"))
    put(state, 500)
    state.rewind(0)
    assert state.length == state.held == 0
    put(state, 7)
    assert told(state) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("to", [-1, 11])
def test_a_rewind_beyond_the_ends_is_refused(to: int) -> None:
    state = One(layer("raw"))
    put(state, 10)
    with pytest.raises(RewindError, match=f"length {to} cannot be reached from 10"):
        state.rewind(to)


def test_random_rewinds_and_appends_never_read_a_wrong_row() -> None:
    draw = random.Random(0)
    for text in ("raw", "affine8", "affine8,tail=70,slack=5", "raw,window=30,sinks=3,slack=7"):
        for _ in range(8):
            state, truth = One(layer(text)), []
            for step in range(25):
                if draw.random() < 0.35 and truth:
                    to = state.reachable(draw.randrange(max(0, len(truth) - 12), len(truth) + 1))
                    state.rewind(to)
                    truth = truth[:to]
                count = draw.choice([1, 1, 1, 2, 9, 70])
                tags = [50 * step + i % 50 for i in range(count)]
                new = torch.tensor(tags).float().view(1, 1, -1, 1).repeat(1, 1, 1, 8)
                state.append(new, new)
                truth += tags
                if state.length:
                    places = state.positions()[0].tolist()
                    assert told(state) == [truth[p] for p in places]


@pytest.mark.parametrize("text", ["raw,capacity=10", "affine8,capacity=10"])
def test_capacity_is_exact_and_refuses_without_a_trace(text: str) -> None:
    state = One(layer(text))
    put(state, 9)
    before = state.snapshot()
    with pytest.raises(CapacityError, match=r"11 tokens for a capacity of 10.*capacity=11"):
        put(state, 2)
    same(before, state.snapshot())
    put(state, 1)
    assert told(state) == list(range(10))


BAD_ROWS = {
    "three dimensions": (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), "needs 4 dimensions"),
    "one sequence": (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), r"one sequence is keys\[None\]"),
    "more sequences": (torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8), "2 sequences.*of 1"),
    "more heads": (torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), "2 heads.*1 heads"),
    "wider keys": (torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 8), "16 wide.*8 wide"),
    "wider values": (torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 16), "16 wide.*8 wide"),
    "fewer values": (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 1, 8), r"\[1, 1, 2, 8\].*differ"),
    "no values": (torch.zeros(1, 1, 2, 8), None, "values come with the keys"),
    "another dtype": (torch.zeros(1, 1, 1, 8).half(), torch.zeros(1, 1, 1, 8), "float16.*float32"),
    "integers": (torch.zeros(1, 1, 1, 8).int(), torch.zeros(1, 1, 1, 8).int(), "int32"),
    "another device": (
        torch.zeros(1, 1, 1, 8, device="meta"),
        torch.zeros(1, 1, 1, 8, device="meta"),
        "on meta.*on cpu",
    ),
    "two devices": (torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8, device="meta"), "meta"),
}


@pytest.mark.parametrize("text", ["raw", "affine8,window=40,sinks=3"])
@pytest.mark.parametrize("keys, values, message", BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_do_not_fit_are_refused_without_a_trace(
    text: str, keys, values, message: str
) -> None:
    state = One(layer(text))
    put(state, 100)
    before = state.snapshot()
    with pytest.raises(ValueError, match=message):
        state.append(keys, values)
    same(before, state.snapshot())
    put(state, 1)
    assert told(state)[-3:] == [98, 99, 100]


def test_a_width_that_the_codec_refuses_leaves_the_layer_empty() -> None:
    state = One(layer("affine8"))
    with pytest.raises(ValueError, match="12"):
        put(state, 1, dim=12)
    assert (state.length, state.nbytes) == (0, 0)
    put(state, 1)
    assert told(state) == [0]


def test_a_start_that_changes_is_refused() -> None:
    state = One(layer("raw"))
    new = rows(0, 4, batch=2)
    state.append(new, new, start=[0, 3])
    with pytest.raises(ValueError, match=r"start \(1, 3\).*\(0, 3\)"):
        state.append(new, new, start=[1, 3])
    state.append(new, new, start=[0, 3])
    assert state.length == 8


@pytest.mark.parametrize("start", [[1], [0, 0, 0], [-1, 0]])
def test_a_start_that_is_none_is_refused(start: list[int]) -> None:
    new = rows(0, 4, batch=2)
    with pytest.raises(ValueError, match=r"for each of 2"):
        One(layer("raw")).append(new, new, start=start)


def test_values_inside_the_keys_are_stored_once() -> None:
    state = One(LayerSpec(Raw(), Raw(), KeepAll(), value_dim=6))
    keys = torch.randn(1, 1, 5, 8)
    state.append(keys)
    assert torch.equal(state.read()[1], keys[..., :6])
    twin = One(layer("raw"))
    twin.append(keys, keys)
    assert state.nbytes * 2 == twin.nbytes


def test_values_that_the_keys_are_too_narrow_for_are_refused() -> None:
    """A value_dim beyond the keys once gave outputs narrower than the view said."""
    state = One(LayerSpec(Raw(), Raw(), KeepAll(), value_dim=9))
    with pytest.raises(ValueError, match=r"9 channels inside keys of 8"):
        state.append(torch.zeros(1, 1, 1, 8))


@pytest.mark.parametrize("text", ["raw", "affine8", "affine8,window=70,sinks=4"])
def test_memory_stays_after_reset_and_goes_with_clear(text: str) -> None:
    state = One(layer(text))
    put(state, 200)
    taken = state.nbytes
    state.reset()
    assert (state.length, state.held, state.nbytes) == (0, 0, taken)
    assert state.read()[0].shape == (1, 1, 0, 8)
    put(state, 100)
    assert told(state)[-2:] == [98, 99]
    state.clear()
    assert (state.length, state.nbytes, state.nbytes_used, state.batch) == (0, 0, 0, 0)


def test_bytes_used_are_those_of_rows_that_are_there() -> None:
    state = One(layer("raw,sinks=2"))
    put(state, 3, heads=2)
    assert state.nbytes_used == 3 * 2 * 2 * 8 * 4
    assert state.nbytes == 64 * 2 * 2 * 8 * 4


def test_a_fork_is_independent_both_ways() -> None:
    for text in ("raw,sinks=3", "affine8", "affine8,window=70,sinks=3"):
        state = One(layer(text))
        put(state, 2)
        twin = state.fork()
        put(state, 100)
        twin.append(rows(500, 600), rows(500, 600))
        assert [told(state)[i] for i in (0, 1, 2, -1)] == [0, 1, 2, 101]
        assert [told(twin)[i] for i in (0, 1, 2, -1)] == [0, 1, 500, 599]


LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, BEGINS = range(6)
NUMBERS = [200, 0, 0, 3, 2, 0]  # of 200 tokens in affine8


def but(**changed: int) -> dict[str, torch.Tensor]:
    numbers = list(NUMBERS)
    for name, number in changed.items():
        numbers[globals()[name]] = number
    return {"numbers": torch.tensor([numbers])}


def nonsense() -> dict[str, dict[str, torch.Tensor | None]]:
    return {
        "a negative length": but(LENGTH=-1),
        "a shorter length": but(LENGTH=199),
        "a longer length": but(LENGTH=201),
        "a length beyond counting": but(LENGTH=1 << 62),
        "negative padding": but(PADDING=-1),
        "open pages from elsewhere": but(FIRST_OPEN=1),
        "negative open pages": but(FIRST_OPEN=-1),
        "more open pages than can be": but(FIRST_OPEN=1 << 50),
        "pages from elsewhere": but(FIRST_SEALED=1),
        "negative pages": but(FIRST_SEALED=-1),
        "fewer pages than are due": but(STOP_SEALED=2),
        "more pages than are due": but(STOP_SEALED=4),
        "rows that begin too late": but(BEGINS=5),
        "no numbers": {"numbers": None},
        "numbers of floats": {"numbers": torch.tensor([NUMBERS]).double()},
        "numbers of 32 bits": {"numbers": torch.tensor([NUMBERS]).int()},
        "a number too few": {"numbers": torch.tensor([NUMBERS[:5]])},
        "a number too many": {"numbers": torch.tensor([[*NUMBERS, 0]])},
        "no sequences": {"numbers": torch.zeros(0, 6, dtype=torch.int64)},
        "a sequence too many": {"numbers": torch.tensor([NUMBERS] * 2)},
        "a tensor too many": {"other": torch.zeros(1)},
        "no codes": {"keys.codes": None},
        "codes of another dtype": {"keys.codes": torch.zeros(3, 1, 64, 8).long()},
        "fewer codes": {"keys.codes": torch.zeros(2, 1, 64, 8, dtype=torch.uint8)},
        "wider codes": {"keys.codes": torch.zeros(3, 1, 64, 9, dtype=torch.uint8)},
        "codes of more heads": {"keys.codes": torch.zeros(3, 2, 64, 8, dtype=torch.uint8)},
        "flat codes": {"keys.codes": torch.zeros(192, dtype=torch.uint8)},
        "no open rows": {"keys.open": None},
        "open rows of integers": {"keys.open": torch.zeros(72, 1, 8).int()},
        "open rows without heads": {"keys.open": torch.zeros(72, 0, 8)},
        "an open row too few": {"keys.open": torch.zeros(71, 1, 8)},
        "an open row too many": {"keys.open": torch.zeros(73, 1, 8)},
        "wider open rows": {"keys.open": torch.zeros(72, 1, 16)},
    }


def test_a_snapshot_says_where_its_pages_are() -> None:
    """What the test below changes."""
    state = One(layer("affine8"))
    put(state, 200)
    tensors = state.snapshot().tensors
    assert tensors["numbers"].tolist() == [NUMBERS]
    assert tensors["keys.codes"].shape == (3, 1, 64, 8)
    assert tensors["keys.open"][:, 0, 0].tolist() == list(range(128, 200))


@pytest.mark.parametrize("change", nonsense().values(), ids=nonsense())
def test_a_snapshot_whose_parts_do_not_fit_is_refused(
    change: dict[str, torch.Tensor | None],
) -> None:
    state = One(layer("affine8"))
    put(state, 200)
    good = state.snapshot()
    tensors = {n: t for n, t in {**good.tensors, **change}.items() if t is not None}
    other = One(layer("affine8"))
    put(other, 70)
    before = other.snapshot()
    with pytest.raises(SnapshotMismatch):
        other.restore(Snapshot(tensors, {}))
    with pytest.raises(SnapshotMismatch):
        other.restore(Snapshot(good.tensors, {"other": 1}))
    same(before, other.snapshot())


@pytest.mark.parametrize("text", ["affine4", "raw", "affine8,page=128", "affine8,window=9,sinks=1"])
def test_a_snapshot_of_another_recipe_is_refused(text: str) -> None:
    state = One(layer("affine8"))
    put(state, 200)
    with pytest.raises(SnapshotMismatch):
        One(layer(text)).restore(state.snapshot())


def test_a_snapshot_owns_its_memory() -> None:
    """A slice kept as a snapshot once pinned the whole buffer, and changed with it."""
    state = One(layer("raw,capacity=1000"))
    put(state, 3)
    snapshot = state.snapshot()
    for tensor in snapshot.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    state.rewind(0)
    state.append(rows(70, 73), rows(70, 73))
    assert snapshot.tensors["keys.open"][:, 0, 0].tolist() == [0, 1, 2]
