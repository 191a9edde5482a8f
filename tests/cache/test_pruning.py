"""Test pruned prompts: which rows survive, where they are stored, and every operation on them."""

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
from cache.tagged import LayerCache
from kvant import CacheError, RewindError, SpecError, attend, parse
from kvant.cache import pruning
from kvant.cache.files import read_header
from kvant.cache.pruning import MAX_DECODE_EXCESS, NUM_PROTECTED_ROWS
from kvant.cache.reports import measure_pools
from kvant.codecs import Affine
from kvant.codecs.frames import Diagonal
from kvant.contracts import Mask, Snapshot
from kvant.recipes import LayerSpec
from kvant.retention import SCORES, KVzip, ScoreInput
from laws import oracle
from laws.cases import COARSE, FORMATS, list_readers
from thin import thin_rows

HEADS, GROUP, DIM = 3, 2, 32
LENGTHS = (300, 190, 64)  # batched, the shorter ones after padding
START = [0, 110, 236]


def make_spec(text: str) -> LayerSpec:
    layer = parse(text, 1).layers[0]
    assert isinstance(layer, LayerSpec)
    return layer


def make_noise(*shape: int, seed: int = 0) -> Tensor:
    """Return noise [..., T, D], equal for the same seed and any number of rows."""
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return torch.randn(shape, generator=generator)
    *lead, count, dim = shape
    return torch.randn(count, *lead, dim, generator=generator).movedim(0, -2).contiguous()


def prefill_layer(
    spec: str | LayerSpec, *, batch: int = 1, count: int = 300, chunk: int = 300, **options: Any
) -> LayerCache:
    """Prefill a layer with a prompt and record the queries of each token."""
    state = LayerCache(make_spec(spec) if isinstance(spec, str) else spec)
    keys, values, queries = (
        make_noise(batch, heads, count, DIM, seed=seed)
        for seed, heads in enumerate((HEADS, HEADS, HEADS * GROUP))
    )
    for place in range(0, count, chunk):
        part = slice(place, place + chunk)
        start = options.get("start") if place == 0 else None
        view = state.append(keys[:, :, part], values[:, :, part], start=start)
        attend(queries[:, :, part], view)
    return state


def surviving_rows(state: LayerCache, sequence: int = 0) -> list[list[Tensor]]:
    """Return the surviving keys and values of each head."""
    rows, positions = state.read(), state.positions()
    mask = (positions[sequence] >= 0).expand(HEADS, -1)
    return [[side[sequence, h, mask[h]] for side in rows] for h in range(HEADS)]


def attend_next_token(state: LayerCache, seed: int) -> Tensor:
    """Return the attention of one more token of each sequence."""
    batch = state.batch
    view = state.append(*(make_noise(batch, HEADS, 1, DIM, seed=seed + side) for side in (0, 1)))
    out: Tensor = attend(make_noise(batch, HEADS * GROUP, 1, DIM, seed=seed + 2), view)
    return out


# The others need a model: tests/generation/test_second_pass.py.
OWN_SCORES = [name for name, score in SCORES.items() if score is not KVzip]
KINDS = (*OWN_SCORES, "snapkv:adaptive", "keydiff:adaptive")


def format_prune(method: str, keep: str = "30%") -> str:
    name, _, adaptive = method.partition(":")
    return f"prune={name}:{keep}" + (f":{adaptive}" if adaptive else "")


@pytest.mark.parametrize("method", ["keydiff", "expected"])
def test_channel_scales_of_each_head_change_no_choice(method: str) -> None:
    """The scales are powers of two, the same for each group of channels: they round nothing."""
    scales = Diagonal(tuple((low,) * 16 + (high,) * 16 for low, high in ((1, 4), (2, 1), (8, 0.5))))
    plain = make_spec(f"affine8,group=16,{format_prune(method)}")
    smooth = replace(plain, keys=Affine(8, 16, frame=scales), values=Affine(8, 16, frame=scales))
    rows = []
    for spec in (plain, smooth):
        state = prefill_layer(spec, batch=3, start=START)
        state.prune()
        rows.append([surviving_rows(state, b) for b in range(3)])
    for (keys, values), (smooth_keys, smooth_values) in zip(
        *([head for heads in found for head in heads] for found in rows), strict=True
    ):
        assert torch.allclose(keys, smooth_keys, atol=1e-5)
        assert torch.allclose(values, smooth_values, atol=1e-5)


