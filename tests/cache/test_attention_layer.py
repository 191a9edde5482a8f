"""Test one attention layer: appends, reads, rewinds, windows, refusals."""

from __future__ import annotations

import random

import pytest
import torch

from cache.tagged import (
    LayerCache,
    append_rows,
    assert_same,
    make_layer,
    make_recipe,
    make_rows,
    read_tags,
)
from kvant import CapacityError, LayerSpec, RewindError, SnapshotMismatch, attend
from kvant.codecs import Raw
from kvant.contracts import Snapshot
from kvant.retention import KeepAll, Window

SPECS = ("raw", "raw,step=1", "raw,capacity=640", "affine8", "affine4", "affine8,start=150")


@pytest.mark.parametrize("text", SPECS)
def test_reads_every_row_of_every_head_in_position_order(text: str) -> None:
    """Regression: a stride unequal to the row count broke all heads but the first after 50
    tokens.
    """
    state = LayerCache(make_layer(text))
    for count in (3, 1, 60, 1, 200, 0, 17, 1):
        append_rows(state, count, batch=2, heads=3)
    for sequence in range(2):
        for head in range(3):
            tag = 1000 * (3 * sequence + head)
            assert read_tags(state, sequence, head) == list(range(tag, tag + 283))


@pytest.mark.parametrize("text", SPECS)
def test_range_read_returns_exactly_its_rows(text: str) -> None:
    state = LayerCache(make_layer(text))
    append_rows(state, 300)
    for start, stop in ((0, 1), (5, 9), (63, 65), (120, 300), (299, 300), (7, 7)):
        keys, values = state.read(start, stop)
        assert keys[0, 0, :, 0].tolist() == list(range(start, stop))
        assert torch.equal(keys, values)
    assert state.read(298)[0][0, 0, :, 0].tolist() == [298, 299]


@pytest.mark.parametrize("format_", ["affine8", "affine4,tail=20", "turbo2,tail=0"])
def test_rows_stay_dense_before_start_then_seal_at_once(format_: str) -> None:
    state = LayerCache(make_layer(f"{format_},start=200"))
    keys, values = torch.randn(2, 1, 2, 200, 32)
    state.append(keys[:, :, :150], values[:, :, :150])
    for t in range(150, 199):
        state.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    assert not state.stats.sealed_pages
    assert (state.read()[0] - keys[:, :, :199]).abs().max() < 1e-5
    state.append(keys[:, :, 199:], values[:, :, 199:])
    due = state.spec.paging.count_due_pages(200)
    assert due >= 2 and sum(state.stats.sealed_pages.values()) == 2 * due
    error = (state.read()[0] - keys).abs().amax(-1)
    assert error[:, :, 64 * due :].max() < 1e-5 < error[:, :, : 64 * due].min()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 11), (11, 12)])
def test_range_outside_the_rows_is_refused(start: int, stop: int) -> None:
    state = LayerCache(make_layer("raw"))
    append_rows(state, 10)
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) of 10"):
        state.read(start, stop)


def test_range_evicted_by_a_window_is_refused_but_sinks_are_readable() -> None:
    state = LayerCache(make_layer("raw,window=5,sinks=2,slack=0"))
    append_rows(state, 30)
    assert state.read(0, 2)[0][0, 0, :, 0].tolist() == [0, 1]
    assert state.read(25, 30)[0][0, 0, :, 0].tolist() == [25, 26, 27, 28, 29]
    with pytest.raises(ValueError, match=r"\[25, 30\)"):
        state.read(24, 30)


def test_rows_enter_and_leave_sequence_first() -> None:
    state, clone = LayerCache(make_layer("affine8")), LayerCache(make_layer("affine8"))
    keys, values = torch.randn(2, 2, 3, 100, 16)
    state.append(keys.transpose(1, 2), values.transpose(1, 2), order="BTHD")
    clone.append(keys, values)
    assert_same(state.snapshot(), clone.snapshot())
    for first, other in zip(state.read(order="BTHD"), clone.read(), strict=True):
        assert first.shape == (2, 100, 3, 16)
        assert torch.equal(first.transpose(1, 2), other)


