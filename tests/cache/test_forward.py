"""Test that a forward commits once every layer has its rows, and that a failed forward leaves
nothing.
"""

from __future__ import annotations

import pytest
import torch

from cache.tagged import append_rows, assert_same, forward, make_layer, make_rows, read_tags
from kvant import Cache, CacheError, CacheSpec, CapacityError, RecurrentSpec, SharedSpec
from kvant.pages.storage import Storage

SPECS = (
    "raw",
    "raw,step=1",
    "raw,sinks=3",
    "affine8",
    "affine8,start=60",
    "affine8,window=70,sinks=4",
    "raw,window=20,sinks=3",
    "raw,window=1,sinks=0,slack=0",
)
CHUNKS = (1, 2, 64, 500)  # the last is longer than every window


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="kvant")


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("count", CHUNKS)
@pytest.mark.parametrize("num_appended", [1, 2])
def test_incomplete_forward_leaves_no_row(text: str, count: int, num_appended: int) -> None:
    reference, interrupted = Cache(3, text), Cache(3, text)
    for cache in (reference, interrupted):
        forward(cache, 130)
        forward(cache, 1)
    wrong = make_rows(5000, 5000 + count)
    for index in range(num_appended):
        interrupted[index].append(wrong, wrong)
    assert interrupted.length == 131
    for cache in (reference, interrupted):
        for number in (2, 1, 70):
            forward(cache, number)
    assert_same(reference.snapshot(), interrupted.snapshot())
    assert [read_tags(state) for state in interrupted] == [read_tags(state) for state in reference]
    assert interrupted.stats()["abandoned"] == 1


@pytest.mark.parametrize("text", SPECS)
def test_first_forward_may_be_incomplete(text: str) -> None:
    reference, interrupted = Cache(2, text), Cache(2, text)
    interrupted[0].append(
        make_rows(5000, 5100, batch=2, heads=3), make_rows(5000, 5100, batch=2, heads=3)
    )
    assert interrupted.length == 0
    for cache in (reference, interrupted):
        forward(cache, 5)
        forward(cache, 90)
    assert_same(reference.snapshot(), interrupted.snapshot())


@pytest.mark.parametrize(
    "verb",
    [
        lambda cache: cache.snapshot(),
        lambda cache: cache.rewind(131),
        lambda cache: cache.trim(0),
        lambda cache: cache.checkpoint(),
        lambda cache: cache.select([0]),
        lambda cache: cache.fork(),
    ],
    ids=["snapshot", "rewind", "trim", "checkpoint", "select", "fork"],
)
def test_operations_act_on_committed_tokens(verb) -> None:
    cache = Cache(2, "affine8")
    forward(cache, 131)
    before = cache.snapshot()
    cache[0].append(make_rows(5000, 5100), make_rows(5000, 5100))
    verb(cache)
    assert [state.length for state in cache] == [131, 131]
    assert_same(before, cache.snapshot())


def test_consecutive_incomplete_forwards_are_rolled_back() -> None:
    cache = Cache(3, "affine8,window=70,sinks=0")
    forward(cache, 100)
    before = cache.snapshot()
    for count, num_appended in ((1, 1), (200, 2), (64, 2), (3, 1)):
        forward(cache, count, num_appended=num_appended)
    assert_same(before, cache.snapshot())
    assert cache.stats()["abandoned"] == 4


def test_layers_may_be_appended_to_in_any_order() -> None:
    cache = Cache(4, "raw")
    for order in ([3, 0, 2, 1], [1, 3, 0, 2], [0, 1, 2, 3]):
        place = cache.length
        for index in order:
            cache[index].append(make_rows(place, place + 2), make_rows(place, place + 2))
            assert cache[index].length == place + 2
    assert [read_tags(state) for state in cache] == [list(range(6))] * 4
    assert cache.stats()["abandoned"] == 0


def test_during_a_forward_each_layer_has_its_own_length() -> None:
    cache = Cache(3, "raw")
    forward(cache, 4)
    forward(cache, 2, num_appended=2)
    assert [state.length for state in cache] == [6, 6, 4]
    assert cache.length == 4


def test_view_shows_rows_of_the_open_forward() -> None:
    cache = Cache(2, "raw")
    forward(cache, 4)
    assert forward(cache, 2, num_appended=1)[0].page_table.num_columns == 6