@pytest.mark.usefixtures("foreign_codec")
@pytest.mark.parametrize(
    ("form", "method"),
    [
        *thin_rows([(f, k) for f in FORMATS for k in KINDS], lambda row: row),
        *(pytest.param(f, k, marks=pytest.mark.laws) for f in FORMATS for k in KINDS),
    ],
)
def test_attention_covers_the_rows_that_survive_a_prune(form: str, method: str) -> None:
    state = prefill_layer(f"{form},{format_prune(method)}", batch=3, start=START)
    before = [surviving_rows(state, b) for b in range(3)]
    assert [len(before[b][0][0]) for b in range(3)] == list(LENGTHS)
    state.prune()
    state.state.pools.check()
    for b, length in enumerate(LENGTHS):
        keep = max(-(-length * 3 // 10), NUM_PROTECTED_ROWS)
        after = surviving_rows(state, b)
        counts = [len(keys) for keys, _ in after]
        assert sum(counts) == HEADS * keep and ("adaptive" in method or set(counts) == {keep})
        tolerance = 0.0 if form == "raw" else 0.3  # sealed a second time at new positions
        for (keys, values), (old_keys, old_values) in zip(after, before[b], strict=True):
            assert torch.equal(keys[-8:], old_keys[-8:]) or form != "raw"
            now, old_rows = torch.cat([keys, values], 1), torch.cat([old_keys, old_values], 1)
            gaps = (now[:, None] - old_rows).norm(dim=-1)
            nearest = gaps.min(1)
            assert float(nearest.values.max()) <= tolerance * (2 * DIM) ** 0.5 + 1e-4
            assert (nearest.indices.diff() > 0).all()  # each once, in order
    for seed in range(100, 500, 100):
        view = state.append(*(make_noise(3, HEADS, 1, DIM, seed=seed + side) for side in (0, 1)))
        q = make_noise(3, HEADS * GROUP, 1, DIM, seed=seed + 2)
        for backend in list_readers(view):
            out = attend(q, view, backend=backend)
            for b in range(3):
                for h, (keys, values) in enumerate(surviving_rows(state, b)):
                    query_heads = slice(GROUP * h, GROUP * (h + 1))
                    visible = torch.ones(1, 1, len(keys), dtype=torch.bool)
                    expected = oracle.exact_attention(
                        q[b : b + 1, query_heads], keys[None, None], values[None, None], visible
                    )
                    worst = 1e-5 if backend == "reference" or form == "raw" else COARSE
                    assert float((out[b : b + 1, query_heads] - expected).abs().max()) < worst


@needed
@pytest.mark.usefixtures("gpu_page_layout")
@pytest.mark.parametrize("form", ["raw", "affine8", "affine4v8", "turbo4"])
def test_triton_kernels_read_pruned_rows(form: str) -> None:
    state = prefill_layer(f"{form},prune=snapkv:30%:adaptive", batch=3, start=START)
    state.prune()
    view = state.append(*(make_noise(3, HEADS, 1, DIM, seed=side) for side in (60, 61)))
    q = make_noise(3, HEADS * GROUP, 1, DIM, seed=62)
    actual, expected = (attend(q, view, backend=name) for name in (NAME, "reference"))
    assert float((actual - expected).abs().max()) < 2e-3


def top_indices(scores: Tensor, count: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return sorted(order[:count])


def brute_force(method: str, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """Compute the scores of all rows [H, n], one at a time."""
    count = keys.shape[1]
    scores = torch.zeros(HEADS, count, dtype=torch.float64)
    for h in range(HEADS):
        if method == "keydiff":
            mean = sum(k / k.norm() for k in keys[h]) / count
            for i, k in enumerate(keys[h]):
                scores[h, i] = -(k @ mean) / (k.norm() * mean.norm())
            continue
        width = {"snapkv": 64, "tova": 1, "expected": 512}[method]
        group = queries[GROUP * h : GROUP * (h + 1), -width:] * DIM**-0.5
        if method == "expected":
            for head_queries in group:
                mean, spread = head_queries.mean(0), head_queries.T.cov(correction=0)
                logits = torch.stack([mean @ k + k @ spread @ k / 2 for k in keys[h]])
                scores[h] += logits.softmax(0) / GROUP
            scores[h] *= values[h].norm(dim=1)
            scores[h, :4] = torch.inf
            continue
        for head_queries in group:
            for t, q in enumerate(head_queries):
                visible = count - len(head_queries) + t + 1
                weights = torch.stack([q @ k for k in keys[h, :visible]]).softmax(0)
                scores[h, :visible] += weights / (len(head_queries) * GROUP)
        if method == "snapkv":
            padded = torch.nn.functional.pad(scores[h], (2, 2))
            scores[h] = torch.stack([padded[i : i + 5].mean() for i in range(count)])
    return scores.mean(0).repeat(HEADS, 1) if method == "tova" else scores


@pytest.mark.parametrize("chunk", [300, 77])
@pytest.mark.parametrize("method", [name for name in OWN_SCORES if name != "random"])
def test_rows_with_the_best_scores_survive(method: str, chunk: int) -> None:
    state = prefill_layer(f"raw,prune={method}:80", chunk=chunk)
    inputs = [make_noise(1, n, 300, DIM, seed=i)[0].double() for i, n in enumerate((3, 3, 6))]
    scores = brute_force(method, *inputs)
    scores[:, -NUM_PROTECTED_ROWS:] = torch.inf
    expected = [top_indices(scores[h], 80) for h in range(HEADS)]
    state.prune()
    for h, (keys, _) in enumerate(surviving_rows(state)):
        assert torch.equal(keys, make_noise(1, HEADS, 300, DIM)[0, h, expected[h]])


def test_heads_share_the_rows_chosen_by_the_total_score() -> None:
    state = prefill_layer("raw,prune=snapkv:80:adaptive")
    inputs = [make_noise(1, n, 300, DIM, seed=i)[0].double() for i, n in enumerate((3, 3, 6))]
    scores = brute_force("snapkv", *inputs)
    scores[:, -NUM_PROTECTED_ROWS:] = torch.inf
    safe = [set(top_indices(scores[h], NUM_PROTECTED_ROWS)) for h in range(HEADS)]
    candidates = [(-float(scores[h, i]), h, i) for h in range(HEADS) for i in range(300)]
    candidates = sorted(
        candidate for candidate in candidates if candidate[2] not in safe[candidate[1]]
    )
    for _, h, i in candidates[: HEADS * (80 - NUM_PROTECTED_ROWS)]:
        safe[h].add(i)
    state.prune()
    kept_keys = [keys for keys, _ in surviving_rows(state)]
    assert [len(keys) for keys in kept_keys] == [len(candidate) for candidate in safe]
    assert len(set(map(len, kept_keys))) > 1
    for h, keys in enumerate(kept_keys):
        assert torch.equal(keys, make_noise(1, HEADS, 300, DIM)[0, h, sorted(safe[h])])


def test_prune_that_keeps_all_changes_no_bit() -> None:
    plain, pruned = prefill_layer("affine4"), prefill_layer("affine4,prune=snapkv:100%")
    assert pruned.prune() == 0
    for seed in (100, 200):
        assert torch.equal(attend_next_token(plain, seed), attend_next_token(pruned, seed))


@pytest.mark.parametrize("form", ["raw", "affine8", "affine4", "turbo3,tail=0"])
@pytest.mark.parametrize("count", [20, 64, 300, 1000])
def test_surviving_bytes_are_planned_exactly(form: str, count: int) -> None:
    spec = f"{form},prune=random:25%"
    state = prefill_layer(spec, batch=2, count=count, chunk=count)
    shape = kvant.Shape(1, HEADS, DIM, DIM, torch.float32)
    plan = kvant.plan(shape, spec, context=count, sequences=2)
    assert state.nbytes <= plan.nbytes
    state.prune()
    assert state.nbytes == plan.nbytes_kept


def test_memory_equals_that_of_the_surviving_rows() -> None:
    state = prefill_layer("raw,prune=random:64", count=1000, chunk=1000)
    before = state.nbytes
    assert state.prune() == 936
    page = 2 * 64 * DIM * 4
    assert before == 16 * HEADS * page and state.nbytes == 2 * HEADS * page
    assert state.length == 1000 and state.prune() == 0


@pytest.mark.parametrize("method", ["tova", "keydiff", "random", "snapkv"])
def test_scores_that_allow_it_prune_during_decode(method: str) -> None:
    state, lengths = prefill_layer(f"affine8,prune={method}:64"), []
    for seed in range(1000, 1000 + 10 * (2 * MAX_DECODE_EXCESS + 5), 10):
        state.prune()
        lengths.append(len(surviving_rows(state)[0][0]))
        attend_next_token(state, seed)
    if method == "snapkv":
        assert lengths == list(range(64, 64 + len(lengths)))
    else:
        assert lengths == [64 + i % (MAX_DECODE_EXCESS + 1) for i in range(len(lengths))]
    state.state.pools.check()


def test_second_prompt_is_pruned_together_with_the_reply() -> None:
    state = prefill_layer("raw,prune=snapkv:25%")
    state.prune()
    view = state.append(*(make_noise(1, HEADS, 100, DIM, seed=n) for n in (7, 8)))
    attend(make_noise(1, HEADS * GROUP, 100, DIM, seed=9), view)
    assert state.prune() == 75 and len(surviving_rows(state)[0][0]) == 100


def test_rewind_to_pruned_rows_is_refused() -> None:
    state = prefill_layer("affine8,prune=keydiff:64")
    state.prune()
    for seed in (100, 200, 300):
        attend_next_token(state, seed)
    expected = [attend_next_token(state, 400), state.rewind(303)][0]
    assert torch.equal(attend_next_token(state, 400), expected)
    assert state.reachable(299) == 0 and state.reachable(300) == 300
    for length in (299, 1):
        with pytest.raises(RewindError, match="pruned rows are lost"):
            state.rewind(length)
    assert state.length == 304
    state.rewind(300)
    assert state.trim(300) == 300 and state.length == 0
    state.state.pools.check()


def test_prune_without_queries_raises_and_changes_nothing() -> None:
    state = LayerCache(make_spec("affine8,prune=snapkv:64"))
    state.append(make_noise(1, HEADS, 300, DIM), make_noise(1, HEADS, 300, DIM, seed=1))
    before = state.nbytes
    with pytest.raises(CacheError, match="were not recorded"):
        state.prune()
    assert state.nbytes == before and state.length == 300
    state.state.pools.check()


def test_partly_rewound_prompt_is_pruned_by_its_remaining_queries() -> None:
    part = prefill_layer("raw,prune=snapkv:64")
    part.rewind(290)
    same = [make_noise(1, n, 300, DIM, seed=i)[:, :, :290] for i, n in enumerate((3, 3, 6))]
    whole = LayerCache(make_spec("raw,prune=snapkv:64"))
    attend(same[2], whole.append(*same[:2]))
    # 10 of the 64 queries were rewound.
    assert whole.prune() == part.prune() == 226


VERBS: dict[str, Callable[[LayerCache], None]] = {
    "fork": lambda state: None,
    "select": lambda state: state.select([2, 0, 0]),
    "extract": lambda state: None,
    "move": lambda state: state.cache.move("cpu"),
    "widen": lambda state: state.ensure_slack(64),
    "restore": lambda state: state.restore(state.snapshot()),
}


@pytest.mark.parametrize("form", ["raw", "affine4,tail=0", "turbo3"])
@pytest.mark.parametrize("moment", ["before", "behind"])
@pytest.mark.parametrize("verb", VERBS)
def test_operations_keep_the_surviving_rows(verb: str, moment: str, form: str) -> None:
    """Recorded queries survive all operations before a prune, except snapshots, which hold none."""
    method = "keydiff" if verb == "restore" else "snapkv"
    state = prefill_layer(f"{form},prune={method}:40:adaptive", batch=3, start=START)
    plain = state.fork()
    if moment == "behind":
        plain.prune(), state.prune()
    VERBS[verb](state)
    if verb == "restore" and moment == "before":
        return  # a restored cache has no recorded prompt
    chosen = [0, 1, 2]
    if verb == "select":
        chosen = [2, 0, 0]
    if verb == "fork":
        state = state.fork()
    if verb == "extract":
        state, chosen = LayerCache(state.spec, cache=state.cache.extract(1)), [1]
    if moment == "before":
        plain.prune(), state.prune()
    state.state.pools.check()
    rows = [make_noise(3, HEADS, 1, DIM, seed=n) for n in (50, 51)]
    q = make_noise(3, HEADS * GROUP, 1, DIM, seed=52)
    expected = attend(q, plain.append(*rows))[chosen]
    actual = attend(q[chosen], state.append(*(r[chosen] for r in rows)))
    assert torch.allclose(actual, expected, atol=1e-6)
    state.state.pools.check()


def test_caches_of_different_lengths_are_merged() -> None:
    states = [
        prefill_layer("affine4,prune=snapkv:25%:adaptive", count=n, chunk=n) for n in (400, 130, 90)
    ]
    for state in states:
        state.prune()
    merged = LayerCache(states[0].spec, cache=kvant.merge([state.cache for state in states]))
    rows = [make_noise(3, HEADS, 1, DIM, seed=n) for n in (50, 51)]
    q = make_noise(3, HEADS * GROUP, 1, DIM, seed=52)
    actual = attend(q, merged.append(*rows))
    for b, state in enumerate(states):
        single = attend(q[b : b + 1], state.append(*(r[b : b + 1] for r in rows)))
        assert torch.allclose(actual[b : b + 1], single, atol=1e-6)
    merged.state.pools.check()
    merged.remove(0)
    assert merged.lengths == [131, 91]


def test_fork_of_a_pruned_cache_shares_its_pages() -> None:
    state = prefill_layer("affine8,prune=keydiff:128")
    other = state.fork()
    state.prune()
    assert other.length == 300 and len(surviving_rows(other)[0][0]) == 300
    fork = state.fork()
    pooled = measure_pools(state)
    assert pooled["nbytes_shared"] > 0
    assert torch.equal(attend_next_token(fork, 100), attend_next_token(state, 100))
    for state_ in (other, fork, state):
        state_.state.pools.check()


@pytest.mark.parametrize("method", ["keydiff:100", "keydiff:100:adaptive"])
def test_file_holds_the_surviving_rows(tmp_path: Path, method: str) -> None:
    state = prefill_layer(f"affine4,prune={method}", batch=3, start=START)
    state.prune()
    kvant.save(state.cache, tmp_path / "cache")
    head = read_header(tmp_path / "cache")
    assert (head.padded_lengths, head.count_key_heads("0/keys.open")) == ((300,) * 3, HEADS)
    loaded = LayerCache(state.spec, cache=kvant.load(tmp_path / "cache"))
    assert torch.equal(attend_next_token(state, 100), attend_next_token(loaded, 100))
    assert loaded.reachable(299) == 0
    loaded.state.pools.check()


@pytest.mark.parametrize("method", ["keydiff:100", "keydiff:100:adaptive"])
def test_recode_stores_the_surviving_rows(method: str) -> None:
    state, plain = (prefill_layer(f"raw,prune={method}") for _ in range(2))
    state.prune(), plain.prune()
    state.recode(
        replace(state.spec, keys=make_spec("affine8").keys, values=make_spec("fp8").values)
    )
    state.state.pools.check()
    expected, actual = attend_next_token(plain, 100), attend_next_token(state, 100)
    assert not torch.equal(actual, expected) and float((actual - expected).abs().max()) < 0.1
    with pytest.raises(SpecError, match="reset"):
        state.recode(make_spec("affine8"))
    other = prefill_layer("raw")
    if "adaptive" not in method:
        other.recode(make_spec(f"affine8,prune={method}"))
        assert other.prune() == 200 and other.length == 300
        return
    with pytest.raises(SpecError, match="stores key heads separately"):
        other.recode(make_spec(f"affine8,prune={method}"))


def make_bad_snapshots() -> Iterator[tuple[str, Callable[[Snapshot], Snapshot]]]:
    def edit_layer(column: int, value: int, row: int = 0) -> Callable[[Snapshot], Snapshot]:
        def make_bad_snapshot(good: Snapshot) -> Snapshot:
            numbers = good.tensors["numbers"].clone()
            numbers[row, column] = value
            return Snapshot({**good.tensors, "numbers": numbers}, good.numbers)

        return make_bad_snapshot

    yield "a head that is further", edit_layer(0, 301)
    yield "pruned behind the end", edit_layer(6, 301)
    yield "pruned before what stays", edit_layer(6, 100)
    yield "heads that were pruned at other lengths", edit_layer(6, 299)
    yield "a head without rows", edit_layer(5, 300)
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
                name: tensor if name == "numbers" else tensor.repeat_interleave(2, 1)
                for name, tensor in good.tensors.items()
            },
            good.numbers,
        ),
    )
    yield "nobody knows how many heads", lambda good: Snapshot(good.tensors, {})


@pytest.mark.parametrize(
    "forge",
    [forge_ for _, forge_ in make_bad_snapshots()],
    ids=[n for n, _ in make_bad_snapshots()],
)
def test_inconsistent_snapshot_is_refused(forge: Callable[[Snapshot], Snapshot]) -> None:
    state = prefill_layer("affine8,prune=keydiff:100:adaptive")
    state.prune()
    other = prefill_layer("affine8,prune=keydiff:100:adaptive")
    with pytest.raises(kvant.SnapshotMismatch):
        other.restore(forge(state.snapshot()))
    assert other.length == 300 and len(surviving_rows(other)[0][0]) == 300


def test_learned_sinks_take_their_share_of_the_softmax() -> None:
    state = prefill_layer("raw,prune=random:50")
    state.prune()
    view = state.append(*(make_noise(1, HEADS, 1, DIM, seed=n) for n in (50, 51)))
    q, logits = make_noise(1, HEADS * GROUP, 1, DIM, seed=52), make_noise(HEADS * GROUP, seed=53)
    out, lse = attend(q, view, sink_logits=logits, return_lse=True)
    for h, (keys, values) in enumerate(surviving_rows(state)):
        for g in range(GROUP):
            position = GROUP * h + g
            scores = torch.cat(
                [keys @ q[0, position, 0] * DIM**-0.5, logits[position : position + 1]]
            )
            expected = scores.softmax(0)[:-1] @ values
            assert torch.allclose(out[0, position, 0], expected, atol=1e-5)
            assert torch.allclose(lse[0, position, 0], scores.logsumexp(0), atol=1e-5)


def test_column_masks_are_refused_after_a_prune() -> None:
    state = prefill_layer("raw,prune=random:50")
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool)
    q = make_noise(1, HEADS * GROUP, 1, DIM, seed=52)
    every = attend(q, state.view())
    assert torch.allclose(attend(q, state.view(), mask=mask), every, atol=1e-6)
    by_head = mask.expand(1, HEADS * GROUP, 1, 300).clone()
    by_head[:, 0, :, :200] = False
    actual = attend(q, state.view(), mask=by_head)
    assert torch.allclose(actual[:, 1:], every[:, 1:], atol=1e-6)
    assert not torch.allclose(actual[:, 0], every[:, 0], atol=1e-3)
    state.prune()
    with pytest.raises(kvant.UnsupportedView, match="counts columns"):
        attend(q, state.view(), mask=mask)
    assert attend(q, state.view(), mask=Mask()).isfinite().all()