def test_unknown_order_is_refused_when_reading() -> None:
    """Regression: read() treated any other word as head-first."""
    state = LayerCache(make_layer("raw"))
    append_rows(state, 3)
    with pytest.raises(ValueError, match=r"'BTDH'.*'BHTD'"):
        state.read(order="BTDH")  # type: ignore[arg-type]


def test_rows_are_stored_in_their_own_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state = LayerCache(make_layer("affine8"))
        new = make_rows(0, 130, dtype=dtype)
        state.append(new, new.float())
        keys, values = state.read()
        assert (keys.dtype, values.dtype) == (dtype, torch.float32)


def test_spec_dtype_overrides_the_dtype_of_rows() -> None:
    state = LayerCache(make_layer("bf16"))
    append_rows(state, 3)
    assert state.read()[0].dtype == torch.bfloat16


def test_an_append_copies_its_rows() -> None:
    state = LayerCache(make_layer("raw"))
    new = make_rows(0, 5)
    state.append(new, new)
    new.zero_()
    assert read_tags(state) == [0, 1, 2, 3, 4]


def test_rows_that_require_grad_are_accepted() -> None:
    state = LayerCache(make_layer("affine8"))
    new = torch.randn(1, 1, 70, 8, requires_grad=True)
    state.append(new, new)
    assert not state.read()[0].requires_grad


@pytest.mark.parametrize("text", ["raw,sinks=4", "affine8,sinks=4", "turbo3,window=9,sinks=4"])
@pytest.mark.parametrize("verb", ["append", "fork", "select", "restore"])
def test_layer_built_in_inference_mode_works_outside(text: str, verb: str) -> None:
    """Regression: sinks forked or selected in inference mode could not be written outside it."""
    expected, state = LayerCache(make_layer(text)), LayerCache(make_layer(text))
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
    assert_same(expected.snapshot(), state.snapshot())


def test_an_empty_append_changes_nothing() -> None:
    state = LayerCache(make_layer("affine8"))
    append_rows(state, 100)
    before = state.snapshot()
    view = append_rows(state, 0)
    assert_same(before, state.snapshot())
    assert attend(torch.zeros(1, 1, 0, 8), view).shape == (1, 1, 0, 8)


def test_first_append_of_no_rows_sets_the_shape() -> None:
    state = LayerCache(make_layer("raw"))
    append_rows(state, 0, batch=2, heads=3)
    assert state.length == state.held == 0
    assert [r.shape for r in state.read()] == [(2, 3, 0, 8)] * 2


def test_padding_has_no_position() -> None:
    state = LayerCache(make_layer("raw"))
    new = make_rows(0, 4, batch=2)
    state.append(new, new, start=[0, 3])
    assert state.positions().tolist() == [[0, 1, 2, 3], [-1, -1, -1, 0]]


def test_each_padded_sequence_keeps_its_own_sinks() -> None:
    state = LayerCache(make_layer("affine8,window=6,sinks=2,slack=0"))
    new = make_rows(0, 200, batch=2)
    state.append(new, new, start=[0, 70])
    for sequence, first in ((0, 0), (1, 70)):
        keys = state.read()[0][sequence, 0, :, 0] - 1000 * sequence
        places = state.positions()[sequence]
        visible = {int(p): int(k) for p, k in zip(places, keys, strict=True) if p >= 0}
        last = range(194 - first, 200 - first)
        assert visible == {p: p + first for p in (0, 1, *last)}


@pytest.mark.parametrize("slack", [0, 3])
def test_sinks_wider_than_the_window_are_not_read_early(slack: int) -> None:
    """Regression: with fewer tokens than sinks, read() returned a row for each sink."""
    state = LayerCache(make_recipe(Raw(), Window(1, 8), slack=slack))
    rows_read = []
    for count in range(1, 13):
        append_rows(state, 1)
        positions = [p for p in state.positions()[0].tolist() if p >= 0]
        assert read_tags(state) == positions
        rows_read.append(state.held)
        assert state.held == len(positions) <= count
    assert rows_read[:8] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_exactly_the_window_and_the_sinks_are_kept() -> None:
    state = LayerCache(make_layer("raw,window=5,sinks=2,slack=3"))
    append_rows(state, 40)
    assert read_tags(state) == [0, 1, 35, 36, 37, 38, 39]
    assert (state.length, state.held, state.max_held) == (40, 7, 7)


