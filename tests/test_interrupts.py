"""Test Ctrl-C between any two instructions: all layers or none; no silent errors afterwards.

The position is counted in instructions of kvant's own frames, so every run is the same.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.tagged import assert_same, forward, make_rows, read_tags
from hf.zoo import build
from kvant import Cache, CacheError, attend, cache_for
from kvant.attention.write_rows import reopen_pages
from kvant.contracts import Snapshot

# Python reports an interrupt in a destructor as a warning.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SPECS = ("raw", "raw,window=70,sinks=3", "affine8,window=70,sinks=0", "affine4,tail=0,step=64")
LENGTH = 2 * 64 + 63  # the next token seals a page and reallocates


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="kvant")


def run_interrupted(action: Callable[[], object], instruction: int | None) -> int:
    """Run `action` with a KeyboardInterrupt before that instruction; return the number run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
            if count == instruction:
                raise KeyboardInterrupt
        return trace

    def entering(frame: FrameType, event: str, argument: Any) -> Any:
        if "/kvant/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(entering)
    try:
        action()
    except KeyboardInterrupt:
        assert instruction is not None
    finally:
        sys.settrace(before)
    return count


def make_filled_cache(text: str) -> Cache:
    cache = Cache(3, text)
    forward(cache, LENGTH - 1)
    forward(cache, 1)
    return cache


@pytest.fixture(params=[50, pytest.param(150, marks=pytest.mark.laws)])
def num_moments(request: pytest.FixtureRequest) -> int:
    """How many instructions of an action are interrupted, one a run."""
    return int(request.param)


