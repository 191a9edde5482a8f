"""Test many sequences by id: content, allocation, eviction and locking."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import pytest
import torch

from cache.tagged import make_rows
from kvant import (
    Cache,
    CacheError,
    CacheSpec,
    CapacityError,
    RecurrentSpec,
    Sequences,
    Shape,
    SpecError,
    UnknownSequence,
    attend,
    parse,
    plan,
)
from kvant.cache.cache import adopt_transition
from kvant.cache.snapshot import parse_snapshot, restore_state

LAYERS = 2
FORMATS = (
    "raw",
    "affine4",
    "turbo4v2",
    "affine4,window=70,sinks=4",
    "raw,step=1",
    "affine8,tail=0",
)
ROW = 2 * 8 * 4  # bytes of a token in one raw layer: 8 channels of float32


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="kvant")


@pytest.fixture
def run_in_thread() -> Iterator[Callable[..., Any]]:
    """Run calls in a long-lived thread and return their result or error."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *args, **named: pool.submit(call, *args, **named).result(30)


def forward(
    sequences: Sequences, name: object, count: int, num_appended: int | None = None
) -> None:
    """Append the next rows of a sequence to every layer, or to the first few."""
    place = sequences.length(name)
    new = make_rows(place, place + count)
    for layer in range(len(sequences.spec.layers) if num_appended is None else num_appended):
        sequences.append(name, layer, new, new)


def read_tags(sequences: Sequences, name: object, layer: int = 0) -> list[int]:
    keys, values = sequences.get(name, layer, 0, sequences.length(name))
    assert torch.equal(keys, values)
    return [round(v) for v in keys[0, 0, :, 0].tolist()] if keys.numel() else []


def make_row_spec(num_layers: int) -> CacheSpec:
    """Allocate memory row by row."""
    return CacheSpec((replace(parse("raw", 1).layers[0], page=1),) * num_layers)


def make_small_sequences(max_tokens: int, **rest: Any) -> Sequences:
    """Return sequences of one layer with a limit of that many tokens, allocated row by row."""
    return Sequences(None, make_row_spec(1), max_tokens * ROW, **rest)