BAD = {
    "heads": (lambda: make_rows(0, 1, heads=2), ValueError),
    "batch": (lambda: make_rows(0, 1, batch=2), ValueError),
    "width": (lambda: make_rows(0, 1, dim=16), ValueError),
    "dtype": (lambda: make_rows(0, 1).half(), ValueError),
    "device": (lambda: make_rows(0, 1).to("meta"), ValueError),
    "dimensions": (lambda: make_rows(0, 1)[0], ValueError),
    "capacity": (lambda: make_rows(0, 500), CapacityError),
}


@pytest.mark.parametrize(("make", "error"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("text", ["raw,capacity=400", "affine8,capacity=400,window=70,sinks=3"])
@pytest.mark.parametrize("index", [0, 1])
def test_failed_append_keeps_committed_tokens(
    make, error: type[Exception], text: str, index: int
) -> None:
    cache = Cache(2, text)
    forward(cache, 200)
    before = cache.snapshot()
    forward(cache, 3, num_appended=index)
    with pytest.raises(error if index == 0 else ValueError):  # the other layer has 3 tokens
        cache[index].append(make(), make())
    assert_same(before, cache.snapshot())
    forward(cache, 1)
    assert [read_tags(state)[-3:] for state in cache] == [[198, 199, 200]] * 2


def test_unsupported_width_keeps_committed_tokens() -> None:
    cache = Cache(2, "raw/affine8")
    with pytest.raises(ValueError, match="12"):
        cache[0].append(make_rows(0, 1), make_rows(0, 1, dim=12))
    assert (cache.length, cache.nbytes) == (0, 0)
    forward(cache, 3)
    assert read_tags(cache[1]) == [0, 1, 2]


def test_codec_failure_while_sealing_keeps_committed_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache(2, "affine8,window=70,sinks=0")
    forward(cache, 100)
    before = cache.snapshot()
    codec = type(cache.spec.layers[0].values)

    def fails(self, rows):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(codec, "seal", fails)
        with pytest.raises(MemoryError):
            cache[0].append(make_rows(100, 300), make_rows(100, 300))
    assert_same(before, cache.snapshot())
    forward(cache, 100)
    assert read_tags(cache[0])[-1] == 199


def test_layer_that_shares_rows_is_appended_to_once() -> None:
    owner = make_layer("raw")
    cache = Cache(None, CacheSpec((owner, owner, SharedSpec(0), SharedSpec(2))))
    assert cache[2] is cache[0] and cache[3] is cache[0]
    for index in (0, 1):
        cache[index].append(make_rows(0, 5), make_rows(0, 5))
    assert cache.length == 5
    assert read_tags(cache[3]) == [0, 1, 2, 3, 4]
    assert cache.nbytes == cache[0].nbytes + cache[1].nbytes
    assert cache.stats()["appends"] == 2


def test_shared_layers_stay_shared_in_a_fork() -> None:
    owner = make_layer("affine8")
    cache = Cache(None, CacheSpec((owner, SharedSpec(0))))
    append_rows(cache[0], 70)
    fork = cache.fork()
    assert fork[1] is fork[0] and fork[0] is not cache[0]
    append_rows(fork[0], 1)
    assert (cache.length, fork.length) == (70, 71)


def test_recurrent_layers_roll_back_with_the_others() -> None:
    cache = Cache(None, CacheSpec((RecurrentSpec(), make_layer("raw"))))
    cache[0].append(3, {"x": torch.full((1, 2), 3.0)})
    append_rows(cache[1], 3)
    cache[0].append(1, {"x": torch.full((1, 2), 9.0)})
    assert cache.length == 3
    cache[0].append(1, {"x": torch.full((1, 2), 4.0)})
    append_rows(cache[1], 1)
    assert (cache.length, cache[0].read()["x"].tolist()) == (4, [[4.0, 4.0]])


def test_layers_with_different_batches_are_not_committed() -> None:
    cache = Cache(2, "raw")
    cache[0].append(make_rows(0, 3, batch=1), make_rows(0, 3, batch=1))
    with pytest.raises(ValueError, match="rows of 3 sequences and 3 tokens, where another"):
        cache[1].append(make_rows(0, 3, batch=3), make_rows(0, 3, batch=3))
    assert (cache.length, cache.batch) == (0, 0)
    forward(cache, 4)
    assert (cache.length, cache.batch) == (4, 1)


def test_layers_of_one_forward_get_equal_token_counts() -> None:
    cache = Cache(2, "raw")
    append_rows(cache[0], 5)
    with pytest.raises(ValueError, match="rows of 1 sequences and 1 tokens, where another"):
        append_rows(cache[1], 1)
    append_rows(cache[1], 5)
    assert [state.length for state in cache] == [5, 5]


def test_different_layer_lengths_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="kvant")
    cache = Cache(None, CacheSpec((make_layer("raw"), make_layer("raw,window=9,sinks=0"))))
    append_rows(cache[0], 5)
    append_rows(cache[1], 1)
    assert "different numbers of tokens: [1, 5]" in caplog.text
    assert [state.length for state in cache] == [5, 1]
    with pytest.raises(CacheError, match="layer 1: 1 tokens, 5 in an earlier layer: rewind"):
        cache.recode("affine8,window=3,sinks=0")
    cache.rewind(1)
    assert [read_tags(state) for state in cache] == [[0], [0]]
    cache.recode("affine8,window=3,sinks=0")
    assert [read_tags(state) for state in cache] == [[0], [0]]


def test_rolled_back_chunk_frees_its_pages() -> None:
    cache = Cache(2, "affine8,window=100,sinks=0")
    forward(cache, 70)
    before = cache.nbytes
    append_rows(cache[0], 3000)
    assert cache.trim(0) == 0
    for _ in range(128):  # with the next sealed page
        forward(cache, 1)
    single = Cache(2, "affine8,window=100,sinks=0")
    for _ in range(198):
        forward(single, 1)
    assert before <= cache.nbytes <= single.nbytes
    cache.state.pools.check()


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("count", CHUNKS)
def test_committed_rows_are_readable_during_a_forward(text: str, count: int) -> None:
    cache, reference = Cache(2, text), Cache(2, text)
    for both_caches in (cache, reference):
        forward(both_caches, 150)
    assert cache.is_complete and not cache[0].has_appended
    forward(cache, count, num_appended=1)
    assert (cache.is_complete, cache[0].has_appended, cache[1].has_appended) == (False, True, False)
    for index in range(2):
        for read, plain in zip(
            cache[index].read(committed=True), reference[index].read(), strict=True
        ):
            assert torch.equal(read, plain)
        if reference[index].held > 10:
            tails = cache[index].read(140, 150, committed=True), reference[index].read(140, 150)
            assert all(map(torch.equal, *tails))
    with pytest.raises(ValueError, match=r"rows \[150, 151\) of 150"):
        cache[0].read(150, 151, committed=True)
    cache.rollback()
    assert cache.is_complete and read_tags(cache[0]) == read_tags(reference[0])


def test_append_plans_cover_all_changed_bytes() -> None:
    cache = Cache(2, "affine8")
    verbs = (
        lambda: forward(cache, 300),
        lambda: forward(cache, 1, num_appended=1),
        lambda: cache.rollback(),
        lambda: cache.recode("raw"),
        lambda: cache.trim(10),
        lambda: cache.restore(cache.snapshot()),
        lambda: cache.select([0, 0]),
        lambda: cache.ensure_slack(64),
        lambda: cache.reset(),
        lambda: cache.clear(),
    )
    for verb in verbs:
        before = cache.holder.num_changes
        verb()
        assert cache.holder.num_changes > before
    before = cache.holder.num_changes
    assert (cache.nbytes, cache.length, cache.stats()["abandoned"]) == (0, 0, 1)
    assert cache.holder.num_changes == before


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_tokens_survive_when_freeing_memory_fails(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise error("no room for a second copy")

    cache = Cache(2, "affine8,tail=0,prefill=stored")
    forward(cache, 190)
    fork = cache.fork()
    forward(fork, 600)
    del fork  # frees many slots
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "relocate_pages", none)
        forward(cache, 140)
    large = cache.nbytes
    assert [read_tags(state) for state in cache] == [list(range(330))] * 2
    cache.state.pools.check()
    forward(cache, 140)
    assert cache.nbytes < large
    assert [read_tags(state) for state in cache] == [list(range(470))] * 2
    cache.state.pools.check()


def test_padding_takes_no_capacity() -> None:
    cache = Cache(1, "raw,capacity=8")
    cache[0].append(*torch.randn(2, 1, 1, 10, 32), start=[2])
    with pytest.raises(CapacityError, match="9 tokens for a capacity of 8"):
        cache[0].append(*torch.randn(2, 1, 1, 1, 32))