def test_failed_forward_after_a_prune_is_rolled_back() -> None:
    cache = kvant.Cache(2, "affine8,prune=keydiff:64")
    for layer in cache:
        layer.append(make_noise(1, HEADS, 300, DIM), make_noise(1, HEADS, 300, DIM, seed=1))
    cache.prune()
    before = cache.nbytes
    cache[0].append(make_noise(1, HEADS, 1, DIM), make_noise(1, HEADS, 1, DIM))
    cache.rollback()
    assert (cache.length, cache.nbytes) == (300, before)
    cache.state.pools.check()


def test_failed_prune_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvant.Cache(2, "affine8,prune=keydiff:64")
    for layer in cache:
        layer.append(make_noise(1, HEADS, 300, DIM), make_noise(1, HEADS, 300, DIM, seed=1))

    def broken(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "write_retained_rows", broken)
        with pytest.raises(MemoryError):
            cache.prune()
    cache.state.pools.check()
    assert cache.length == 300 and cache[0].read()[0].shape[2] == 300
    assert cache.prune() == 236


def test_each_head_scores_its_own_rows() -> None:
    """Padding has no queries, and evicted rows are no candidates."""
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


def prefill_turn(state: LayerCache, count: int, seed: int = 1000) -> None:
    for position in range(count):
        attend_next_token(state, seed + 10 * position)