def run_thread(call: Callable[[], Any]) -> None:
    """Run a thread to its end and re-raise its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="the other")
    thread.start()
    thread.join(30)
    assert not errors, errors


# Content.


@pytest.mark.parametrize("text", FORMATS)
def test_sequence_behaves_like_its_own_cache(text: str) -> None:
    sequences, single = Sequences(LAYERS, text), {name: Cache(LAYERS, text) for name in "ab"}
    torch.manual_seed(1)
    for name, count in (("a", 100), ("b", 3), ("a", 1), ("b", 200), ("a", 150)):
        for layer in range(LAYERS):
            k, v = torch.randn(2, 1, 2, count, 32)
            view = sequences.append(name, layer, k, v)
            other = single[name][layer].append(k, v)
            q = torch.randn(1, 4, count, 32)
            assert torch.equal(attend(q, view), attend(q, other))
    for name, cache in single.items():
        assert sequences.length(name) == cache.length
        first = cache.length - 60
        for layer in range(LAYERS):
            for got, want in zip(
                sequences.get(name, layer, first, 60),
                cache[layer].read(first, first + 60),
                strict=True,
            ):
                assert torch.equal(got, want)
    assert sequences.nbytes == sum(cache.nbytes for cache in single.values())


def test_ids_are_tracked() -> None:
    sequences = Sequences(LAYERS, "raw")
    assert (len(sequences), list(sequences), 7 in sequences) == (0, [], False)
    assert (sequences.length(7), sequences.nbytes) == (0, 0)
    cache = sequences.get_or_create(7)
    assert isinstance(cache, Cache) and len(cache) == LAYERS
    assert sequences.get_or_create(7) is cache
    forward(sequences, ("any", "hashable"), 3)
    assert list(sequences) == [7, ("any", "hashable")]
    assert sequences.get_or_create(("any", "hashable")).length == 3


def test_clear_keeps_the_id_and_remove_drops_it() -> None:
    sequences = Sequences(LAYERS, "raw")
    forward(sequences, 1, 5)
    cache = sequences.get_or_create(1)
    sequences.clear(1)
    assert (1 in sequences, sequences.length(1), sequences.nbytes) == (True, 0, 0)
    assert sequences.get_or_create(1) is cache
    forward(sequences, 1, 2)
    sequences.remove(1)
    assert (1 in sequences, sequences.length(1), sequences.nbytes) == (False, 0, 0)
    for verb in (sequences.clear, sequences.remove):
        verb("never there")
    assert len(sequences) == 0


def test_get_returns_a_copy() -> None:
    sequences = Sequences(1, "raw,step=1,window=4,sinks=2")
    forward(sequences, 1, 6)
    keys, _ = sequences.get(1, 0, 2, 4)
    sinks, _ = sequences.get(1, 0, 0, 2)
    copies = keys.clone(), sinks.clone()
    sequences.get_or_create(1).reset()
    sequences.append(1, 0, make_rows(50, 60), make_rows(50, 60))
    assert torch.equal(keys, copies[0]) and torch.equal(sinks, copies[1])
    keys.zero_()
    assert [round(v) for v in sequences.get(1, 0, 8, 2)[0][0, 0, :, 0].tolist()] == [58, 59]


@pytest.mark.parametrize("start, length", [(0, 11), (10, 1), (-1, 2), (3, -1), (11, 0)])
def test_range_out_of_bounds_raises(start: int, length: int) -> None:
    sequences = Sequences(1, "raw")
    forward(sequences, "it", 10)
    with pytest.raises(ValueError, match=r"of sequence 'it': it has 10"):
        sequences.get("it", 0, start, length)
    assert sequences.get("it", 0, 10, 0)[0].shape[2] == 0


def test_unknown_id_raises() -> None:
    sequences = Sequences(1, "raw")
    with pytest.raises(UnknownSequence, match="unknown sequence 7"):
        sequences.get(7, 0, 0, 1)
    assert 7 not in sequences
    sequences.get_or_create(7)
    with pytest.raises(ValueError, match="it has 0"):
        sequences.get(7, 0, 0, 1)


def test_window_evicts_rows() -> None:
    sequences = Sequences(1, "raw,window=10,sinks=0,slack=0")
    for _ in range(40):
        forward(sequences, 1, 1)
    assert [round(v) for v in sequences.get(1, 0, 30, 10)[0][0, 0, :, 0].tolist()] == list(
        range(30, 40)
    )
    with pytest.raises(ValueError, match="the layer holds"):
        sequences.get(1, 0, 0, 10)


@pytest.mark.parametrize("layer", [2, -3, 100])
def test_unknown_layer_raises(layer: int) -> None:
    sequences = Sequences(LAYERS, "raw")
    with pytest.raises(ValueError, match=f"layer {layer} of 2: 0 to 1"):
        sequences.append(1, layer, make_rows(0, 1), make_rows(0, 1))
    with pytest.raises(ValueError, match=f"layer {layer} of 2: 0 to 1"):
        sequences.get(1, layer, 0, 0)
    assert len(sequences) == 0


def test_recurrent_layer_has_its_own_write_operations() -> None:
    spec = CacheSpec((*parse("raw", 1).layers, RecurrentSpec()))
    sequences = Sequences(spec=spec)
    with pytest.raises(ValueError, match=r"layer 1 is recurrent or has several parts: .*writing"):
        sequences.append(1, 1, make_rows(0, 1), make_rows(0, 1))
    with sequences.writing(1) as cache:
        cache[0].append(make_rows(0, 3), make_rows(0, 3))
        cache[1].append(3, {"state": torch.zeros(1, 4)})
    assert sequences.length(1) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"max_bytes": "0 MB"},
        {"patience": -1},
        {"patience": float("nan")},
    ],
)
def test_invalid_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_bytes=|patience="):
        Sequences(1, "raw", **options)
    with pytest.raises(SpecError):
        Sequences(1, "raw", "1 GX")
    with pytest.raises(SpecError, match="cache_for"):
        Sequences(1, "affine8,smooth")


def test_each_sequence_has_its_own_shapes() -> None:
    sequences = Sequences(1, "raw", "1MiB")
    for name, shape in enumerate([(1, 1, 8), (2, 4, 16), (1, 3, 32)]):
        batch, heads, dim = shape
        new = make_rows(0, 5, batch, heads, dim)
        sequences.append(name, 0, new, new)
        sequences.append(name, 0, new.transpose(1, 2), new.transpose(1, 2), order="BTHD")
    with pytest.raises(ValueError, match="for a layer of"):
        sequences.append(0, 0, make_rows(0, 1, 1, 2, 8), make_rows(0, 1, 1, 2, 8))
    sequences.append("padded", 0, make_rows(0, 5, 2), make_rows(0, 5, 2), start=[0, 2])
    assert [sequences.length(name) for name in sequences] == [10, 10, 10, 5]


# Allocation and eviction.


def test_least_recently_used_sequence_is_evicted() -> None:
    sequences = make_small_sequences(30)
    for name in "abc":
        forward(sequences, name, 10)
    sequences.get("a", 0, 0, 1)
    assert list(sequences) == ["b", "c", "a"]
    forward(sequences, "d", 10)
    assert list(sequences) == ["c", "a", "d"]
    sequences.get_or_create("c")
    forward(sequences, "a", 1)  # one token more evicts a whole sequence
    assert list(sequences) == ["c", "a"]
    with sequences.writing("c"):
        pass
    assert list(sequences) == ["a", "c"]
    assert sequences.stats()["evictions"] == 2
    with pytest.raises(UnknownSequence):
        sequences.get("b", 0, 0, 1)
    assert read_tags(sequences, "a") == list(range(11))


def test_no_more_sequences_than_needed_are_evicted() -> None:
    sequences = make_small_sequences(40)
    for name, count in (("a", 10), ("empty", 0), ("b", 10), ("c", 10), ("d", 10)):
        sequences.get_or_create(name)
        forward(sequences, name, count)
    forward(sequences, "e", 11)
    assert list(sequences) == ["empty", "c", "d", "e"]
    assert sequences.nbytes == 31 * ROW


def test_limit_is_exact_to_the_byte() -> None:
    sequences = make_small_sequences(20)
    forward(sequences, "a", 10)
    forward(sequences, "b", 10)
    assert (sequences.nbytes, len(sequences)) == (sequences.max_bytes, 2)
    forward(sequences, "b", 1)
    assert list(sequences) == ["b"]


@pytest.mark.parametrize("name", ["a", "new"])
def test_sequence_larger_than_the_limit_is_refused_and_nothing_changes(name: str) -> None:
    sequences = make_small_sequences(30)
    for other in "ab":
        forward(sequences, other, 10)
    before = list(sequences), sequences.nbytes, sequences.stats()
    with pytest.raises(CapacityError, match=r"needs \d+ bytes.*max_bytes=1920: raise it"):
        forward(sequences, name, 31)
    assert (list(sequences), sequences.nbytes, sequences.stats()) == before
    assert read_tags(sequences, "a") == read_tags(sequences, "b") == list(range(10))


def test_sequences_in_use_or_in_a_forward_are_not_evicted() -> None:
    """Neither for another thread nor for the writing one."""
    sequences = Sequences(None, make_row_spec(2), 40 * ROW)
    forward(sequences, "half", 10, num_appended=1)
    with sequences.writing("held"):
        forward(sequences, "held", 5)
        forward(sequences, "old", 5)

        def other() -> None:
            forward(sequences, "new", 10)
            assert list(sequences) == ["half", "held", "new"]
            with pytest.raises(CapacityError, match=f"{20 * ROW} are in sequences being written"):
                forward(sequences, "new", 1)
            assert list(sequences) == ["half", "held", "new"]

        run_thread(other)
    sequences.append("half", 1, make_rows(0, 10), make_rows(0, 10))
    assert list(sequences) == ["held", "half"]  # "new" was evicted for the other layer
    assert read_tags(sequences, "half", 1) == list(range(10))


def test_direct_use_counts_from_the_next_operation() -> None:
    sequences = make_small_sequences(30)
    forward(sequences, "a", 10)
    forward(sequences, "b", 10)
    cache = sequences.get_or_create("c")
    cache[0].append(make_rows(0, 20), make_rows(0, 20))
    assert sequences.nbytes == 40 * ROW  # exact
    sequences.get("b", 0, 0, 1)
    assert list(sequences) == ["c", "b"]
    sequences.get_or_create("c")[0].append(make_rows(20, 31), make_rows(20, 31))
    sequences.get_or_create("x")  # "c" alone exceeds the limit by now, so it is evicted first
    assert list(sequences) == ["b", "x"]
    sequences.remove("x")
    with sequences.writing("d") as cache_:
        cache_[0].append(make_rows(0, 25), make_rows(0, 25))
    assert list(sequences) == ["d"]
    sequences.get_or_create("d").clear()
    forward(sequences, "b", 30)
    assert list(sequences) == ["d", "b"]
    with pytest.raises(CapacityError), sequences.writing("e") as cache_:
        cache_[0].append(make_rows(0, 31), make_rows(0, 31))
    assert sequences.length("e") == sequences.get_or_create("e").length == 31
    assert sequences.get("e", 0, 30, 1)[0].shape == (1, 1, 1, 8)  # still readable and repairable
    with sequences.writing("e") as cache_:
        cache_.rewind(3)
        cache_.recode(make_row_spec(1))
    assert sequences.nbytes <= 30 * ROW


@pytest.mark.parametrize("text", FORMATS)
def test_limit_holds_during_forwards_of_any_format(text: str) -> None:
    """Chunks longer than every window allocate more until they are committed."""
    whole = Cache(LAYERS, text)
    for layer in range(LAYERS):
        whole[layer].append(make_rows(0, 700, dim=32), make_rows(0, 700, dim=32))
    sequences = Sequences(LAYERS, text, 3 * whole.nbytes)
    generator = random.Random(0)
    for _ in range(60):
        name, count = generator.randrange(5), generator.choice([1, 1, 60, 300])
        new = make_rows(0, count, dim=32)
        for layer in range(LAYERS):
            try:
                sequences.append(name, layer, new, new)
            except CapacityError:
                sequences.clear(name)
                break
            assert sequences.nbytes <= 3 * whole.nbytes
    assert sequences.stats()["evictions"] + sequences.stats()["appends"] > 60


def test_size_measured_during_an_operation_is_measured_again(
    run_in_thread: Callable[..., Any],
) -> None:
    sequences = make_small_sequences(100)
    whole = Cache(spec=sequences.spec)
    whole[0].append(make_rows(0, 50), make_rows(0, 50))
    with sequences.writing("a") as cache:
        cache.rollback()  # first step of every operation;
        run_in_thread(sequences.get_or_create, "b")  # another thread measures all sequences,
        parsed = parse_snapshot(cache.state.layout, {}, whole.snapshot())
        adopt_transition(
            cache.holder, restore_state(cache.state.layout, parsed)
        )  # then the operation continues
    forward(sequences, "c", 60)
    assert list(sequences) == ["b", "c"]


# Locking.


def test_refused_append_creates_no_sequence() -> None:
    sequences = Sequences(1, "raw,capacity=5", "1MiB")
    with pytest.raises(CapacityError, match="capacity of 5"):
        forward(sequences, 1, 6)
    with pytest.raises(ValueError, match="4 dimensions"):
        sequences.append(1, 0, torch.zeros(3), torch.zeros(3))
    assert len(sequences) == 0


def test_one_thread_runs_a_batch_layer_by_layer() -> None:
    sequences, names = Sequences(3, "affine8", "10MiB"), range(8)
    for step in range(3):
        for layer in range(3):
            for name in names:
                new = make_rows(5 * step, 5 * step + 5) + 100 * name
                sequences.append(name, layer, new, new)
    for name in names:
        for layer in range(3):
            assert read_tags(sequences, name, layer) == [100 * name + t for t in range(15)]
    assert sequences.stats()["abandoned"] == 0


def test_other_threads_wait_for_a_complete_forward() -> None:
    sequences, started, requested = Sequences(LAYERS, "raw"), Event(), Event()

    def other() -> None:
        started.wait(30)
        requested.set()
        for layer in range(LAYERS):
            new = make_rows(100, 103)
            sequences.append(1, layer, new, new)

    thread = Thread(target=other)
    thread.start()
    sequences.append(1, 0, make_rows(0, 3), make_rows(0, 3))
    started.set()
    requested.wait(30)
    sequences.append(1, 1, make_rows(0, 3), make_rows(0, 3))
    thread.join(30)
    for layer in range(LAYERS):
        assert read_tags(sequences, 1, layer) == [0, 1, 2, 100, 101, 102]
    assert sequences.stats()["abandoned"] == 0


def test_readers_see_nothing_of_an_open_forward(run_in_thread: Callable[..., Any]) -> None:
    """Evicted rows stay visible, too."""
    sequences = Sequences(LAYERS, "raw,window=10,sinks=0,slack=0")
    forward(sequences, 1, 20)
    forward(sequences, 1, 50, num_appended=1)
    for read in (sequences.get, lambda *args: run_in_thread(sequences.get, *args)):
        keys, _ = read(1, 0, 10, 10)
        assert [round(v) for v in keys[0, 0, :, 0].tolist()] == list(range(10, 20))
        with pytest.raises(ValueError, match="it has 20"):
            read(1, 0, 15, 10)


def test_writers_wait_for_readers(run_in_thread: Callable[..., Any]) -> None:
    sequences = Sequences(1, "raw", patience=0)
    forward(sequences, 1, 3)
    with sequences._table.lock_for_read(1, 0), pytest.raises(CacheError, match="a reader uses it"):
        run_in_thread(forward, sequences, 1, 1)
    run_in_thread(forward, sequences, 1, 1)


def test_lock_timeout_raises(run_in_thread: Callable[..., Any]) -> None:
    sequences = Sequences(LAYERS, "raw", patience=0.05)
    forward(sequences, "it", 3)
    run_in_thread(sequences.append, "it", 0, make_rows(3, 5), make_rows(3, 5))
    for verb in (sequences.clear, sequences.remove, lambda name: forward(sequences, name, 1)):
        with pytest.raises(CacheError, match=r"sequence 'it' is not free.*ThreadPool.*writing"):
            verb("it")
    with (
        pytest.raises(CacheError, match="raise patience"),
        sequences.writing("it"),
    ):
        pass
    assert (
        read_tags(sequences, "it", 0) == read_tags(sequences, "it", 1) == [0, 1, 2]
    )  # committed rows only
    run_in_thread(sequences.append, "it", 1, make_rows(3, 5), make_rows(3, 5))
    assert read_tags(sequences, "it", 1) == [0, 1, 2, 3, 4]
    forward(sequences, "it", 1)


def test_forward_of_a_dead_thread_is_rolled_back() -> None:
    sequences = Sequences(LAYERS, "raw", "1MiB")
    forward(sequences, 1, 3)
    run_thread(lambda: forward(sequences, 1, 5, num_appended=1))
    assert read_tags(sequences, 1, 0) == [0, 1, 2]
    for layer in (1, 0):  # nor do other threads complete it
        sequences.append(1, layer, make_rows(3, 4), make_rows(3, 4))
    assert read_tags(sequences, 1, 0) == read_tags(sequences, 1, 1) == [0, 1, 2, 3]
    assert sequences.stats()["abandoned"] == 1
    run_thread(lambda: forward(sequences, 1, 5, num_appended=1))
    sequences.clear(1)
    assert (sequences.length(1), sequences.nbytes) == (0, 0)


def test_sequences_of_a_dead_thread_can_be_evicted() -> None:
    sequences = Sequences(None, make_row_spec(LAYERS), 20 * ROW)
    run_thread(lambda: forward(sequences, "dead", 15, num_appended=1))
    forward(sequences, "new", 10)
    assert list(sequences) == ["new"]


def test_forward_that_raised_in_writing_is_rolled_back(run_in_thread: Callable[..., Any]) -> None:
    sequences = Sequences(LAYERS, "raw", patience=0)

    def dies() -> None:
        with sequences.writing(1) as cache:
            forward(sequences, 1, 3)
            cache[0].append(make_rows(3, 5), make_rows(3, 5))
            raise KeyError("the model")

    with pytest.raises(KeyError, match="the model"):
        run_in_thread(dies)
    forward(sequences, 1, 1)
    assert read_tags(sequences, 1, 0) == read_tags(sequences, 1, 1) == [0, 1, 2, 3]


def test_writing_excludes_all_other_threads(run_in_thread: Callable[..., Any]) -> None:
    sequences = Sequences(LAYERS, "raw", patience=0)
    with sequences.writing(1), sequences.writing(1) as cache:
        forward(sequences, 1, 3)
        assert read_tags(sequences, 1) == [0, 1, 2]
        for verb in (
            lambda: forward(sequences, 1, 1),
            lambda: sequences.get(1, 0, 0, 1),
            lambda: sequences.remove(1),
        ):
            with pytest.raises(CacheError, match="not free"):
                run_in_thread(verb)
        run_in_thread(forward, sequences, 2, 1)
        assert cache.length == 3
    run_in_thread(forward, sequences, 1, 1)
    assert read_tags(sequences, 1) == [0, 1, 2, 3]


def test_holder_may_remove_its_sequence() -> None:
    sequences = make_small_sequences(20)
    with sequences.writing(1) as cache:
        forward(sequences, 1, 15)
        sequences.remove(1)
        forward(sequences, 1, 20)
        assert cache is not sequences.get_or_create(1)
    assert read_tags(sequences, 1) == list(range(20))


def test_second_forward_of_a_thread_rolls_back_the_first() -> None:
    sequences = Sequences(None, make_row_spec(LAYERS), 2 * 10 * ROW)
    forward(sequences, 1, 10, num_appended=1)
    forward(sequences, 1, 10)
    assert read_tags(sequences, 1, 1) == list(range(10))
    assert sequences.stats()["abandoned"] == 1


# Statistics.


def test_cached_tokens_are_counted_once_per_request() -> None:
    """A conversation of two turns, decoded by appends and by fetching the cache each time."""
    sequences = Sequences(LAYERS, "raw")

    def rate() -> tuple[int, int]:
        stats = sequences.stats()
        assert stats["hit_rate"] == stats["tokens_reused"] / stats["tokens_asked"]
        return stats["tokens_reused"], stats["tokens_asked"]

    sequences.get_or_create(1)
    forward(sequences, 1, 20)
    assert rate() == (0, 20)
    for _ in range(5):
        sequences.get_or_create(1)
        forward(sequences, 1, 1)
    assert rate() == (0, 25)
    sequences.get_or_create(1)
    forward(sequences, 1, 10)
    for _ in range(5):
        forward(sequences, 1, 1)
    assert rate() == (25, 25 + 15 + 25)
    forward(sequences, 2, 35)
    assert rate() == (25, 100)
    sequences.remove(1)
    sequences.clear(2)
    forward(sequences, 2, 3)
    assert rate() == (25, 103)


def test_stats_include_removed_sequences() -> None:
    sequences = Sequences(LAYERS, "affine8,tail=0,step=64", "64KiB")
    empty = sequences.stats()
    assert (empty["efficiency"], empty["average_length"], empty["hit_rate"]) == (0.0, 0.0, 0.0)
    for name in range(20):
        forward(sequences, name, 150)
        for layer in range(LAYERS):
            attend(make_rows(0, 1), sequences.append(name, layer, make_rows(0, 1), make_rows(0, 1)))
    sequences.get_or_create(19).trim(1)
    sequences.get_or_create(19).trim(100)
    sequences.get_or_create(19).recode("raw")
    forward(sequences, 19, 1, num_appended=1)
    sequences.get_or_create(19).rollback()
    sequences.remove(19)
    stats = sequences.stats()
    assert stats["appends"] == 2 * LAYERS * 20 + 1
    assert sum(stats["attended"].values()) == LAYERS * 20
    assert sum(stats["sealed"].values()) == 2 * 2 * LAYERS * 20
    assert (stats["rewinds_exact"], stats["rewinds_decoded"]) == (LAYERS, LAYERS)
    assert (stats["recodes"], stats["abandoned"]) == (1, 1)
    assert stats["evictions"] == 20 - 1 - stats["sequences"] > 0
    assert stats["average_length"] == 151
    caches = [sequences.get_or_create(name) for name in sequences]
    assert stats["nbytes"] == sequences.nbytes == sum(cache.nbytes for cache in caches)
    assert stats["nbytes_used"] == sum(cache.nbytes_used for cache in caches)
    assert stats["efficiency"] == stats["nbytes_used"] / stats["nbytes"]


# Many threads.

THREADS = 8


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


SHARED = tuple(f"shared {i}" for i in range(4))


def make_tagged_rows(owner: int, layer: int, start: int, stop: int) -> torch.Tensor:
    """Return rows whose channels encode their owner, layer and position."""
    new = torch.empty(1, 1, stop - start, 4)
    for channel, value in enumerate((owner, layer, torch.arange(start, stop), owner ^ layer)):
        new[..., channel] = value
    return new


def check_rows(
    sequences: Sequences, name: str, owner: int, layer: int, random_: random.Random
) -> int:
    """Check that the rows belong to the sequence and its positions; return their number."""
    length = sequences.length(name)
    start = random_.randint(max(0, length - 35), length)  # within every window here
    try:
        keys, values = sequences.get(name, layer, start, length - start)
    except UnknownSequence:
        return 0
    except ValueError:  # another thread appended to it or cleared it
        assert name in SHARED
        return 0
    if length > start:
        expected = make_tagged_rows(owner, layer, start, length)
        assert torch.equal(keys, expected) and torch.equal(values, -expected)
    return length - start


def run_random_operations(sequences: Sequences, number: int, rounds: int) -> Counter[str]:
    """Run random forwards, reads, clears and removes on private and shared sequences."""
    generator, counts = random.Random(number), Counter[str]()
    private_ids = [f"own {number} {i}" for i in range(3)]
    owners = {name: 10 * number + i for i, name in enumerate(private_ids)}
    owners |= {name: 500 + i for i, name in enumerate(SHARED)}
    for _ in range(rounds):
        name = generator.choice((*private_ids, *SHARED))
        operation = generator.choices(("forward", "get", "clear", "remove"), (10, 8, 1, 1))[0]
        counts[operation] += 1
        if operation == "forward":
            count = generator.choice((1, 1, 1, 30))
            try:
                with sequences.writing(name) as cache:
                    place = cache.length
                    for layer in range(LAYERS):
                        new = make_tagged_rows(owners[name], layer, place, place + count)
                        sequences.append(name, layer, new, -new)
                counts["tokens"] += count
            except CapacityError:
                counts["refused"] += 1
        elif operation == "get":
            counts["read"] += check_rows(
                sequences, name, owners[name], generator.randrange(2), generator
            )
        else:
            getattr(sequences, operation)(name)
        assert sequences.nbytes <= (sequences.max_bytes or 0)
    return counts


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("raw,step=16", 150),
        ("raw,window=40,sinks=2,slack=4", 100),
        pytest.param("raw,step=16", 500, marks=pytest.mark.laws),
        pytest.param("raw,window=40,sinks=2,slack=4", 250, marks=pytest.mark.laws),
    ],
)
def test_eight_threads_lose_no_row_and_read_no_foreign_row(
    text: str, rounds: int, switch_often: None
) -> None:
    sequences = Sequences(LAYERS, text, "24KiB")
    with ThreadPoolExecutor(THREADS) as pool:
        shares = pool.map(
            lambda number: run_random_operations(sequences, number, rounds), range(THREADS)
        )
        counts = sum(shares, Counter[str]())
    stats = sequences.stats()
    assert (
        sum(counts[operation] for operation in ("forward", "get", "clear", "remove"))
        == THREADS * rounds
    )
    # A refused forward may have reached the first layer, and was rolled back.
    assert stats["appends"] == LAYERS * (counts["forward"] - counts["refused"]) + stats["abandoned"]
    assert stats["tokens_asked"] - stats["tokens_reused"] == counts["tokens"]
    assert stats["evictions"] and counts["read"] and stats["abandoned"] <= counts["refused"]
    caches = {name: sequences.get_or_create(name) for name in sequences}
    assert stats["sequences"] == len(caches)
    assert sequences.nbytes == sum(cache.nbytes for cache in caches.values())
    shape = Shape(LAYERS, 1, 4, 4, torch.float32)
    for name, cache in caches.items():
        assert cache.nbytes in (0, plan(shape, text, context=cache.length).nbytes), name