def test_a_view_is_valid_until_the_next_append() -> None:
    """The evicted rows of a long chunk are freed on commit, but not under its own view."""
    state = LayerCache(make_recipe(Raw(), Window(4), slack=0))
    view = append_rows(state, 300)
    out = attend(torch.zeros(1, 1, 300, 8), view)[0, 0, :, 0]
    assert out[299] == 297.5
    assert out[150] == 148.5


def test_older_queries_of_a_view_see_their_own_rows() -> None:
    state = LayerCache(make_layer("affine8,window=30,sinks=0"))
    append_rows(state, 100)
    out = attend(torch.zeros(1, 1, 5, 8), state.view(5))[0, 0, :, 0]
    assert [round(v, 3) for v in out.tolist()] == [80.5, 81.5, 82.5, 83.5, 84.5]


@pytest.mark.parametrize("queries", [0, 4, -1])
def test_view_of_more_tokens_than_the_cache_has_is_refused(queries: int) -> None:
    state = LayerCache(make_layer("raw"))
    append_rows(state, 3)
    with pytest.raises(ValueError, match=f"{queries} of 3 tokens"):
        state.view(queries)


def test_an_empty_layer_has_no_view() -> None:
    with pytest.raises(ValueError, match="append first"):
        LayerCache(make_layer("raw")).view()


@pytest.mark.parametrize("text", ["raw", "affine8", "turbo4", "turbo3,window=90,sinks=4"])
def test_rewind_within_slack_leaves_no_trace(text: str) -> None:
    keys, values = torch.randn(2, 1, 2, 400, 32)
    for length in (64, 100, 128, 144, 192, 300):
        reference, rewound = LayerCache(make_layer(text)), LayerCache(make_layer(text))
        for state in (reference, rewound):
            state.append(keys[:, :, :length], values[:, :, :length])
        rewound.append(torch.randn(1, 2, 16, 32), torch.randn(1, 2, 16, 32))
        rewound.rewind(length)
        for state in (reference, rewound):
            state.append(keys[:, :, length:], values[:, :, length:])
        assert_same(reference.snapshot(), rewound.snapshot())


def test_consecutive_rewinds_reach_only_rows_in_the_cache() -> None:
    state = LayerCache(make_recipe(Raw(), Window(5), slack=4, page=4))
    for _ in range(50):
        append_rows(state, 1)
    for length in (48, 47, 46, 45):  # the page of the oldest row starts at 40
        state.rewind(length)
        assert read_tags(state)[-5:] == list(range(length - 5, length))
    before = state.snapshot()
    with pytest.raises(RewindError, match="cannot rewind from 45 to 44"):
        state.rewind(44)
    assert_same(before, state.snapshot())


def test_rewind_to_zero_is_always_possible() -> None:
    state = LayerCache(make_layer("affine8,window=5,sinks=0"))
    append_rows(state, 500)
    state.rewind(0)
    assert state.length == state.held == 0
    append_rows(state, 7)
    assert read_tags(state) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("length", [-1, 11])
def test_rewind_out_of_range_is_refused(length: int) -> None:
    state = LayerCache(make_layer("raw"))
    append_rows(state, 10)
    with pytest.raises(RewindError, match=f"cannot rewind from 10 to {length}"):
        state.rewind(length)


def test_random_rewinds_and_appends_never_read_a_wrong_row() -> None:
    draw = random.Random(0)
    for text in ("raw", "affine8", "affine8,tail=70,slack=5", "raw,window=30,sinks=3,slack=7"):
        for _ in range(8):
            state, truth = LayerCache(make_layer(text)), []
            for step in range(25):
                if draw.random() < 0.35 and truth:
                    length = state.reachable(
                        draw.randrange(max(0, len(truth) - 12), len(truth) + 1)
                    )
                    state.rewind(length)
                    truth = truth[:length]
                count = draw.choice([1, 1, 1, 2, 9, 70])
                tags = [50 * step + i % 50 for i in range(count)]
                new = torch.tensor(tags).float().view(1, 1, -1, 1).repeat(1, 1, 1, 8)
                state.append(new, new)
                truth += tags
                if state.length:
                    places = state.positions()[0].tolist()
                    assert read_tags(state) == [truth[p] for p in places]