def test_queries_of_a_failed_forward_are_dropped() -> None:
    cache = kvant.Cache(2, "raw,prune=snapkv:64")
    rows = [make_noise(1, n, 400, DIM, seed=i) for i, n in enumerate((HEADS, HEADS, HEADS * GROUP))]
    for part, layers in ((slice(0, 300), (0, 1)), (slice(300, 400), (0,))):
        for layer in layers:
            keys, values, queries = (side[:, :, part] for side in rows)
            attend(queries, cache[layer].append(keys, values))
    cache.rollback()
    other = prefill_layer("raw,prune=snapkv:64")
    assert cache.prune() == other.prune() == 236
    for actual, expected in zip(cache[0].read(), other.read(), strict=True):
        assert torch.equal(actual, expected)


def test_queries_of_rewound_tokens_are_dropped() -> None:
    state, whole = (prefill_layer("raw,prune=snapkv:64") for _ in range(2))
    state.rewind(290)
    same = [make_noise(1, n, 300, DIM, seed=i)[:, :, 290:] for i, n in enumerate((3, 3, 6))]
    attend(same[2], state.append(*same[:2]))
    assert state.prune() == whole.prune() == 236  # by 64 queries again
    for actual, expected in zip(state.read(), whole.read(), strict=True):
        assert torch.equal(actual, expected)
    rewound = prefill_layer("raw,prune=snapkv:64")
    rewound.rewind(200)  # the queries of the remaining tokens are unknown, so their rows stay
    assert rewound.prune() == 0 and attend_next_token(rewound, 100).isfinite().all()


