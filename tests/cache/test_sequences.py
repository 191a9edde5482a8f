"""Many sequences by id: what they hold, what they take, who goes, and who waits for whom."""

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

from cache.tagged import rows
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

LAYERS = 2
FORMATS = (
    "raw",
    "affine4",
    "turbo4v2",
    "affine4,window=70,sinks=4",
    "raw,step=1",
    "affine8,tail=0",
)
ROW = 2 * 8 * 4  # bytes that a token takes in one raw layer: 8 channels of float32


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="kvant")


@pytest.fixture
def apart() -> Iterator[Callable[..., Any]]:
    """Calls in a thread that goes on living, and their result or error."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *given, **named: pool.submit(call, *given, **named).result(30)


def forward(sequences: Sequences, name: object, count: int, upto: int | None = None) -> None:
    """The next rows of a sequence, in every layer or the first few of them."""
    place = sequences.length(name)
    new = rows(place, place + count)
    for layer in range(len(sequences.spec.layers) if upto is None else upto):
        sequences.append(name, layer, new, new)


def told(sequences: Sequences, name: object, layer: int = 0) -> list[int]:
    keys, values = sequences.get(name, layer, 0, sequences.length(name))
    assert torch.equal(keys, values)
    return [round(v) for v in keys[0, 0, :, 0].tolist()] if keys.numel() else []


def by_row(num_layers: int) -> CacheSpec:
    """Memory is taken row by row."""
    return CacheSpec((replace(parse("raw", 1).layers[0], page=1),) * num_layers)


def small(max_tokens: int, **rest: Any) -> Sequences:
    """Room for so many tokens of one layer, which takes memory row by row."""
    return Sequences(None, by_row(1), max_tokens * ROW, **rest)


def in_a_thread(call: Callable[[], Any]) -> None:
    """Begin and end a thread; an error in it is one here."""
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


# What they hold.


@pytest.mark.parametrize("text", FORMATS)
def test_a_sequence_is_a_cache_of_its_own(text: str) -> None:
    sequences, alone = Sequences(LAYERS, text), {name: Cache(LAYERS, text) for name in "ab"}
    torch.manual_seed(1)
    for name, count in (("a", 100), ("b", 3), ("a", 1), ("b", 200), ("a", 150)):
        for layer in range(LAYERS):
            k, v = torch.randn(2, 1, 2, count, 32)
            view = sequences.append(name, layer, k, v)
            other = alone[name][layer].append(k, v)
            q = torch.randn(1, 4, count, 32)
            assert torch.equal(attend(q, view), attend(q, other))
    for name, cache in alone.items():
        assert sequences.length(name) == cache.length
        first = cache.length - 60
        for layer in range(LAYERS):
            for got, want in zip(
                sequences.get(name, layer, first, 60),
                cache[layer].read(first, first + 60),
                strict=True,
            ):
                assert torch.equal(got, want)
    assert sequences.nbytes == sum(cache.nbytes for cache in alone.values())


def test_the_books_of_ids() -> None:
    sequences = Sequences(LAYERS, "raw")
    assert (len(sequences), list(sequences), 7 in sequences) == (0, [], False)
    assert (sequences.length(7), sequences.nbytes) == (0, 0)
    cache = sequences.get_or_create(7)
    assert isinstance(cache, Cache) and len(cache) == LAYERS
    assert sequences.get_or_create(7) is cache
    forward(sequences, ("any", "hashable"), 3)
    assert list(sequences) == [7, ("any", "hashable")]
    assert sequences.get_or_create(("any", "hashable")).length == 3


def test_clear_keeps_the_id_and_remove_does_not() -> None:
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


def test_what_get_gives_is_a_copy() -> None:
    sequences = Sequences(1, "raw,step=1,window=4,sinks=2")
    forward(sequences, 1, 6)
    keys, _ = sequences.get(1, 0, 2, 4)
    sinks, _ = sequences.get(1, 0, 0, 2)
    kept = keys.clone(), sinks.clone()
    sequences.get_or_create(1).reset()
    sequences.append(1, 0, rows(50, 60), rows(50, 60))
    assert torch.equal(keys, kept[0]) and torch.equal(sinks, kept[1])
    keys.zero_()
    assert [round(v) for v in sequences.get(1, 0, 8, 2)[0][0, 0, :, 0].tolist()] == [58, 59]


@pytest.mark.parametrize("start, length", [(0, 11), (10, 1), (-1, 2), (3, -1), (11, 0)])
def test_a_range_that_is_not_there_is_an_error(start: int, length: int) -> None:
    sequences = Sequences(1, "raw")
    forward(sequences, "it", 10)
    with pytest.raises(ValueError, match=r"of sequence 'it': it has 10"):
        sequences.get("it", 0, start, length)
    assert sequences.get("it", 0, 10, 0)[0].shape[2] == 0


def test_an_id_that_is_not_there_is_an_error() -> None:
    sequences = Sequences(1, "raw")
    with pytest.raises(UnknownSequence, match="sequence 7 is not there"):
        sequences.get(7, 0, 0, 1)
    assert 7 not in sequences
    sequences.get_or_create(7)
    with pytest.raises(ValueError, match="it has 0"):
        sequences.get(7, 0, 0, 1)


def test_a_window_lets_rows_go() -> None:
    sequences = Sequences(1, "raw,window=10,sinks=0,slack=0")
    for _ in range(40):
        forward(sequences, 1, 1)
    assert [round(v) for v in sequences.get(1, 0, 30, 10)[0][0, 0, :, 0].tolist()] == list(
        range(30, 40)
    )
    with pytest.raises(ValueError, match="the layer holds"):
        sequences.get(1, 0, 0, 10)


@pytest.mark.parametrize("layer", [2, -3, 100])
def test_a_layer_that_is_not_there_is_an_error(layer: int) -> None:
    sequences = Sequences(LAYERS, "raw")
    with pytest.raises(ValueError, match=f"layer {layer} of 2: 0 to 1"):
        sequences.append(1, layer, rows(0, 1), rows(0, 1))
    with pytest.raises(ValueError, match=f"layer {layer} of 2: 0 to 1"):
        sequences.get(1, layer, 0, 0)
    assert len(sequences) == 0


def test_a_recurrence_is_written_to_by_its_own_verbs() -> None:
    spec = CacheSpec((*parse("raw", 1).layers, RecurrentSpec()))
    sequences = Sequences(spec=spec)
    with pytest.raises(ValueError, match=r"layer 1 has no rows: .*writing"):
        sequences.append(1, 1, rows(0, 1), rows(0, 1))
    with sequences.writing(1) as cache:
        cache[0].append(rows(0, 3), rows(0, 3))
        cache[1].append(3, {"state": torch.zeros(1, 4)})
    assert sequences.length(1) == 3


@pytest.mark.parametrize(
    "given",
    [
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"max_bytes": "0 MB"},
        {"patience": -1},
        {"patience": float("nan")},
    ],
)
def test_limits_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_bytes=|patience="):
        Sequences(1, "raw", **given)
    with pytest.raises(SpecError):
        Sequences(1, "raw", "1 GX")
    with pytest.raises(SpecError, match="cache_for"):
        Sequences(1, "affine8,smooth")


def test_each_sequence_has_shapes_of_its_own() -> None:
    sequences = Sequences(1, "raw", "1MiB")
    for name, shape in enumerate([(1, 1, 8), (2, 4, 16), (1, 3, 32)]):
        batch, heads, dim = shape
        new = rows(0, 5, batch, heads, dim)
        sequences.append(name, 0, new, new)
        sequences.append(name, 0, new.transpose(1, 2), new.transpose(1, 2), order="BTHD")
    with pytest.raises(ValueError, match="for a layer of"):
        sequences.append(0, 0, rows(0, 1, 1, 2, 8), rows(0, 1, 1, 2, 8))
    sequences.append("padded", 0, rows(0, 5, 2), rows(0, 5, 2), start=[0, 2])
    assert [sequences.length(name) for name in sequences] == [10, 10, 10, 5]


# What they take, and who goes.


def test_the_least_recently_used_goes() -> None:
    sequences = small(30)
    for name in "abc":
        forward(sequences, name, 10)
    sequences.get("a", 0, 0, 1)
    assert list(sequences) == ["b", "c", "a"]
    forward(sequences, "d", 10)
    assert list(sequences) == ["c", "a", "d"]
    sequences.get_or_create("c")
    forward(sequences, "a", 1)  # one token more, and a whole sequence goes
    assert list(sequences) == ["c", "a"]
    with sequences.writing("c"):
        pass
    assert list(sequences) == ["a", "c"]
    assert sequences.stats()["evictions"] == 2
    with pytest.raises(UnknownSequence):
        sequences.get("b", 0, 0, 1)
    assert told(sequences, "a") == list(range(11))


def test_as_few_go_as_are_needed() -> None:
    sequences = small(40)
    for name, count in (("a", 10), ("empty", 0), ("b", 10), ("c", 10), ("d", 10)):
        sequences.get_or_create(name)
        forward(sequences, name, count)
    forward(sequences, "e", 11)
    assert list(sequences) == ["empty", "c", "d", "e"]
    assert sequences.nbytes == 31 * ROW


def test_the_limit_is_the_last_byte() -> None:
    sequences = small(20)
    forward(sequences, "a", 10)
    forward(sequences, "b", 10)
    assert (sequences.nbytes, len(sequences)) == (sequences.max_bytes, 2)
    forward(sequences, "b", 1)
    assert list(sequences) == ["b"]


@pytest.mark.parametrize("name", ["a", "new"])
def test_one_that_alone_does_not_fit_is_refused_and_nothing_changes(name: str) -> None:
    sequences = small(30)
    for other in "ab":
        forward(sequences, other, 10)
    before = list(sequences), sequences.nbytes, sequences.stats()
    with pytest.raises(CapacityError, match=r"needs \d+ bytes.*max_bytes=1920.*give more"):
        forward(sequences, name, 31)
    assert (list(sequences), sequences.nbytes, sequences.stats()) == before
    assert told(sequences, "a") == told(sequences, "b") == list(range(10))


def test_a_forward_under_way_is_not_evicted_nor_is_one_that_is_held() -> None:
    """Neither for another thread nor for the one that writes."""
    sequences = Sequences(None, by_row(2), 40 * ROW)
    forward(sequences, "half", 10, upto=1)
    with sequences.writing("held"):
        forward(sequences, "held", 5)
        forward(sequences, "old", 5)

        def other() -> None:
            forward(sequences, "new", 10)
            assert list(sequences) == ["half", "held", "new"]
            with pytest.raises(CapacityError, match=f"{20 * ROW} are in others"):
                forward(sequences, "new", 1)
            assert list(sequences) == ["half", "held", "new"]

        in_a_thread(other)
    sequences.append("half", 1, rows(0, 10), rows(0, 10))
    assert list(sequences) == ["held", "half"]  # "new" went for the other layer
    assert told(sequences, "half", 1) == list(range(10))


def test_direct_use_counts_from_the_next_operation_on() -> None:
    sequences = small(30)
    forward(sequences, "a", 10)
    forward(sequences, "b", 10)
    cache = sequences.get_or_create("c")
    cache[0].append(rows(0, 20), rows(0, 20))
    assert sequences.nbytes == 40 * ROW  # the truth
    sequences.get("b", 0, 0, 1)
    assert list(sequences) == ["c", "b"]
    sequences.get_or_create("c")[0].append(rows(20, 31), rows(20, 31))
    sequences.get_or_create("x")  # "c" alone is too much by now, so it goes first
    assert list(sequences) == ["b", "x"]
    sequences.remove("x")
    with sequences.writing("d") as held:
        held[0].append(rows(0, 25), rows(0, 25))
    assert list(sequences) == ["d"]
    sequences.get_or_create("d").clear()
    forward(sequences, "b", 30)
    assert list(sequences) == ["d", "b"]
    with pytest.raises(CapacityError), sequences.writing("e") as held:
        held[0].append(rows(0, 31), rows(0, 31))
    assert sequences.length("e") == sequences.get_or_create("e").length == 31
    assert sequences.get("e", 0, 30, 1)[0].shape == (1, 1, 1, 8)  # it can be read, and mended
    with sequences.writing("e") as held:
        held.rewind(3)
        held.recode(by_row(1))
    assert sequences.nbytes <= 30 * ROW


@pytest.mark.parametrize("text", FORMATS)
def test_the_limit_holds_amid_forwards_of_any_format(text: str) -> None:
    """Chunks longer than every window take more until they are committed."""
    whole = Cache(LAYERS, text)
    for layer in range(LAYERS):
        whole[layer].append(rows(0, 700, dim=32), rows(0, 700, dim=32))
    sequences = Sequences(LAYERS, text, 3 * whole.nbytes)
    generator = random.Random(0)
    for _ in range(60):
        name, count = generator.randrange(5), generator.choice([1, 1, 60, 300])
        new = rows(0, count, dim=32)
        for layer in range(LAYERS):
            try:
                sequences.append(name, layer, new, new)
            except CapacityError:
                sequences.clear(name)
                break
            assert sequences.nbytes <= 3 * whole.nbytes
    assert sequences.stats()["evictions"] + sequences.stats()["appends"] > 60


def test_what_was_weighed_amid_a_verb_is_weighed_again(apart: Callable[..., Any]) -> None:
    sequences = small(100)
    whole = Cache(spec=sequences.spec)
    whole[0].append(rows(0, 50), rows(0, 50))
    with sequences.writing("a") as cache:
        cache.rollback()  # as every verb begins;
        apart(sequences.get_or_create, "b")  # another thread looks at all of them,
        cache._adopt_snapshot(cache.spec, whole.snapshot())  # and the verb goes on
    forward(sequences, "c", 60)
    assert list(sequences) == ["b", "c"]


# Who waits for whom.


def test_a_wrong_append_leaves_no_new_sequence() -> None:
    sequences = Sequences(1, "raw,capacity=5", "1MiB")
    with pytest.raises(CapacityError, match="capacity of 5"):
        forward(sequences, 1, 6)
    with pytest.raises(ValueError, match="4 dimensions"):
        sequences.append(1, 0, torch.zeros(3), torch.zeros(3))
    assert len(sequences) == 0


def test_one_thread_goes_layer_by_layer_through_a_batch() -> None:
    sequences, names = Sequences(3, "affine8", "10MiB"), range(8)
    for step in range(3):
        for layer in range(3):
            for name in names:
                new = rows(5 * step, 5 * step + 5) + 100 * name
                sequences.append(name, layer, new, new)
    for name in names:
        for layer in range(3):
            assert told(sequences, name, layer) == [100 * name + t for t in range(15)]
    assert sequences.stats()["abandoned"] == 0


def test_another_thread_waits_until_a_forward_is_whole() -> None:
    sequences, begun, asked = Sequences(LAYERS, "raw"), Event(), Event()

    def other() -> None:
        begun.wait(30)
        asked.set()
        for layer in range(LAYERS):
            new = rows(100, 103)
            sequences.append(1, layer, new, new)

    thread = Thread(target=other)
    thread.start()
    sequences.append(1, 0, rows(0, 3), rows(0, 3))
    begun.set()
    asked.wait(30)
    sequences.append(1, 1, rows(0, 3), rows(0, 3))
    thread.join(30)
    for layer in range(LAYERS):
        assert told(sequences, 1, layer) == [0, 1, 2, 100, 101, 102]
    assert sequences.stats()["abandoned"] == 0


def test_who_reads_sees_nothing_of_a_forward_under_way(apart: Callable[..., Any]) -> None:
    """Not even that it lets rows go."""
    sequences = Sequences(LAYERS, "raw,window=10,sinks=0,slack=0")
    forward(sequences, 1, 20)
    forward(sequences, 1, 50, upto=1)
    for read in (sequences.get, lambda *given: apart(sequences.get, *given)):
        keys, _ = read(1, 0, 10, 10)
        assert [round(v) for v in keys[0, 0, :, 0].tolist()] == list(range(10, 20))
        with pytest.raises(ValueError, match="it has 20"):
            read(1, 0, 15, 10)


def test_who_writes_waits_for_who_reads(apart: Callable[..., Any]) -> None:
    sequences = Sequences(1, "raw", patience=0)
    forward(sequences, 1, 3)
    with sequences._table.lock_for_read(1), pytest.raises(CacheError, match="a reader is at it"):
        apart(forward, sequences, 1, 1)
    apart(forward, sequences, 1, 1)


def test_patience_ends(apart: Callable[..., Any]) -> None:
    sequences = Sequences(LAYERS, "raw", patience=0.05)
    forward(sequences, "it", 3)
    apart(sequences.append, "it", 0, rows(3, 5), rows(3, 5))
    for verb in (sequences.clear, sequences.remove, lambda name: forward(sequences, name, 1)):
        with pytest.raises(CacheError, match=r"sequence 'it' is not free.*ThreadPool.*writing"):
            verb("it")
    with (
        pytest.raises(CacheError, match="more patience"),
        sequences.writing("it"),
    ):
        pass
    assert told(sequences, "it", 0) == told(sequences, "it", 1) == [0, 1, 2]  # what is committed
    apart(sequences.append, "it", 1, rows(3, 5), rows(3, 5))
    assert told(sequences, "it", 1) == [0, 1, 2, 3, 4]
    forward(sequences, "it", 1)


def test_the_forward_of_a_dead_thread_is_taken_back() -> None:
    sequences = Sequences(LAYERS, "raw", "1MiB")
    forward(sequences, 1, 3)
    in_a_thread(lambda: forward(sequences, 1, 5, upto=1))
    assert told(sequences, 1, 0) == [0, 1, 2]
    for layer in (1, 0):  # nor is it completed by others
        sequences.append(1, layer, rows(3, 4), rows(3, 4))
    assert told(sequences, 1, 0) == told(sequences, 1, 1) == [0, 1, 2, 3]
    assert sequences.stats()["abandoned"] == 1
    in_a_thread(lambda: forward(sequences, 1, 5, upto=1))
    sequences.clear(1)
    assert (sequences.length(1), sequences.nbytes) == (0, 0)


def test_what_a_dead_thread_left_can_be_evicted() -> None:
    sequences = Sequences(None, by_row(LAYERS), 20 * ROW)
    in_a_thread(lambda: forward(sequences, "dead", 15, upto=1))
    forward(sequences, "new", 10)
    assert list(sequences) == ["new"]


def test_a_forward_that_raised_within_writing_is_taken_back(apart: Callable[..., Any]) -> None:
    sequences = Sequences(LAYERS, "raw", patience=0)

    def dies() -> None:
        with sequences.writing(1) as cache:
            forward(sequences, 1, 3)
            cache[0].append(rows(3, 5), rows(3, 5))
            raise KeyError("the model")

    with pytest.raises(KeyError, match="the model"):
        apart(dies)
    forward(sequences, 1, 1)
    assert told(sequences, 1, 0) == told(sequences, 1, 1) == [0, 1, 2, 3]


def test_writing_keeps_all_others_away(apart: Callable[..., Any]) -> None:
    sequences = Sequences(LAYERS, "raw", patience=0)
    with sequences.writing(1), sequences.writing(1) as cache:
        forward(sequences, 1, 3)
        assert told(sequences, 1) == [0, 1, 2]
        for verb in (
            lambda: forward(sequences, 1, 1),
            lambda: sequences.get(1, 0, 0, 1),
            lambda: sequences.remove(1),
        ):
            with pytest.raises(CacheError, match="not free"):
                apart(verb)
        apart(forward, sequences, 2, 1)
        assert cache.length == 3
    apart(forward, sequences, 1, 1)
    assert told(sequences, 1) == [0, 1, 2, 3]


def test_a_sequence_may_be_removed_by_who_holds_it() -> None:
    sequences = small(20)
    with sequences.writing(1) as cache:
        forward(sequences, 1, 15)
        sequences.remove(1)
        forward(sequences, 1, 20)
        assert cache is not sequences.get_or_create(1)
    assert told(sequences, 1) == list(range(20))


def test_a_second_forward_of_the_same_thread_takes_back_the_first() -> None:
    sequences = Sequences(None, by_row(LAYERS), 2 * 10 * ROW)
    forward(sequences, 1, 10, upto=1)
    forward(sequences, 1, 10)
    assert told(sequences, 1, 1) == list(range(10))
    assert sequences.stats()["abandoned"] == 1


# What is told of them.


def test_what_was_there_already_is_counted_once_a_request() -> None:
    """A conversation of two turns, decoded by appends and by asking for the cache each time."""
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


def test_stats_tell_of_those_that_are_gone_too() -> None:
    sequences = Sequences(LAYERS, "affine8,tail=0,step=64", "64KiB")
    empty = sequences.stats()
    assert (empty["efficiency"], empty["average_length"], empty["hit_rate"]) == (0.0, 0.0, 0.0)
    for name in range(20):
        forward(sequences, name, 150)
        for layer in range(LAYERS):
            attend(rows(0, 1), sequences.append(name, layer, rows(0, 1), rows(0, 1)))
    sequences.get_or_create(19).trim(1)
    sequences.get_or_create(19).trim(100)
    sequences.get_or_create(19).recode("raw")
    forward(sequences, 19, 1, upto=1)
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
def hasty() -> Iterator[None]:
    """Threads change places all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