@pytest.mark.parametrize("text", ["raw,capacity=10", "affine8,capacity=10"])
def test_capacity_is_exact_and_a_refusal_changes_nothing(text: str) -> None:
    state = LayerCache(make_layer(text))
    append_rows(state, 9)
    before = state.snapshot()
    with pytest.raises(CapacityError, match=r"11 tokens for a capacity of 10.*capacity=11"):
        append_rows(state, 2)
    assert_same(before, state.snapshot())
    append_rows(state, 1)
    assert read_tags(state) == list(range(10))


BAD_ROWS = {
    "three dimensions": (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), "needs 4 dimensions"),
    "one sequence": (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), r"one sequence is keys\[None\]"),
    "more sequences": (torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8), "2 sequences.*of 1"),
    "more heads": (torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), "2 heads.*1 heads"),
    "wider keys": (torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 8), "16 wide.*8 wide"),
    "wider values": (torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 16), "16 wide.*8 wide"),
    "fewer values": (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 1, 8), r"\[1, 1, 2, 8\].*differ"),
    "no values": (torch.zeros(1, 1, 2, 8), None, "values are needed, unless"),
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
def test_rows_of_wrong_shape_are_refused_and_change_nothing(
    text: str, keys, values, message: str
) -> None:
    state = LayerCache(make_layer(text))
    append_rows(state, 100)
    before = state.snapshot()
    with pytest.raises(ValueError, match=message):
        state.append(keys, values)
    assert_same(before, state.snapshot())
    append_rows(state, 1)
    assert read_tags(state)[-3:] == [98, 99, 100]


def test_unsupported_width_leaves_the_layer_empty() -> None:
    state = LayerCache(make_layer("affine8"))
    with pytest.raises(ValueError, match="12"):
        append_rows(state, 1, dim=12)
    assert (state.length, state.nbytes) == (0, 0)
    append_rows(state, 1)
    assert read_tags(state) == [0]


def test_changed_start_is_refused() -> None:
    state = LayerCache(make_layer("raw"))
    new = make_rows(0, 4, batch=2)
    state.append(new, new, start=[0, 3])
    with pytest.raises(ValueError, match=r"start \(1, 3\).*\(0, 3\)"):
        state.append(new, new, start=[1, 3])
    state.append(new, new, start=[0, 3])
    assert state.length == 8


@pytest.mark.parametrize("start", [[1], [0, 0, 0], [-1, 0]])
def test_missing_start_is_refused(start: list[int]) -> None:
    new = make_rows(0, 4, batch=2)
    with pytest.raises(ValueError, match=r"for each of 2"):
        LayerCache(make_layer("raw")).append(new, new, start=start)


def test_values_inside_the_keys_are_stored_once() -> None:
    state = LayerCache(LayerSpec(Raw(), Raw(), KeepAll(), value_dim=6))
    keys = torch.randn(1, 1, 5, 8)
    state.append(keys)
    assert torch.equal(state.read()[1], keys[..., :6])
    clone = LayerCache(make_layer("raw"))
    clone.append(keys, keys)
    assert state.nbytes * 2 == clone.nbytes


def test_values_wider_than_their_keys_are_refused() -> None:
    """Regression: a value_dim beyond the keys gave outputs narrower than the view declared."""
    state = LayerCache(LayerSpec(Raw(), Raw(), KeepAll(), value_dim=9))
    with pytest.raises(ValueError, match=r"9 channels inside keys of 8"):
        state.append(torch.zeros(1, 1, 1, 8))


@pytest.mark.parametrize("text", ["raw", "affine8", "affine8,window=70,sinks=4"])
def test_reset_keeps_memory_and_clear_frees_it(text: str) -> None:
    state = LayerCache(make_layer(text))
    append_rows(state, 200)
    nbytes = state.nbytes
    state.reset()
    assert (state.length, state.held, state.nbytes) == (0, 0, nbytes)
    assert state.read()[0].shape == (1, 1, 0, 8)
    append_rows(state, 100)
    assert read_tags(state)[-2:] == [98, 99]
    state.clear()
    assert (state.length, state.nbytes, state.nbytes_used, state.batch) == (0, 0, 0, 0)


def test_nbytes_used_counts_the_rows_in_the_cache() -> None:
    state = LayerCache(make_layer("raw,sinks=2"))
    append_rows(state, 3, heads=2)
    assert state.nbytes_used == 3 * 2 * 2 * 8 * 4
    assert state.nbytes == 64 * 2 * 2 * 8 * 4