def test_queries_of_a_layer_are_recorded_once_per_forward() -> None:
    """Other layers may read the same rows with their own queries."""
    state, whole = (LayerCache(make_spec("raw,prune=snapkv:64")) for _ in range(2))
    rows = [make_noise(1, n, 300, DIM, seed=i) for i, n in enumerate((HEADS, HEADS, HEADS * GROUP))]
    for part in (slice(0, 290), slice(290, 300)):
        keys, values, queries = (side[:, :, part] for side in rows)
        for state_, times in ((state, 2), (whole, 1)):
            view = state_.append(keys, values)
            for time in range(times):
                attend(queries if time == 0 else -queries, view)
    assert state.prune() == whole.prune() == 236
    assert torch.equal(state.read()[0], whole.read()[0])


@pytest.mark.parametrize("method", ["snapkv", "snapkv:adaptive"])
def test_queries_of_wrong_shape_are_refused_before_they_are_recorded(method: str) -> None:
    state = prefill_layer(f"raw,{format_prune(method)}")
    view = state.append(*(make_noise(1, HEADS, 4, DIM, seed=n) for n in (1, 2)))
    for shape in ((1, 4, 4, DIM), (2, 6, 4, DIM), (1, 6, 4, DIM + 1)):
        with pytest.raises(ValueError, match="do not fit keys of"):
            attend(make_noise(*shape), view)
    with pytest.raises(ValueError, match="mask"):
        attend(make_noise(1, 6, 4, DIM), view, mask=torch.ones(1, 3, 4, 304, dtype=torch.bool))
    assert state.prune() > 0