def list_moments(total: int, count: int) -> list[int]:
    """Return some of the instructions; of the last ones, which commit, every other."""
    return sorted({*range(1, total, max(1, total // count)), *range(max(1, total - 40), total, 2)})


@pytest.mark.parametrize("text", SPECS)
def test_interrupted_forward_is_in_all_layers_or_in_none(text: str, num_moments: int) -> None:
    start, reference = make_filled_cache(text), make_filled_cache(text)
    forward(reference, 1)
    forward(reference, 70)
    outcomes = set()
    fork = start.fork()
    for instruction in list_moments(run_interrupted(lambda: forward(fork, 1), None), num_moments):
        cache = start.fork()
        run_interrupted(lambda cache=cache: forward(cache, 1), instruction)  # type: ignore[misc]
        length_before = cache.length
        outcomes.add(length_before)
        cache.rollback()
        assert {state.length for state in cache} == {length_before}, instruction
        forward(cache, LENGTH + 1 - length_before)
        forward(cache, 70)
        assert [read_tags(state) for state in cache] == [read_tags(state) for state in reference], (
            instruction
        )
        cache.state.pools.check()
    assert outcomes == {LENGTH, LENGTH + 1}


def test_next_append_completes_the_rollback_too() -> None:
    """Without an explicit check: a loop continues, as in a notebook.

    Regression: a first layer whose append failed before it was counted had its row twice.
    """
    start = make_filled_cache("raw,window=70,sinks=0")
    fork = start.fork()
    for instruction in range(1, run_interrupted(lambda: forward(fork, 1), None) + 1, 7):
        cache = start.fork()
        run_interrupted(lambda cache=cache: forward(cache, 1), instruction)  # type: ignore[misc]
        last = cache.length + 1
        assert last in (LENGTH + 1, LENGTH + 2), instruction
        forward(cache, 1)
        assert {state.length for state in cache} == {last}, instruction
        assert [read_tags(state) for state in cache] == [list(range(last - 70, last))] * 3, (
            instruction
        )


VERBS: dict[str, Callable[[Cache], object]] = {
    "rewind": lambda cache: cache.rewind(LENGTH - 10),
    "reset": lambda cache: cache.reset(),
    "clear": lambda cache: cache.clear(),
    "widen": lambda cache: cache.ensure_slack(40),
    "recode": lambda cache: cache.recode("affine8"),
    "restore": lambda cache: cache.restore(Cache(3, "raw").snapshot()),
}


def tensor_shapes(snapshot: Snapshot) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in snapshot.tensors.items()}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("reads_length", [True, False], ids=["rollback", "append"])
def test_interrupted_operation_applies_to_all_layers_or_none(
    verb: str, reads_length: bool, num_moments: int
) -> None:
    """The next call may be any operation, or an append; `length` reports the result in advance.

    Regression: a completed recode left its spec pending, and the file could not be loaded.
    """
    start, expected_cache = make_filled_cache("raw"), make_filled_cache("raw")
    VERBS[verb](expected_cache)
    before, after = start.snapshot(), expected_cache.snapshot()
    fork = start.fork()
    outcomes = set()
    for instruction in list_moments(run_interrupted(lambda: VERBS[verb](fork), None), num_moments):
        cache = start.fork()
        run_interrupted(lambda cache=cache: VERBS[verb](cache), instruction)  # type: ignore[misc]
        length = cache.length
        if reads_length:
            cache.rollback()
            assert {state.length for state in cache} == {length}, instruction
            snapshot = cache.snapshot()
            acted = tensor_shapes(snapshot) == tensor_shapes(after)
            assert_same(snapshot, after if acted else before)
            outcomes.add(acted)
        forward(cache, 1)
        assert {state.length for state in cache} == {length + 1}, instruction
        assert [read_tags(state) for state in cache] == [list(range(length + 1))] * 3, instruction
        assert [state.spec for state in cache] == list(cache.spec.layers), instruction
        cache.state.pools.check()
        start.state.pools.check()
    assert not reads_length or True in outcomes


def test_refused_operation_is_not_retried() -> None:
    cache = make_filled_cache("raw")
    for refused in (
        lambda: cache.move("nowhere"),
        lambda: cache.rewind(1.5),  # type: ignore[arg-type]
        lambda: cache.ensure_slack("a"),  # type: ignore[arg-type]
        lambda: cache.select([7]),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            refused()
        forward(cache, 1)
    assert [read_tags(state) for state in cache] == [list(range(LENGTH + 4))] * 3


def test_rewind_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one layer was rewound and the others were not."""
    cache, calls = make_filled_cache("affine8"), 0
    before = cache.snapshot()

    def failing(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        reopen_pages(*args)

    monkeypatch.setattr("kvant.cache.transitions.reopen_pages", failing)
    with pytest.raises(MemoryError):
        cache.rewind(100)
    monkeypatch.undo()
    assert_same(before, cache.snapshot())
    cache.rewind(100)
    cache.state.pools.check()
    forward(cache, 1)
    assert [read_tags(state) for state in cache] == [list(range(101))] * 3


def test_model_continues_after_an_interrupted_crop(num_moments: int) -> None:
    """Regression: positions and masks were made for a length that the forward did not find."""
    model, ids = build("llama"), torch.arange(20)[None]
    with torch.no_grad():
        whole = {n: model(torch.cat([ids[:, :n], ids[:, :1]], 1)).logits[0, -1] for n in (15, 20)}
        start = cache_for(model, "raw")
        model(ids, past_key_values=start)
        fork, lengths = start.fork(), set()
        for instruction in list_moments(run_interrupted(lambda: fork.crop(-5), None), num_moments):
            cache = start.fork()
            run_interrupted(lambda cache=cache: cache.crop(-5), instruction)  # type: ignore[misc]
            length = cache.get_seq_length()
            logits = model(ids[:, :1], past_key_values=cache).logits[0, -1]
            torch.testing.assert_close(logits, whole[length], rtol=1e-4, atol=1e-4)
            lengths.add(length)
    assert lengths == {15, 20}


OF_HYBRIDS: dict[str, Callable[[Any], object]] = {
    "crop": lambda cache: cache.crop(-5),
    "select": lambda cache: cache.states.select([1, 0]),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("verb", OF_HYBRIDS)
def test_interrupted_hybrid_applies_to_all_layers_or_none_or_raises(
    verb: str, num_moments: int
) -> None:
    """States held by transformers change one after the other."""
    model, act = build("falcon_h1"), OF_HYBRIDS[verb]
    ids = torch.stack([torch.arange(20), torch.arange(20).flip(0)])

    def logits(cache: Any, tokens: Tensor = ids[:, :1]) -> Tensor:
        actual: Tensor = model(tokens, past_key_values=cache).logits[:, -1]
        return actual

    with torch.no_grad():
        start, outcomes = cache_for(model, "raw"), set[str]()
        logits(start, ids[:, :15])
        start.checkpoint()
        whole = logits(start, ids[:, 15:])
        expected_cache = start.fork()
        act(expected_cache)
        expected = {"old": logits(start.fork()), "new": logits(expected_cache)}
        fork = start.fork()
        total = run_interrupted(lambda: act(fork), None)
        after_the_end = 2 * total
        for instruction in (*list_moments(total, num_moments), after_the_end):
            cache = start.fork()
            cache.state.pools.check()  # recounts slots if the last interrupt left them inconsistent
            run_interrupted(lambda cache=cache: act(cache), instruction)  # type: ignore[misc]
            try:
                actual = logits(cache)
            except CacheError as error:
                assert "or reset" in str(error)
                cache.reset()
                torch.testing.assert_close(logits(cache, ids), whole, rtol=1e-4, atol=1e-4)
                continue
            alike = {
                name
                for name, logits_ in expected.items()
                if torch.allclose(actual, logits_, atol=1e-4)
            }
            assert len(alike) == 1, instruction
            outcomes |= alike
    assert outcomes == {"old", "new"}


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", ["jamba", "falcon_h1", "qwen3_next"])
@torch.no_grad()
def test_failed_first_forward_leaves_no_state(
    name: str, place: int, monkeypatch: pytest.MonkeyPatch, num_moments: int
) -> None:
    """Regression: the next forward used it if its rollback was interrupted."""
    model, ids = build(name), torch.arange(3, 14)[None]

    def dead() -> Any:
        cache = cache_for(model, "raw")
        attending = [i for i, layer in enumerate(cache.layer_info) if layer.attends]
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[attending[place]], "update", None)
            with pytest.raises(TypeError):
                model(ids.flip(1), past_key_values=cache)
        return cache

    def recover(cache: Any) -> None:
        cache.states.rollback()
        next(iter(cache.states.holder.external_states.values())).check_valid()

    def logits(cache: Any) -> Tensor:
        return torch.cat([model(x, past_key_values=cache).logits for x in (ids, ids[:, :1])], 1)

    expected, clone = logits(cache_for(model, "raw")), dead()
    for instruction in list_moments(run_interrupted(lambda: recover(clone), None), num_moments):
        cache = dead()
        run_interrupted(lambda cache=cache: recover(cache), instruction)  # type: ignore[misc]
        try:
            actual = logits(cache)
        except CacheError as error:
            assert name == "falcon_h1" and "no rows came in between" in str(error)
            cache.reset()
            actual = logits(cache)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rewind_to_the_current_length_keeps_state(num_moments: int) -> None:
    """There is no checkpoint: a lost state cannot be restored."""
    model, ids = build("jamba"), torch.arange(3, 14)[None]
    start = cache_for(model, "raw")
    model(ids, past_key_values=start)
    fork = start.fork()
    expected = model(ids[:, :1], past_key_values=start.fork()).logits
    for instruction in list_moments(run_interrupted(lambda: fork.rewind(11), None), num_moments):
        cache = start.fork()
        run_interrupted(lambda cache=cache: cache.rewind(11), instruction)  # type: ignore[misc]
        actual = model(ids[:, :1], past_key_values=cache).logits
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["raw", "affine8,window=70,sinks=0"])
def test_interrupted_select_applies_to_all_layers_or_none(text: str, num_moments: int) -> None:
    start = Cache(3, text)
    for _ in range(2):
        for state in start:
            state.append(make_rows(0, 90, batch=2), make_rows(0, 90, batch=2))
    expected_cache = start.fork()
    expected_cache.select([1, 0])
    before, after = start.snapshot(), expected_cache.snapshot()
    fork, outcomes = start.fork(), set()
    for instruction in list_moments(
        run_interrupted(lambda: fork.select([1, 0]), None), num_moments
    ):
        cache = start.fork()
        run_interrupted(lambda cache=cache: cache.select([1, 0]), instruction)  # type: ignore[misc]
        cache.rollback()
        snapshot = cache.snapshot()
        acted = torch.equal(snapshot.tensors["0/keys.open"], after.tensors["0/keys.open"])
        assert_same(snapshot, after if acted else before)
        outcomes.add(acted)
        for state in cache:
            state.append(make_rows(0, 70, batch=2), make_rows(0, 70, batch=2))
        cache.state.pools.check()
        assert_same(start.snapshot(), before)
    assert outcomes == {True, False}


OF_PROMPTS: dict[str, Callable[[Cache], object]] = {
    "rewind": lambda cache: cache.rewind(290),
    "select": lambda cache: cache.select([0]),
    "move": lambda cache: cache.move("cpu"),
    "prune": lambda cache: cache.prune(),
}


@pytest.mark.parametrize("verb", OF_PROMPTS)
def test_prompt_is_pruned_after_any_interrupt(verb: str, num_moments: int) -> None:
    """Regression: between new page tables and recorded queries the prompt was unknown: it
    stayed whole.
    """
    generator, start = torch.Generator().manual_seed(0), Cache(1, "raw,prune=snapkv:64")
    new = (torch.randn(1, heads, 300, 32, generator=generator) for heads in (6, 3, 3))
    queries, keys, values = new
    attend(queries, start[0].append(keys, values))
    fork, pruned = start.fork(), []
    for act in (lambda cache: None, OF_PROMPTS[verb]):
        expected_cache = start.fork()
        act(expected_cache)
        expected_cache.prune()
        pruned.append(expected_cache.snapshot())
    for instruction in list_moments(
        run_interrupted(lambda: OF_PROMPTS[verb](fork), None), num_moments
    ):
        cache = start.fork()
        run_interrupted(lambda cache=cache: OF_PROMPTS[verb](cache), instruction)  # type: ignore[misc]
        cache.prune()
        assert cache[0].held == 64, instruction
        assert_same(cache.snapshot(), pruned[0 if cache.length == 300 else 1])
        cache.state.pools.check()


@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.laws)])
def test_interrupted_decode_loop_leaves_a_committed_length(count: int) -> None:
    """Real signals at random moments; the loop continues, and its rows are right."""
    rng, hits, cache, tokens = random.Random(0), 0, Cache(8, "raw,window=64,sinks=0"), 0
    longest = 0.004  # seconds; adapts to the machine, so that most waits commit a token

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        while hits < count:
            try:
                # Again after a second: an interrupt of a finalizer is ignored.
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, longest), 1.0)
                while True:
                    forward(cache, 1)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            length = cache.length
            assert length >= tokens, "a committed token is lost"
            longest = min(0.25, longest * (0.95 if length > tokens else 1.2))
            tokens = length
            cache.rollback()
            assert {state.length for state in cache} == {length}
            cache.state.pools.check()
            if length:
                assert [read_tags(state) for state in cache] == [list(range(length))[-64:]] * 8
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert tokens > count // 2