def test_fork_is_independent_both_ways() -> None:
    for text in ("raw,sinks=3", "affine8", "affine8,window=70,sinks=3"):
        state = LayerCache(make_layer(text))
        append_rows(state, 2)
        fork = state.fork()
        append_rows(state, 100)
        fork.append(make_rows(500, 600), make_rows(500, 600))
        assert [read_tags(state)[i] for i in (0, 1, 2, -1)] == [0, 1, 2, 101]
        assert [read_tags(fork)[i] for i in (0, 1, 2, -1)] == [0, 1, 500, 599]


LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, BEGINS = range(6)
NUMBERS = [200, 0, 0, 3, 2, 0]  # of 200 tokens in affine8


def edit_snapshot(**changed: int) -> dict[str, torch.Tensor]:
    numbers = list(NUMBERS)
    for name, number in changed.items():
        numbers[globals()[name]] = number
    return {"numbers": torch.tensor([numbers])}


def make_bad_snapshots() -> dict[str, dict[str, torch.Tensor | None]]:
    return {
        "a negative length": edit_snapshot(LENGTH=-1),
        "a shorter length": edit_snapshot(LENGTH=199),
        "a longer length": edit_snapshot(LENGTH=201),
        "a length beyond counting": edit_snapshot(LENGTH=1 << 62),
        "negative padding": edit_snapshot(PADDING=-1),
        "open pages from elsewhere": edit_snapshot(FIRST_OPEN=1),
        "negative open pages": edit_snapshot(FIRST_OPEN=-1),
        "more open pages than can be": edit_snapshot(FIRST_OPEN=1 << 50),
        "pages from elsewhere": edit_snapshot(FIRST_SEALED=1),
        "negative pages": edit_snapshot(FIRST_SEALED=-1),
        "fewer pages than are due": edit_snapshot(STOP_SEALED=2),
        "more pages than are due": edit_snapshot(STOP_SEALED=4),
        "rows that begin too late": edit_snapshot(BEGINS=5),
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


def test_snapshot_records_the_positions_of_its_pages() -> None:
    """The test below changes these positions."""
    state = LayerCache(make_layer("affine8"))
    append_rows(state, 200)
    tensors = state.snapshot().tensors
    assert tensors["numbers"].tolist() == [NUMBERS]
    assert tensors["keys.codes"].shape == (3, 1, 64, 8)
    assert tensors["keys.open"][:, 0, 0].tolist() == list(range(128, 200))


@pytest.mark.parametrize("change", make_bad_snapshots().values(), ids=make_bad_snapshots())
def test_inconsistent_snapshot_is_refused(
    change: dict[str, torch.Tensor | None],
) -> None:
    state = LayerCache(make_layer("affine8"))
    append_rows(state, 200)
    good = state.snapshot()
    tensors = {n: t for n, t in {**good.tensors, **change}.items() if t is not None}
    other = LayerCache(make_layer("affine8"))
    append_rows(other, 70)
    before = other.snapshot()
    with pytest.raises(SnapshotMismatch):
        other.restore(Snapshot(tensors, {}))
    with pytest.raises(SnapshotMismatch):
        other.restore(Snapshot(good.tensors, {"other": 1}))
    assert_same(before, other.snapshot())


@pytest.mark.parametrize("text", ["affine4", "raw", "affine8,page=128", "affine8,window=9,sinks=1"])
def test_snapshot_of_another_recipe_is_refused(text: str) -> None:
    state = LayerCache(make_layer("affine8"))
    append_rows(state, 200)
    with pytest.raises(SnapshotMismatch):
        LayerCache(make_layer(text)).restore(state.snapshot())


def test_a_snapshot_owns_its_memory() -> None:
    """Regression: a slice used as a snapshot pinned the whole buffer and changed with it."""
    state = LayerCache(make_layer("raw,capacity=1000"))
    append_rows(state, 3)
    snapshot = state.snapshot()
    for tensor in snapshot.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    state.rewind(0)
    state.append(make_rows(70, 73), make_rows(70, 73))
    assert snapshot.tensors["keys.open"][:, 0, 0].tolist() == [0, 1, 2]