SHARED = tuple(f"shared {i}" for i in range(4))


def tagged(owner: int, layer: int, start: int, stop: int) -> torch.Tensor:
    """Rows whose channels say whose they are, of which layer and position."""
    new = torch.empty(1, 1, stop - start, 4)
    for channel, value in enumerate((owner, layer, torch.arange(start, stop), owner ^ layer)):
        new[..., channel] = value
    return new


def check(sequences: Sequences, name: str, owner: int, layer: int, random_: random.Random) -> int:
    """Rows of a sequence are its own, at their places; how many there were."""
    length = sequences.length(name)
    start = random_.randint(max(0, length - 35), length)  # what every window here has
    try:
        keys, values = sequences.get(name, layer, start, length - start)
    except UnknownSequence:
        return 0
    except ValueError:  # others went on with it, or cleared it
        assert name in SHARED
        return 0
    if length > start:
        expected = tagged(owner, layer, start, length)
        assert torch.equal(keys, expected) and torch.equal(values, -expected)
    return length - start


def work(sequences: Sequences, number: int, rounds: int) -> Counter[str]:
    """One thread's share: forwards, reads, clears and removes of own and shared sequences."""
    generator, done = random.Random(number), Counter[str]()
    own = [f"own {number} {i}" for i in range(3)]
    owners = {name: 10 * number + i for i, name in enumerate(own)}
    owners |= {name: 500 + i for i, name in enumerate(SHARED)}
    for _ in range(rounds):
        name = generator.choice((*own, *SHARED))
        kind = generator.choices(("forward", "get", "clear", "remove"), (10, 8, 1, 1))[0]
        done[kind] += 1
        if kind == "forward":
            count = generator.choice((1, 1, 1, 30))
            try:
                with sequences.writing(name) as cache:
                    place = cache.length
                    for layer in range(LAYERS):
                        new = tagged(owners[name], layer, place, place + count)
                        sequences.append(name, layer, new, -new)
                done["tokens"] += count
            except CapacityError:
                done["refused"] += 1
        elif kind == "get":
            done["read"] += check(sequences, name, owners[name], generator.randrange(2), generator)
        else:
            getattr(sequences, kind)(name)
        assert sequences.nbytes <= (sequences.max_bytes or 0)
    return done


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("raw,step=16", 150),
        ("raw,window=40,sinks=2,slack=4", 100),
        pytest.param("raw,step=16", 500, marks=pytest.mark.laws),
        pytest.param("raw,window=40,sinks=2,slack=4", 250, marks=pytest.mark.laws),
    ],
)
def test_eight_threads_lose_no_row_and_read_no_foreign_one(
    text: str, rounds: int, hasty: None
) -> None:
    sequences = Sequences(LAYERS, text, "24KiB")
    with ThreadPoolExecutor(THREADS) as pool:
        shares = pool.map(lambda number: work(sequences, number, rounds), range(THREADS))
        done = sum(shares, Counter[str]())
    stats = sequences.stats()
    assert sum(done[kind] for kind in ("forward", "get", "clear", "remove")) == THREADS * rounds
    # A forward that was refused may have come to the first layer, and was taken back.
    assert stats["appends"] == LAYERS * (done["forward"] - done["refused"]) + stats["abandoned"]
    assert stats["tokens_asked"] - stats["tokens_reused"] == done["tokens"]
    assert stats["evictions"] and done["read"] and stats["abandoned"] <= done["refused"]
    caches = {name: sequences.get_or_create(name) for name in sequences}
    assert stats["sequences"] == len(caches)
    assert sequences.nbytes == sum(cache.nbytes for cache in caches.values())
    shape = Shape(LAYERS, 1, 4, 4, torch.float32)
    for name, cache in caches.items():
        assert cache.nbytes in (0, plan(shape, text, context=cache.length).nbytes), name