def test_column_masks_are_refused_for_a_single_head() -> None:
    state = LayerCache(make_spec("raw,prune=keydiff:50"))
    state.append(make_noise(1, 1, 300, DIM), make_noise(1, 1, 300, DIM, seed=1))
    state.prune()
    with pytest.raises(kvant.UnsupportedView, match="counts columns"):
        attend(
            make_noise(1, 2, 1, DIM), state.view(), mask=torch.ones(1, 1, 1, 300, dtype=torch.bool)
        )


@pytest.mark.parametrize("method", KINDS)
def test_surviving_rows_do_not_depend_on_the_batch(method: str) -> None:
    batch = prefill_layer(f"raw,{format_prune(method)}", batch=3, start=START)
    for b, length in enumerate(LENGTHS):
        single = LayerCache(make_spec(f"raw,{format_prune(method)}"))
        rows = [
            make_noise(3, n, 300, DIM, seed=i)[b : b + 1, :, 300 - length :]
            for i, n in enumerate((3, 3, 6))
        ]
        attend(rows[2], single.append(*rows[:2]))
        single.prune()
        if b == 0:
            batch.prune()
        for actual, expected in zip(surviving_rows(batch, b), surviving_rows(single), strict=True):
            assert torch.equal(actual[0], expected[0])


