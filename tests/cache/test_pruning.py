"""Rows that go behind a prompt: who stays, where they lie, and what all verbs make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvant
from attention.kernels import NAME, needed
from cache.tagged import One
from kvant import CacheError, RewindError, SpecError, attend, parse
from kvant.cache.files import read_header
from kvant.cache.pruning import MAX_DECODE_EXCESS, NUM_PROTECTED_ROWS
from kvant.contracts import Mask, ScoreInput, Snapshot
from kvant.recipes import LayerSpec
from kvant.scores import SCORES
from laws import oracle
from laws.cases import COARSE, FORMATS, readers
from thin import once

HEADS, GROUP, DIM = 3, 2, 32
LENGTHS = (300, 190, 64)  # side by side, the shorter ones behind padding
START = [0, 110, 236]


def spec_of(text: str) -> LayerSpec:
    layer = parse(text, 1).layers[0]
    assert isinstance(layer, LayerSpec)
    return layer


def noise(*shape: int, seed: int = 0) -> Tensor:
    """[..., T, D]: the same for the same seed, however many rows are asked for."""
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return torch.randn(shape, generator=generator)
    *lead, count, dim = shape
    return torch.randn(count, *lead, dim, generator=generator).movedim(0, -2).contiguous()


def prompt(text: str, *, batch: int = 1, count: int = 300, chunk: int = 300, **how: Any) -> One:
    """A layer that read a prompt, and was asked by each of its tokens."""
    state = One(spec_of(text))
    keys, values, queries = (
        noise(batch, heads, count, DIM, seed=seed)
        for seed, heads in enumerate((HEADS, HEADS, HEADS * GROUP))
    )
    for place in range(0, count, chunk):
        some = slice(place, place + chunk)
        start = how.get("start") if place == 0 else None
        view = state.append(keys[:, :, some], values[:, :, some], start=start)
        attend(queries[:, :, some], view)
    return state


def kept_rows(state: One, sequence: int = 0) -> list[list[Tensor]]:
    """The keys and the values of each head that are there."""
    rows, positions = state.read(), state.positions()
    there = (positions[sequence] >= 0).expand(HEADS, -1)
    return [[side[sequence, h, there[h]] for side in rows] for h in range(HEADS)]


def step(state: One, seed: int) -> Tensor:
    """What one more token of each sequence attends to."""
    batch = state.batch
    view = state.append(*(noise(batch, HEADS, 1, DIM, seed=seed + side) for side in (0, 1)))
    out: Tensor = attend(noise(batch, HEADS * GROUP, 1, DIM, seed=seed + 2), view)
    return out


KINDS = (*SCORES, "snapkv:adaptive", "keydiff:adaptive")


def worded(kind: str, keep: str = "30%") -> str:
    name, _, adaptive = kind.partition(":")
    return f"prune={name}:{keep}" + (f":{adaptive}" if adaptive else "")


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *once([(f, k) for f in FORMATS for k in KINDS], lambda row: row),
        *(pytest.param(f, k, marks=pytest.mark.laws) for f in FORMATS for k in KINDS),
    ],
)
def test_attention_is_over_the_rows_that_were_kept(form: str, kind: str) -> None:
    state = prompt(f"{form},{worded(kind)}", batch=3, start=START)
    before = [kept_rows(state, b) for b in range(3)]
    assert [len(before[b][0][0]) for b in range(3)] == list(LENGTHS)
    state.prune()
    state.check()
    for b, length in enumerate(LENGTHS):
        keep = max(-(-length * 3 // 10), NUM_PROTECTED_ROWS)
        after = kept_rows(state, b)
        counts = [len(keys) for keys, _ in after]
        assert sum(counts) == HEADS * keep and ("adaptive" in kind or set(counts) == {keep})
        near = 0.0 if form == "raw" else 0.3  # sealed once more, at other places
        for (keys, values), (old_keys, old_values) in zip(after, before[b], strict=True):
            assert torch.equal(keys[-8:], old_keys[-8:]) or form != "raw"
            now, then = torch.cat([keys, values], 1), torch.cat([old_keys, old_values], 1)
            gaps = (now[:, None] - then).norm(dim=-1)
            nearest = gaps.min(1)
            assert float(nearest.values.max()) <= near * (2 * DIM) ** 0.5 + 1e-4
            assert (nearest.indices.diff() > 0).all()  # each once, in their order
    for seed in range(100, 500, 100):
        view = state.append(*(noise(3, HEADS, 1, DIM, seed=seed + side) for side in (0, 1)))
        q = noise(3, HEADS * GROUP, 1, DIM, seed=seed + 2)
        for backend in readers(view):
            out = attend(q, view, backend=backend)
            for b in range(3):
                for h, (keys, values) in enumerate(kept_rows(state, b)):
                    mine = slice(GROUP * h, GROUP * (h + 1))
                    seen = torch.ones(1, 1, len(keys), dtype=torch.bool)
                    expected = oracle.attention(
                        q[b : b + 1, mine], keys[None, None], values[None, None], seen
                    )
                    worst = 1e-5 if backend == "reference" or form == "raw" else COARSE
                    assert float((out[b : b + 1, mine] - expected).abs().max()) < worst


@needed
@pytest.mark.usefixtures("pages_as_on_a_gpu")
@pytest.mark.parametrize("form", ["raw", "affine8", "affine4v8", "turbo4"])
def test_kernels_of_triton_read_them(form: str) -> None:
    state = prompt(f"{form},prune=snapkv:30%:adaptive", batch=3, start=START)
    state.prune()
    view = state.append(*(noise(3, HEADS, 1, DIM, seed=side) for side in (60, 61)))
    q = noise(3, HEADS * GROUP, 1, DIM, seed=62)
    found, expected = (attend(q, view, backend=name) for name in (NAME, "reference"))
    assert float((found - expected).abs().max()) < 2e-3


def best(scores: Tensor, count: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return sorted(order[:count])


def brute_force(kind: str, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """The scores of all rows [H, n], one at a time."""
    count = keys.shape[1]
    found = torch.zeros(HEADS, count, dtype=torch.float64)
    for h in range(HEADS):
        if kind == "keydiff":
            mean = sum(k / k.norm() for k in keys[h]) / count
            for i, k in enumerate(keys[h]):
                found[h, i] = -(k @ mean) / (k.norm() * mean.norm())
            continue
        width = {"snapkv": 64, "tova": 1, "expected": 512}[kind]
        group = queries[GROUP * h : GROUP * (h + 1), -width:] * DIM**-0.5
        if kind == "expected":
            for asking in group:
                mean, spread = asking.mean(0), asking.T.cov(correction=0)
                logits = torch.stack([mean @ k + k @ spread @ k / 2 for k in keys[h]])
                found[h] += logits.softmax(0) / GROUP
            found[h] *= values[h].norm(dim=1)
            found[h, :4] = torch.inf
            continue
        for asking in group:
            for t, q in enumerate(asking):
                seen = count - len(asking) + t + 1
                weights = torch.stack([q @ k for k in keys[h, :seen]]).softmax(0)
                found[h, :seen] += weights / (len(asking) * GROUP)
        if kind == "snapkv":
            padded = torch.nn.functional.pad(found[h], (2, 2))
            found[h] = torch.stack([padded[i : i + 5].mean() for i in range(count)])
    return found.mean(0).repeat(HEADS, 1) if kind == "tova" else found


@pytest.mark.parametrize("chunk", [300, 77])
@pytest.mark.parametrize("kind", [name for name in SCORES if name != "random"])
def test_the_rows_that_stay_are_the_best_by_the_score(kind: str, chunk: int) -> None:
    state = prompt(f"raw,prune={kind}:80", chunk=chunk)
    given = [noise(1, n, 300, DIM, seed=i)[0].double() for i, n in enumerate((3, 3, 6))]
    scores = brute_force(kind, *given)
    scores[:, -NUM_PROTECTED_ROWS:] = torch.inf
    expected = [best(scores[h], 80) for h in range(HEADS)]
    state.prune()
    for h, (keys, _) in enumerate(kept_rows(state)):
        assert torch.equal(keys, noise(1, HEADS, 300, DIM)[0, h, expected[h]])


def test_heads_share_what_they_keep_by_the_score_of_all() -> None:
    state = prompt("raw,prune=snapkv:80:adaptive")
    given = [noise(1, n, 300, DIM, seed=i)[0].double() for i, n in enumerate((3, 3, 6))]
    scores = brute_force("snapkv", *given)
    scores[:, -NUM_PROTECTED_ROWS:] = torch.inf
    safe = [set(best(scores[h], NUM_PROTECTED_ROWS)) for h in range(HEADS)]
    others = [(-float(scores[h, i]), h, i) for h in range(HEADS) for i in range(300)]
    others = sorted(one for one in others if one[2] not in safe[one[1]])
    for _, h, i in others[: HEADS * (80 - NUM_PROTECTED_ROWS)]:
        safe[h].add(i)
    state.prune()
    found = [keys for keys, _ in kept_rows(state)]
    assert [len(keys) for keys in found] == [len(one) for one in safe]
    assert len(set(map(len, found))) > 1
    for h, keys in enumerate(found):
        assert torch.equal(keys, noise(1, HEADS, 300, DIM)[0, h, sorted(safe[h])])


def test_what_keeps_all_changes_no_bit() -> None:
    plain, pruned = prompt("affine4"), prompt("affine4,prune=snapkv:100%")
    assert pruned.prune() == 0
    for seed in (100, 200):
        assert torch.equal(step(plain, seed), step(pruned, seed))


@pytest.mark.parametrize("form", ["raw", "affine8", "affine4", "turbo3,tail=0"])
@pytest.mark.parametrize("count", [20, 64, 300, 1000])
def test_what_stays_is_planned_to_the_byte(form: str, count: int) -> None:
    spec = f"{form},prune=random:25%"
    state = prompt(spec, batch=2, count=count, chunk=count)
    shape = kvant.Shape(1, HEADS, DIM, DIM, torch.float32)
    plan = kvant.plan(shape, spec, context=count, sequences=2)
    assert state.nbytes <= plan.nbytes
    state.prune()
    assert state.nbytes == plan.nbytes_kept


def test_memory_is_that_of_the_rows_that_stay() -> None:
    state = prompt("raw,prune=random:64", count=1000, chunk=1000)
    before = state.nbytes
    assert state.prune() == 936
    page = 2 * 64 * DIM * 4
    assert before == 16 * HEADS * page and state.nbytes == 2 * HEADS * page
    assert state.length == 1000 and state.prune() == 0


@pytest.mark.parametrize("kind", ["tova", "keydiff", "random", "snapkv"])
def test_while_tokens_are_decoded_scores_prune_that_can(kind: str) -> None:
    state, held = prompt(f"affine8,prune={kind}:64"), []
    for seed in range(1000, 1000 + 10 * (2 * MAX_DECODE_EXCESS + 5), 10):
        state.prune()
        held.append(len(kept_rows(state)[0][0]))
        step(state, seed)
    if kind == "snapkv":
        assert held == list(range(64, 64 + len(held)))
    else:
        assert held == [64 + i % (MAX_DECODE_EXCESS + 1) for i in range(len(held))]
    state.check()


def test_a_prompt_behind_a_reply_is_pruned_with_it() -> None:
    state = prompt("raw,prune=snapkv:25%")
    state.prune()
    view = state.append(*(noise(1, HEADS, 100, DIM, seed=n) for n in (7, 8)))
    attend(noise(1, HEADS * GROUP, 100, DIM, seed=9), view)
    assert state.prune() == 75 and len(kept_rows(state)[0][0]) == 100


def test_nobody_goes_back_to_what_is_gone() -> None:
    state = prompt("affine8,prune=keydiff:64")
    state.prune()
    for seed in (100, 200, 300):
        step(state, seed)
    expected = [step(state, 400), state.rewind(303)][0]
    assert torch.equal(step(state, 400), expected)
    assert state.reachable(299) == 0 and state.reachable(300) == 300
    for gone in (299, 1):
        with pytest.raises(RewindError, match="a prune has let go"):
            state.rewind(gone)
    assert state.length == 304
    state.rewind(300)
    assert state.trim(300) == 300 and state.length == 0
    state.check()


def test_queries_that_nobody_saw_are_an_error_that_changes_nothing() -> None:
    state = One(spec_of("affine8,prune=snapkv:64"))
    state.append(noise(1, HEADS, 300, DIM), noise(1, HEADS, 300, DIM, seed=1))
    before = state.nbytes
    with pytest.raises(CacheError, match="nobody saw"):
        state.prune()
    assert state.nbytes == before and state.length == 300
    state.check()


def test_a_prompt_that_was_taken_back_in_part_is_pruned_by_what_is_left() -> None:
    part = prompt("raw,prune=snapkv:64")
    part.rewind(290)
    same = [noise(1, n, 300, DIM, seed=i)[:, :, :290] for i, n in enumerate((3, 3, 6))]
    whole = One(spec_of("raw,prune=snapkv:64"))
    attend(same[2], whole.append(*same[:2]))
    # The queries that were taken back are 10 of the 64.
    assert whole.prune() == part.prune() == 226


VERBS: dict[str, Callable[[One], None]] = {
    "fork": lambda state: None,
    "select": lambda state: state.select([2, 0, 0]),
    "extract": lambda state: None,
    "move": lambda state: state.cache.move("cpu"),
    "widen": lambda state: state.ensure_slack(64),
    "restore": lambda state: state.restore(state.snapshot()),
}


@pytest.mark.parametrize("form", ["raw", "affine4,tail=0", "turbo3"])
@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_keep_what_is_there(verb: str, when: str, form: str) -> None:
    """Before a prune they keep what was asked, too: but a snapshot, which holds no queries."""
    kind = "keydiff" if verb == "restore" else "snapkv"
    state = prompt(f"{form},prune={kind}:40:adaptive", batch=3, start=START)
    plain = state.fork()
    if when == "behind":
        plain.prune(), state.prune()
    VERBS[verb](state)
    if verb == "restore" and when == "before":
        return  # a cache that comes from elsewhere knows of no prompt
    chosen = [0, 1, 2]
    if verb == "select":
        chosen = [2, 0, 0]
    if verb == "fork":
        state = state.fork()
    if verb == "extract":
        state, chosen = One(state.spec, cache=state.cache.extract(1)), [1]
    if when == "before":
        plain.prune(), state.prune()
    state.check()
    rows = [noise(3, HEADS, 1, DIM, seed=n) for n in (50, 51)]
    q = noise(3, HEADS * GROUP, 1, DIM, seed=52)
    expected = attend(q, plain.append(*rows))[chosen]
    found = attend(q[chosen], state.append(*(r[chosen] for r in rows)))
    assert torch.allclose(found, expected, atol=1e-6)
    state.check()


def test_caches_of_different_lengths_are_merged() -> None:
    states = [prompt("affine4,prune=snapkv:25%:adaptive", count=n, chunk=n) for n in (400, 130, 90)]
    for state in states:
        state.prune()
    merged = One(states[0].spec, cache=kvant.merge([state.cache for state in states]))
    rows = [noise(3, HEADS, 1, DIM, seed=n) for n in (50, 51)]
    q = noise(3, HEADS * GROUP, 1, DIM, seed=52)
    found = attend(q, merged.append(*rows))
    for b, state in enumerate(states):
        alone = attend(q[b : b + 1], state.append(*(r[b : b + 1] for r in rows)))
        assert torch.allclose(found[b : b + 1], alone, atol=1e-6)
    merged.check()
    merged.remove(0)
    assert merged.lengths == [131, 91]


def test_a_fork_of_a_pruned_cache_shares_its_pages() -> None:
    state = prompt("affine8,prune=keydiff:128")
    other = state.fork()
    state.prune()
    assert other.length == 300 and len(kept_rows(other)[0][0]) == 300
    twin = state.fork()
    pooled = state.measure_pools()
    assert pooled["nbytes_shared"] > 0
    assert torch.equal(step(twin, 100), step(state, 100))
    for one in (other, twin, state):
        one.check()


@pytest.mark.parametrize("kind", ["keydiff:100", "keydiff:100:adaptive"])
def test_a_file_holds_what_stays(tmp_path: Path, kind: str) -> None:
    state = prompt(f"affine4,prune={kind}", batch=3, start=START)
    state.prune()
    kvant.save(state.cache, tmp_path / "cache")
    head = read_header(tmp_path / "cache")
    assert (head.padded_lengths, head.count_key_heads("0/keys.open")) == ((300,) * 3, HEADS)
    back = One(state.spec, cache=kvant.load(tmp_path / "cache"))
    assert torch.equal(step(state, 100), step(back, 100))
    assert back.reachable(299) == 0
    back.check()


@pytest.mark.parametrize("kind", ["keydiff:100", "keydiff:100:adaptive"])
def test_a_recode_stores_what_stays(kind: str) -> None:
    state, plain = (prompt(f"raw,prune={kind}") for _ in range(2))
    state.prune(), plain.prune()
    state.recode(replace(state.spec, keys=spec_of("affine8").keys, values=spec_of("fp8").values))
    state.check()
    expected, found = step(plain, 100), step(state, 100)
    assert not torch.equal(found, expected) and float((found - expected).abs().max()) < 0.1
    with pytest.raises(SpecError, match="reset"):
        state.recode(spec_of("affine8"))
    other = prompt("raw")
    if "adaptive" not in kind:
        other.recode(spec_of(f"affine8,prune={kind}"))
        assert other.prune() == 200 and other.length == 300
        return
    with pytest.raises(SpecError, match="lie apart"):
        other.recode(spec_of(f"affine8,prune={kind}"))


def nonsense() -> Iterator[tuple[str, Callable[[Snapshot], Snapshot]]]:
    def of(column: int, value: int, row: int = 0) -> Callable[[Snapshot], Snapshot]:
        def forged(good: Snapshot) -> Snapshot:
            numbers = good.tensors["numbers"].clone()
            numbers[row, column] = value
            return Snapshot({**good.tensors, "numbers": numbers}, good.numbers)

        return forged

    yield "a head that is further", of(0, 301)
    yield "pruned behind the end", of(6, 301)
    yield "pruned before what stays", of(6, 100)
    yield "heads that were pruned at other lengths", of(6, 299)
    yield "a head without rows", of(5, 300)
    yield (
        "no prune, and rows are gone",
        lambda good: Snapshot(
            {**good.tensors, "numbers": good.tensors["numbers"][:, :6]}, good.numbers
        ),
    )
    for heads in (0, 2, -3, 1 << 40):
        yield f"{heads} heads", lambda good, n=heads: Snapshot(good.tensors, {"heads": n})
    yield (
        "several heads in the pages of one",
        lambda good: Snapshot(
            {
                name: one if name == "numbers" else one.repeat_interleave(2, 1)
                for name, one in good.tensors.items()
            },
            good.numbers,
        ),
    )
    yield "nobody knows how many heads", lambda good: Snapshot(good.tensors, {})


@pytest.mark.parametrize("forge", [one for _, one in nonsense()], ids=[n for n, _ in nonsense()])
def test_a_snapshot_that_does_not_fit_is_refused(forge: Callable[[Snapshot], Snapshot]) -> None:
    state = prompt("affine8,prune=keydiff:100:adaptive")
    state.prune()
    other = prompt("affine8,prune=keydiff:100:adaptive")
    with pytest.raises(kvant.SnapshotMismatch):
        other.restore(forge(state.snapshot()))
    assert other.length == 300 and len(kept_rows(other)[0][0]) == 300


def test_learned_sinks_take_their_part() -> None:
    state = prompt("raw,prune=random:50")
    state.prune()
    view = state.append(*(noise(1, HEADS, 1, DIM, seed=n) for n in (50, 51)))
    q, logits = noise(1, HEADS * GROUP, 1, DIM, seed=52), noise(HEADS * GROUP, seed=53)
    out, lse = attend(q, view, sink_logits=logits, return_lse=True)
    for h, (keys, values) in enumerate(kept_rows(state)):
        for g in range(GROUP):
            at = GROUP * h + g
            scores = torch.cat([keys @ q[0, at, 0] * DIM**-0.5, logits[at : at + 1]])
            expected = scores.softmax(0)[:-1] @ values
            assert torch.allclose(out[0, at, 0], expected, atol=1e-5)
            assert torch.allclose(lse[0, at, 0], scores.logsumexp(0), atol=1e-5)


def test_masks_that_count_columns_are_refused_behind_a_prune() -> None:
    state = prompt("raw,prune=random:50")
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool)
    q = noise(1, HEADS * GROUP, 1, DIM, seed=52)
    every = attend(q, state.view())
    assert torch.allclose(attend(q, state.view(), mask=mask), every, atol=1e-6)
    by_head = mask.expand(1, HEADS * GROUP, 1, 300).clone()
    by_head[:, 0, :, :200] = False
    found = attend(q, state.view(), mask=by_head)
    assert torch.allclose(found[:, 1:], every[:, 1:], atol=1e-6)
    assert not torch.allclose(found[:, 0], every[:, 0], atol=1e-3)
    state.prune()
    with pytest.raises(kvant.UnsupportedView, match="counts columns"):
        attend(q, state.view(), mask=mask)
    assert attend(q, state.view(), mask=Mask()).isfinite().all()


def test_a_forward_that_died_behind_a_prune_is_taken_back() -> None:
    cache = kvant.Cache(2, "affine8,prune=keydiff:64")
    for layer in cache:
        layer.append(noise(1, HEADS, 300, DIM), noise(1, HEADS, 300, DIM, seed=1))
    cache.prune()
    before = cache.nbytes
    cache[0].append(noise(1, HEADS, 1, DIM), noise(1, HEADS, 1, DIM))
    cache.rollback()
    assert (cache.length, cache.nbytes) == (300, before)
    cache.check()


def test_a_prune_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvant.Cache(2, "affine8,prune=keydiff:64")
    for layer in cache:
        layer.append(noise(1, HEADS, 300, DIM), noise(1, HEADS, 300, DIM, seed=1))

    def broken(*given: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(cache[1]), "write_retained_rows", broken)
        with pytest.raises(MemoryError):
            cache.prune()
    cache.check()
    assert cache.length == 300 and cache[0].read()[0].shape[2] == 300
    assert cache.prune() == 236


def test_a_head_asks_by_its_own_rows_alone() -> None:
    """Padding asks nothing, and rows that are gone are no candidates."""
    rows = ScoreInput(
        keys=torch.eye(4)[None].expand(2, -1, -1),
        values=torch.ones(2, 4, 1),
        valid=torch.tensor([[False, True, True, True], [True] * 4]),
        queries=torch.eye(4)[None, None].expand(2, 1, -1, -1) * 9,
        query_rows=torch.tensor([[-1, -1, 2, 3], [0, 1, 2, 3]]),
        scale=1.0,
        heads_per_sequence=1,
    )
    scores = SCORES["tova"]().score_rows(rows)
    assert scores[0, 0] == 0 and scores[0, 1] < scores[0, 2]
    assert float(scores[0].sum()) == pytest.approx(1.0, abs=1e-5)


def spoken(state: One, count: int, seed: int = 1000) -> None:
    for at in range(count):
        step(state, seed + 10 * at)


def test_a_forward_that_died_is_not_heard() -> None:
    cache = kvant.Cache(2, "raw,prune=snapkv:64")
    rows = [noise(1, n, 400, DIM, seed=i) for i, n in enumerate((HEADS, HEADS, HEADS * GROUP))]
    for some, layers in ((slice(0, 300), (0, 1)), (slice(300, 400), (0,))):
        for layer in layers:
            keys, values, queries = (side[:, :, some] for side in rows)
            attend(queries, cache[layer].append(keys, values))
    cache.rollback()
    other = prompt("raw,prune=snapkv:64")
    assert cache.prune() == other.prune() == 236
    for mine, its in zip(cache[0].read(), other.read(), strict=True):
        assert torch.equal(mine, its)


def test_what_is_taken_back_asks_no_more() -> None:
    state, whole = (prompt("raw,prune=snapkv:64") for _ in range(2))
    state.rewind(290)
    same = [noise(1, n, 300, DIM, seed=i)[:, :, 290:] for i, n in enumerate((3, 3, 6))]
    attend(same[2], state.append(*same[:2]))
    assert state.prune() == whole.prune() == 236  # by 64 queries again
    for mine, its in zip(state.read(), whole.read(), strict=True):
        assert torch.equal(mine, its)
    gone = prompt("raw,prune=snapkv:64")
    gone.rewind(200)  # nobody knows what the tokens asked that are left: they stay
    assert gone.prune() == 0 and step(gone, 100).isfinite().all()


def test_a_layer_is_asked_once_by_a_forward() -> None:
    """Other layers may read the same rows, and ask for themselves."""
    state, whole = (One(spec_of("raw,prune=snapkv:64")) for _ in range(2))
    rows = [noise(1, n, 300, DIM, seed=i) for i, n in enumerate((HEADS, HEADS, HEADS * GROUP))]
    for some in (slice(0, 290), slice(290, 300)):
        keys, values, queries = (side[:, :, some] for side in rows)
        for one, times in ((state, 2), (whole, 1)):
            view = one.append(keys, values)
            for time in range(times):
                attend(queries if time == 0 else -queries, view)
    assert state.prune() == whole.prune() == 236
    assert torch.equal(state.read()[0], whole.read()[0])


@pytest.mark.parametrize("kind", ["snapkv", "snapkv:adaptive"])
def test_queries_of_another_shape_are_refused_before_they_are_heard(kind: str) -> None:
    state = prompt(f"raw,{worded(kind)}")
    view = state.append(*(noise(1, HEADS, 4, DIM, seed=n) for n in (1, 2)))
    for shape in ((1, 4, 4, DIM), (2, 6, 4, DIM), (1, 6, 4, DIM + 1)):
        with pytest.raises(ValueError, match="do not fit keys of"):
            attend(noise(*shape), view)
    with pytest.raises(ValueError, match="mask"):
        attend(noise(1, 6, 4, DIM), view, mask=torch.ones(1, 3, 4, 304, dtype=torch.bool))
    assert state.prune() > 0


def test_masks_that_count_columns_are_refused_of_a_single_head() -> None:
    state = One(spec_of("raw,prune=keydiff:50"))
    state.append(noise(1, 1, 300, DIM), noise(1, 1, 300, DIM, seed=1))
    state.prune()
    with pytest.raises(kvant.UnsupportedView, match="counts columns"):
        attend(noise(1, 2, 1, DIM), state.view(), mask=torch.ones(1, 1, 1, 300, dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_does_not_depend_on_neighbours(kind: str) -> None:
    beside = prompt(f"raw,{worded(kind)}", batch=3, start=START)
    for b, length in enumerate(LENGTHS):
        alone = One(spec_of(f"raw,{worded(kind)}"))
        rows = [
            noise(3, n, 300, DIM, seed=i)[b : b + 1, :, 300 - length :]
            for i, n in enumerate((3, 3, 6))
        ]
        attend(rows[2], alone.append(*rows[:2]))
        alone.prune()
        if b == 0:
            beside.prune()
        for mine, its in zip(kept_rows(beside, b), kept_rows(alone), strict=True):
            assert torch.equal(mine[0], its[0])


def test_a_prompt_is_pruned_where_it_is_merged() -> None:
    """And not where it came from: caches that are merged stay as they are."""
    fresh, pruned = (prompt("raw,prune=snapkv:64", count=n, chunk=n) for n in (300, 200))
    pruned.prune()
    merged = One(fresh.spec, cache=kvant.merge([pruned.cache, fresh.cache]))
    assert int((merged.positions()[1] >= 0).sum()) == 64
    assert int((fresh.positions() >= 0).sum()) == 300
    merged.check(), fresh.check()


@pytest.mark.parametrize("kind", ["tova", "keydiff"])
def test_who_joins_those_who_decode_disturbs_nobody(kind: str) -> None:
    one, other = (prompt(f"raw,prune={kind}:64", count=n, chunk=n) for n in (300, 200))
    spoken(one, MAX_DECODE_EXCESS + 1)
    merged = One(one.spec, cache=kvant.merge([one.cache, other.cache]))
    before = merged.positions()
    spoken(merged, 3)
    assert int((before[0] >= 0).sum()) == 64 + MAX_DECODE_EXCESS + 1
    assert int((merged.positions()[0] >= 0).sum()) == 67
    merged.check()


@pytest.mark.parametrize("kind", ["tova", "keydiff", "snapkv"])
def test_a_token_that_is_part_of_a_prompt_prunes_nothing(kind: str) -> None:
    state, whole = (
        prompt(f"raw,prune={kind}:64", count=299, chunk=299),
        prompt(f"raw,prune={kind}:64"),
    )
    rows = [noise(1, n, 300, DIM, seed=i)[:, :, 299:] for i, n in enumerate((3, 3, 6))]
    with state.cache.prompt_mode():
        attend(rows[2], state.append(*rows[:2]))
    assert int((state.positions() >= 0).sum()) == 300
    state.prune(), whole.prune()
    assert torch.equal(state.read()[0], whole.read()[0])


def test_memory_of_a_capacity_is_planned() -> None:
    spec = "affine8,capacity=1024,prune=keydiff:100"
    shape = kvant.Shape(1, HEADS, DIM, DIM, torch.float32)
    plan = kvant.plan(shape, spec, context=300)
    state = prompt(spec)
    state.prune()
    spoken(state, 150)
    assert state.nbytes == plan.nbytes_kept == plan.nbytes


def test_a_prune_moves_memory_once() -> None:
    state, moves = prompt("affine8,prune=snapkv:100"), []
    for seed in range(200):
        step(state, 5000 + 10 * seed)
        moves.append(id(state.cache[0].storage))
    assert len(set(moves)) == 1
