"""Ctrl-C between any two instructions: all layers or none; nothing is silently wrong afterwards.

Where it comes is counted in the instructions that kvant's own frames run, so every run is the same.
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

from cache.tagged import forward, rows, same, told
from hf.zoo import build
from kvant import Cache, CacheError, attend, cache_for
from kvant.attention.write_rows import reopen_pages
from kvant.contracts import Snapshot

# Python says where an interrupt struck the end of a cache that nobody holds, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SPECS = ("raw", "raw,window=70,sinks=3", "affine8,window=70,sinks=0", "affine4,tail=0,step=64")
LENGTH = 2 * 64 + 63  # a page falls due, and memory grows, with the next token


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="kvant")


def interrupted(action: Callable[[], object], at: int | None) -> int:
    """Run it with a KeyboardInterrupt before that instruction; how many were run."""
    count = 0

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return within

    def entering(frame: FrameType, event: str, argument: Any) -> Any:
        if "/kvant/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return within

    before = sys.gettrace()
    sys.settrace(entering)
    try:
        action()
    except KeyboardInterrupt:
        assert at is not None
    finally:
        sys.settrace(before)
    return count


def filled(text: str) -> Cache:
    cache = Cache(3, text)
    forward(cache, LENGTH - 1)
    forward(cache, 1)
    return cache


def moments(total: int, count: int) -> list[int]:
    """Some of the instructions; of the last ones, where a commit is, every other."""
    return sorted({*range(1, total, max(1, total // count)), *range(max(1, total - 40), total, 2)})


@pytest.mark.parametrize("text", SPECS)
def test_an_interrupted_forward_is_there_in_all_layers_or_in_none(text: str) -> None:
    start, straight = filled(text), filled(text)
    forward(straight, 1)
    forward(straight, 70)
    fates = set()
    twin = start.fork()
    for at in moments(interrupted(lambda: forward(twin, 1), None), 50):
        cache = start.fork()
        interrupted(lambda cache=cache: forward(cache, 1), at)  # type: ignore[misc]
        kept = cache.length
        fates.add(kept)
        cache.rollback()
        assert {state.length for state in cache} == {kept}, at
        forward(cache, LENGTH + 1 - kept)
        forward(cache, 70)
        assert [told(state) for state in cache] == [told(state) for state in straight], at
        cache.check()
    assert fates == {LENGTH, LENGTH + 1}


def test_the_next_append_ends_what_was_interrupted_too() -> None:
    """Nobody need ask for it: a loop goes on, as in a notebook.

    A first layer whose append died before it was counted had its row twice.
    """
    start = filled("raw,window=70,sinks=0")
    twin = start.fork()
    for at in range(1, interrupted(lambda: forward(twin, 1), None) + 1, 7):
        cache = start.fork()
        interrupted(lambda cache=cache: forward(cache, 1), at)  # type: ignore[misc]
        last = cache.length + 1
        assert last in (LENGTH + 1, LENGTH + 2), at
        forward(cache, 1)
        assert {state.length for state in cache} == {last}, at
        assert [told(state) for state in cache] == [list(range(last - 70, last))] * 3, at


VERBS: dict[str, Callable[[Cache], object]] = {
    "rewind": lambda cache: cache.rewind(LENGTH - 10),
    "reset": lambda cache: cache.reset(),
    "clear": lambda cache: cache.clear(),
    "widen": lambda cache: cache.ensure_slack(40),
    "recode": lambda cache: cache.recode("affine8"),
    "restore": lambda cache: cache.restore(Cache(3, "raw").snapshot()),
}


def shapes(snapshot: Snapshot) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in snapshot.tensors.items()}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("asked", [True, False], ids=["rollback", "append"])
def test_an_interrupted_verb_has_acted_on_all_layers_or_on_none(verb: str, asked: bool) -> None:
    """What comes next may be any verb, or an append; `length` tells before it what there will be.

    A recode that was kept left its spec behind, and the file of such a cache could not be loaded.
    """
    start, done = filled("raw"), filled("raw")
    VERBS[verb](done)
    before, after = start.snapshot(), done.snapshot()
    twin = start.fork()
    fates = set()
    for at in moments(interrupted(lambda: VERBS[verb](twin), None), 60):
        cache = start.fork()
        interrupted(lambda cache=cache: VERBS[verb](cache), at)  # type: ignore[misc]
        length = cache.length
        if asked:
            cache.rollback()
            assert {state.length for state in cache} == {length}, at
            found = cache.snapshot()
            acted = shapes(found) == shapes(after)
            same(found, after if acted else before)
            fates.add(acted)
        forward(cache, 1)
        assert {state.length for state in cache} == {length + 1}, at
        assert [told(state) for state in cache] == [list(range(length + 1))] * 3, at
        assert [state.spec for state in cache] == list(cache.spec.layers), at
        cache.check()
        start.check()
    assert not asked or True in fates


def test_a_verb_that_is_refused_is_not_tried_again() -> None:
    cache = filled("raw")
    for refused in (
        lambda: cache.move("nowhere"),
        lambda: cache.rewind(1.5),  # type: ignore[arg-type]
        lambda: cache.ensure_slack("a"),  # type: ignore[arg-type]
        lambda: cache.select([7]),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            refused()
        forward(cache, 1)
    assert [told(state) for state in cache] == [list(range(LENGTH + 4))] * 3


def test_a_rewind_that_runs_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer had gone back and the others had not."""
    cache, calls = filled("affine8"), 0
    before = cache.snapshot()

    def failing(*given: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        reopen_pages(*given)

    monkeypatch.setattr("kvant.cache.cache.reopen_pages", failing)
    with pytest.raises(MemoryError):
        cache.rewind(100)
    monkeypatch.undo()
    same(before, cache.snapshot())
    cache.rewind(100)
    cache.check()
    forward(cache, 1)
    assert [told(state) for state in cache] == [list(range(101))] * 3


def test_a_model_goes_on_behind_an_interrupted_crop() -> None:
    """Positions and masks were made for a length that the forward then did not find."""
    model, ids = build("llama"), torch.arange(20)[None]
    with torch.no_grad():
        whole = {n: model(torch.cat([ids[:, :n], ids[:, :1]], 1)).logits[0, -1] for n in (15, 20)}
        start = cache_for(model, "raw")
        model(ids, past_key_values=start)
        twin, lengths = start.fork(), set()
        for at in moments(interrupted(lambda: twin.crop(-5), None), 60):
            cache = start.fork()
            interrupted(lambda cache=cache: cache.crop(-5), at)  # type: ignore[misc]
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
def test_a_hybrid_has_acted_on_all_layers_or_on_none_or_says_so(verb: str) -> None:
    """The states that its host keeps change one after the other."""
    model, act = build("falcon_h1"), OF_HYBRIDS[verb]
    ids = torch.stack([torch.arange(20), torch.arange(20).flip(0)])

    def logits(cache: Any, tokens: Tensor = ids[:, :1]) -> Tensor:
        found: Tensor = model(tokens, past_key_values=cache).logits[:, -1]
        return found

    with torch.no_grad():
        start, fates = cache_for(model, "raw"), set[str]()
        logits(start, ids[:, :15])
        start.checkpoint()
        whole = logits(start, ids[:, 15:])
        done = start.fork()
        act(done)
        expected = {"old": logits(start.fork()), "new": logits(done)}
        twin = start.fork()
        total = interrupted(lambda: act(twin), None)
        for at in (*moments(total, 40), 2 * total):  # the last one comes too late
            cache = start.fork()
            cache.states.check()  # counts slots anew where the last interrupt left them torn
            interrupted(lambda cache=cache: act(cache), at)  # type: ignore[misc]
            try:
                found = logits(cache)
            except CacheError as error:
                assert "or reset" in str(error)
                cache.reset()
                torch.testing.assert_close(logits(cache, ids), whole, rtol=1e-4, atol=1e-4)
                continue
            alike = {
                name for name, one in expected.items() if torch.allclose(found, one, atol=1e-4)
            }
            assert len(alike) == 1, at
            fates |= alike
    assert fates == {"old", "new"}


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", ["jamba", "falcon_h1", "qwen3_next"])
@torch.no_grad()
def test_what_a_dead_first_forward_left_is_no_state(
    name: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward went on from it where its recovery was interrupted."""
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
        cache.states.external_states[0].check_valid()

    def logits(cache: Any) -> Tensor:
        return torch.cat([model(x, past_key_values=cache).logits for x in (ids, ids[:, :1])], 1)

    expected, twin = logits(cache_for(model, "raw")), dead()
    for at in moments(interrupted(lambda: recover(twin), None), 60):
        cache = dead()
        interrupted(lambda cache=cache: recover(cache), at)  # type: ignore[misc]
        try:
            found = logits(cache)
        except CacheError as error:
            assert name == "falcon_h1" and "no rows came in between" in str(error)
            cache.reset()
            found = logits(cache)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_rewind_to_where_it_is_loses_no_state() -> None:
    """There is no checkpoint: a state that is lost is so for good."""
    model, ids = build("jamba"), torch.arange(3, 14)[None]
    start = cache_for(model, "raw")
    model(ids, past_key_values=start)
    twin = start.fork()
    expected = model(ids[:, :1], past_key_values=start.fork()).logits
    for at in moments(interrupted(lambda: twin.rewind(11), None), 80):
        cache = start.fork()
        interrupted(lambda cache=cache: cache.rewind(11), at)  # type: ignore[misc]
        found = model(ids[:, :1], past_key_values=cache).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["raw", "affine8,window=70,sinks=0"])
def test_an_interrupted_select_has_acted_on_all_layers_or_on_none(text: str) -> None:
    start = Cache(3, text)
    for _ in range(2):
        for state in start:
            state.append(rows(0, 90, batch=2), rows(0, 90, batch=2))
    done = start.fork()
    done.select([1, 0])
    before, after = start.snapshot(), done.snapshot()
    twin, fates = start.fork(), set()
    for at in moments(interrupted(lambda: twin.select([1, 0]), None), 60):
        cache = start.fork()
        interrupted(lambda cache=cache: cache.select([1, 0]), at)  # type: ignore[misc]
        cache.rollback()
        found = cache.snapshot()
        acted = torch.equal(found.tensors["0/keys.open"], after.tensors["0/keys.open"])
        same(found, after if acted else before)
        fates.add(acted)
        for state in cache:
            state.append(rows(0, 70, batch=2), rows(0, 70, batch=2))
        cache.check()
        same(start.snapshot(), before)
    assert fates == {True, False}


OF_PROMPTS: dict[str, Callable[[Cache], object]] = {
    "rewind": lambda cache: cache.rewind(290),
    "select": lambda cache: cache.select([0]),
    "move": lambda cache: cache.move("cpu"),
    "prune": lambda cache: cache.prune(),
}


@pytest.mark.parametrize("verb", OF_PROMPTS)
def test_a_prompt_is_pruned_whatever_was_interrupted(verb: str) -> None:
    """Between other extents and what was asked of them nobody knew of a prompt: it stayed whole."""
    generator, start = torch.Generator().manual_seed(0), Cache(1, "raw,prune=snapkv:64")
    new = (torch.randn(1, heads, 300, 32, generator=generator) for heads in (6, 3, 3))
    queries, keys, values = new
    attend(queries, start[0].append(keys, values))
    twin, pruned = start.fork(), []
    for act in (lambda cache: None, OF_PROMPTS[verb]):
        done = start.fork()
        act(done)
        done.prune()
        pruned.append(done.snapshot())
    for at in moments(interrupted(lambda: OF_PROMPTS[verb](twin), None), 150):
        cache = start.fork()
        interrupted(lambda cache=cache: OF_PROMPTS[verb](cache), at)  # type: ignore[misc]
        cache.prune()
        assert cache[0].held == 64, at
        same(cache.snapshot(), pruned[0 if cache.length == 300 else 1])
        cache.check()


@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.laws)])
def test_interrupts_of_a_decoding_loop_leave_a_committed_length(count: int) -> None:
    """Real signals at random moments; the loop goes on, and its rows are the right ones."""
    rng, hits, cache, tokens = random.Random(0), 0, Cache(8, "raw,window=64,sinks=0"), 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        while hits < count:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, 0.004))
                while True:
                    forward(cache, 1)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            length = cache.length
            assert length >= tokens, "a committed token is lost"
            tokens = length
            cache.rollback()
            assert {state.length for state in cache} == {length}
            cache.check()
            if length:
                assert [told(state) for state in cache] == [list(range(length))[-64:]] * 8
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert tokens > count // 2