def test_prompt_is_pruned_when_it_is_merged() -> None:
    """The sources of a merge stay unchanged."""
    fresh, pruned = (prefill_layer("raw,prune=snapkv:64", count=n, chunk=n) for n in (300, 200))
    pruned.prune()
    merged = LayerCache(fresh.spec, cache=kvant.merge([pruned.cache, fresh.cache]))
    assert int((merged.positions()[1] >= 0).sum()) == 64
    assert int((fresh.positions() >= 0).sum()) == 300
    merged.state.pools.check(), fresh.state.pools.check()


@pytest.mark.parametrize("method", ["tova", "keydiff"])
def test_merging_into_a_decoding_batch_changes_no_other_sequence(method: str) -> None:
    first, second = (prefill_layer(f"raw,prune={method}:64", count=n, chunk=n) for n in (300, 200))
    prefill_turn(first, MAX_DECODE_EXCESS + 1)
    merged = LayerCache(first.spec, cache=kvant.merge([first.cache, second.cache]))
    before = merged.positions()
    prefill_turn(merged, 3)
    assert int((before[0] >= 0).sum()) == 64 + MAX_DECODE_EXCESS + 1
    assert int((merged.positions()[0] >= 0).sum()) == 67
    merged.state.pools.check()


@pytest.mark.parametrize("method", ["tova", "keydiff", "snapkv"])
def test_single_token_of_a_prompt_triggers_no_prune(method: str) -> None:
    state, whole = (
        prefill_layer(f"raw,prune={method}:64", count=299, chunk=299),
        prefill_layer(f"raw,prune={method}:64"),
    )
    rows = [make_noise(1, n, 300, DIM, seed=i)[:, :, 299:] for i, n in enumerate((3, 3, 6))]
    with state.cache.prompt_mode():
        attend(rows[2], state.append(*rows[:2]))
    assert int((state.positions() >= 0).sum()) == 300
    state.prune(), whole.prune()
    assert torch.equal(state.read()[0], whole.read()[0])


def test_memory_of_a_fixed_capacity_is_planned() -> None:
    spec = "affine8,capacity=1024,prune=keydiff:100"
    shape = kvant.Shape(1, HEADS, DIM, DIM, torch.float32)
    plan = kvant.plan(shape, spec, context=300)
    state = prefill_layer(spec)
    state.prune()
    prefill_turn(state, 150)
    assert state.nbytes == plan.nbytes_kept == plan.nbytes


def test_prune_reallocates_once() -> None:
    state, moves = prefill_layer("affine8,prune=snapkv:100"), []
    for seed in range(200):
        attend_next_token(state, 5000 + 10 * seed)
        moves.append(id(state.cache[0].storage))
    assert len(set(moves)) == 1


def test_append_of_no_tokens_prunes_nothing() -> None:
    state = prefill_layer("raw,prune=keydiff:64")
    count = state.cache.num_rows
    state.append(*torch.zeros(2, 1, HEADS, 0, DIM))
    assert state.cache.num_rows == count > 64
