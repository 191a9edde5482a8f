"""Test the second pass of `prune=kvzip`: its weights, its refusals, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as TokenSequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvant
from generation.speakers import Numbers
from hf.reading import text
from hf.zoo import build
from kvant.cache.pruning import NUM_PROTECTED_ROWS, needs_second_pass
from kvant.cache.reports import measure_pools
from kvant.cache.row_weights import RowWeights
from kvant.engine import Engine
from kvant.engine.batch import Batch
from kvant.engine.request import Request, Sequence
from kvant.engine.scheduler import ChunkSizer, Decode, Prefill, Repeat
from kvant.generation import TransformersDecoder, second_pass
from kvant.generation.decoder import Prefiller
from kvant.generation.sampling import DraftTarget, DraftToken
from kvant.generation.second_pass import Repetition, SecondPass

SPEC, KEEP = "raw,prune=kvzip:25%", 64
FAMILIES = ("llama", "gemma2", "gpt_oss", "gemma3n", "falcon_h1", "qwen3_next")
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "ignore_end": True}


class Letters(Numbers):
    """Numbers, and a token for each letter of a request to repeat the text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("\n"):
            return [3 + ord(letter) % 100 for letter in text[2:-2:4]]
        return super().encode(text, add_special_tokens)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat short prompts in several chunks, and a chunk in several forwards."""
    monkeypatch.setattr(second_pass, "MAX_CHUNK", 100)
    monkeypatch.setattr(second_pass, "MAX_FORWARD", 48)


def make_decoder(model: Any) -> TransformersDecoder:
    kvant.attach(model, "raw", guard=False)
    return TransformersDecoder(model)


def make_second_pass(spec: Any, max_length: int | None = 512) -> SecondPass:
    found = SecondPass.from_spec(spec, Letters(), max_length)
    assert found is not None
    return found


def prefill(decoder: TransformersDecoder, spec: str, prompt: list[int]) -> Any:
    """Return the cache of a prompt, before its second pass."""
    cache = decoder.make_cache(spec)
    with cache.prompt_mode():
        decoder.compute_logits(prompt, cache)
    return cache


def run_pass(decoder: TransformersDecoder, cache: Any, prompt: list[int]) -> RowWeights:
    repetition = make_second_pass(cache.spec).start(prompt)
    while repetition.inputs:
        repetition.run_chunk(decoder.compute_logits, cache)
    return repetition.weights


@torch.no_grad()
def expect_weights(name: str, prompt: list[int], inputs: list[list[int]]) -> list[Tensor]:
    """Return the largest weights [query heads, rows] of each layer, by the model's own attention.

    Each chunk follows the whole prompt, in one forward without a cache.
    """
    model, count = build(name, attn_implementation="eager"), len(prompt)
    largest: list[Tensor] = []
    for tokens in inputs:
        out = model(torch.tensor([prompt + tokens]), output_attentions=True, use_cache=False)
        weights = [layer[0, :, count:, :count].amax(1) for layer in out.attentions]
        largest = [torch.maximum(*pair) for pair in zip(largest or weights, weights, strict=True)]
    return largest


@pytest.mark.parametrize("adaptive", ["", ":adaptive"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_rows_with_the_largest_weights_survive(name: str, adaptive: str) -> None:
    """Softcaps (gemma2) and sink logits (gpt_oss) are part of the weights."""
    decoder, prompt = make_decoder(build(name)), text(220)
    cache = prefill(decoder, f"raw,prune=kvzip:{KEEP}{adaptive}", prompt)
    inputs = [*make_second_pass(cache.spec).start(prompt).inputs]
    assert [len(tokens) > 100 for tokens in inputs] == [True, True, False]
    expected = expect_weights(name, prompt, inputs)
    before = {i: layer.read() for i, layer in cache.states.layers.items()}
    weights = run_pass(decoder, cache, prompt)
    pruned = {leaf.index: leaf for leaf in cache.state.layout.attention if leaf.spec.prune}
    assert weights.by_leaf.keys() == pruned.keys() and pruned
    for index, actual in weights.by_leaf.items():
        by_head = expected[index].view(len(actual), -1, len(prompt)).amax(1)
        assert torch.allclose(actual, by_head, atol=1e-5)
        if adaptive:
            continue
        actual[:, -NUM_PROTECTED_ROWS:] = 2.0
        rows = cache.states.layers[index].read()
        for h, head in enumerate(actual):
            kept = head.topk(KEEP).indices.sort().values
            for side in (0, 1):
                assert torch.equal(rows[side][0, h, -KEEP:], before[index][side][0, h, kept])


@pytest.mark.parametrize("form", ["affine8", "turbo4v4", "affine4,rotate"])
def test_formats_change_weights_little(form: str) -> None:
    decoder, prompt = make_decoder(build("llama")), text(220)
    exact, rounded = (
        run_pass(decoder, prefill(decoder, f"{spec},prune=kvzip:{KEEP}", prompt), prompt)
        for spec in ("raw", form)
    )
    for index, weights in rounded.by_leaf.items():
        distance = (weights - exact.by_leaf[index]).abs().mean()
        assert float(distance) < (0.01 if form == "affine8" else 0.1)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompt = make_decoder(build("llama")), text(120)
    results = []
    for limit in (1 << 22, 1000):
        monkeypatch.setattr("kvant.cache.row_weights.MAX_LOGITS", limit)
        results.append(run_pass(decoder, prefill(decoder, SPEC, prompt), prompt).by_leaf)
    for index, weights in results[0].items():
        assert torch.allclose(weights, results[1][index], atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_pass_leaves_nothing_but_the_prune(name: str) -> None:
    """The layers without a prune continue as if there had been no second pass."""
    decoder, prompt = make_decoder(build(name)), text(150)
    cache, plain = (prefill(decoder, spec, prompt) for spec in ("raw,prune=kvzip:100%", "raw"))
    run_pass(decoder, cache, prompt)
    assert cache.length == 150 and cache.states.nbytes_used == plain.states.nbytes_used
    rows = [decoder.compute_logits([7], cache_) for cache_ in (cache, plain)]
    assert torch.allclose(*rows, atol=1e-4)
    cache.state.pools.check()


def fail_at(monkeypatch: pytest.MonkeyPatch, chunk: int, act: Callable[[], None]) -> None:
    """Call `act` instead of this chunk's last forward."""
    run, count = Repetition._run_on_fork, iter(range(1000))

    def run_on_fork(self: Repetition, run_forward: Any, cache: Any, tokens: list[int]) -> None:
        if next(count) == chunk:
            run(self, run_forward, cache, tokens[:60])  # its rows are on a fork
            act()
        run(self, run_forward, cache, tokens)

    monkeypatch.setattr(Repetition, "_run_on_fork", run_on_fork)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupted_pass_leaves_the_prompt_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompt = TransformersDecoder(build("llama")), text(250)
    cache = decoder.make_cache(SPEC)
    prefiller = Prefiller(decoder, cache, second_pass=make_second_pass(cache.spec))
    with monkeypatch.context() as patch:
        fail_at(patch, 1, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prefiller.prefill(prompt)
    cache.state.pools.check()
    assert cache.length == 250 and needs_second_pass(cache.state)
    held = [measure_pools(c.states)["nbytes_held"] for c in (cache, prefill(decoder, SPEC, prompt))]
    assert held[0] == held[1]
    with pytest.raises(kvant.CacheError, match="second pass over the prompt, which were not rec"):
        cache.prune()
    logits = prefiller.prefill(prompt)  # prefills the last token again
    assert not needs_second_pass(cache.state) and logits.isfinite().all()
    assert int((cache.states[0].positions() >= 0).sum(-1).max()) == 63


@pytest.mark.parametrize("spec", [SPEC, "affine8,prune=kvzip:40:adaptive"])
def test_loop_prunes_to_the_planned_bytes(spec: str) -> None:
    model, prompt = build("llama"), text(300)
    decoder = TransformersDecoder(model)
    cache = decoder.make_cache(spec)
    prefiller = Prefiller(decoder, cache, second_pass=make_second_pass(cache.spec))
    prefiller.prefill(prompt)
    planned = kvant.plan(model, spec, context=300)
    allowed = planned.nbytes_kept * (1.25 if "adaptive" in spec else 1)  # each head rounds to pages
    assert planned.nbytes_kept <= cache.nbytes <= allowed < planned.nbytes
    cache.state.pools.check()


@pytest.mark.parametrize("spec", [SPEC, "affine8,prune=kvzip:40:adaptive"])
def test_engine_gives_the_tokens_of_the_loop(spec: str) -> None:
    model, prompts = build("llama"), [text(n, seed=n) for n in (20, 330, 250)]
    single = [
        [s.token for s in kvant.generate(model, Letters(), prompt, kv_cache=spec, **OPTIONS)]
        for prompt in prompts
    ]
    pruned = [prompt for prompt in prompts if len(prompt) > 100]
    plain = [
        [s.token for s in kvant.generate(model, Letters(), prompt, **OPTIONS)] for prompt in pruned
    ]
    assert plain != single[1:]
    with Engine(model, Letters(), spec) as engine:
        streams = [engine.submit(prompt, n=2, temperature=0.0, **OPTIONS) for prompt in prompts]
        for stream, tokens in zip(streams, single, strict=True):
            replies: dict[int, list[int]] = {0: [], 1: []}
            for step in stream:
                replies[step.choice].append(step.token)
            assert replies == {0: tokens, 1: tokens}
        assert engine.stats()["nbytes_held"] == 0
        engine._worker.batch.caches.empty_cache.state.pools.check()


def test_engine_stays_within_the_bytes_that_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = build("llama"), text(300)
    repeat, held = Batch.repeat, list[int]()

    def measure(self: Batch, *args: Any) -> None:
        repeat(self, *args)
        pools = self.caches.stats([])
        held.append(pools["nbytes_held"] + pools["nbytes_free"])

    monkeypatch.setattr(Batch, "repeat", measure)
    for spec in ("raw,prune=kvzip:25%", "affine8,prune=kvzip:25%"):
        with Engine(model, Letters(), spec, max_bytes="1MiB") as engine:
            budget = engine._worker.scheduler.memory_budget
            request = Request(0, len(prompt), OPTIONS["max_new_tokens"])
            need = budget.count_peak(request) + budget.count_transient([request])
            limit = budget.compute_fresh_nbytes(need)
        refused = pytest.raises(kvant.ContextError)
        with Engine(model, Letters(), spec, max_bytes=limit - 1) as engine, refused:
            engine.submit(prompt, **OPTIONS)
        with Engine(model, Letters(), spec, max_bytes=limit) as engine:
            assert len(engine.submit(prompt, **OPTIONS).result().tokens) == 20
        assert 0 < max(held) <= limit and len(held) == 3
        held.clear()


def test_cancel_during_the_pass_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []
    with Engine(build("llama"), Letters(), SPEC) as engine:
        fail_at(monkeypatch, 1, lambda: streams[0].cancel())
        streams.append(engine.submit(text(300), **OPTIONS))
        result = streams[0].result()
        assert not result.tokens and engine.stats()["nbytes_held"] == 0
        other = engine.submit(text(250), **OPTIONS).result()  # also after a failed one
        assert len(other.tokens) == 20
        engine._worker.batch.caches.empty_cache.state.pools.check()


def test_failed_pass_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    with Engine(build("llama"), Letters(), SPEC) as engine:
        fail_at(monkeypatch, 1, fail)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.submit(text(300), **OPTIONS).result()
        assert len(engine.submit(text(250), **OPTIONS).result().tokens) == 20
        assert engine.stats()["nbytes_held"] == 0


def test_sequence_swapped_out_during_the_pass_continues(tmp_path: Path) -> None:
    model, prompt = build("llama"), text(300)
    decoder, replies = make_decoder(model), []
    for swaps in (False, True):
        batch, sequence = Batch(decoder, decoder.make_cache(SPEC)), Sequence(list(prompt))
        logits = batch.prefill(sequence, 300)
        repetition = make_second_pass(batch.caches.empty_cache.spec).start(prompt)
        while repetition.inputs:
            batch.repeat(sequence, repetition)
            if swaps and repetition.inputs:
                batch.caches.swap_out(sequence, tmp_path / "swapped", is_decoding=False)
                batch.caches.swap_in(sequence, model)
        replies.append([])
        for _ in range(10):
            replies[-1].append(int(logits.argmax()))
            sequence.tokens.append(replies[-1][-1])
            logits = batch.decode([sequence])[0][0]
    assert replies[0] == replies[1]


def test_scheduler_repeats_a_prompt_before_its_first_token() -> None:
    request = Request(0, 300, 5, num_repeats_left=3, is_active=True)
    sizer, actions = ChunkSizer(512), []
    while not isinstance(action := sizer.choose_forward([request], 0.1), Decode):
        actions.append(type(action))
        if isinstance(action, Prefill):
            request.num_computed_tokens += action.count
        else:
            request.num_repeats_left -= 1
    assert actions == [Prefill, Repeat, Repeat, Repeat] and request.is_decoding


class WrongDrafts:
    """Propose tokens of which at most the first few are right."""

    def propose_drafts(
        self, tokens: TokenSequence[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        return [DraftToken(3 + (7 * len(tokens) + i) % 120) for i in range(min(max_drafts, 4))]

    def fork(self) -> WrongDrafts:
        return self


@pytest.mark.parametrize("score", ["kvzip", "snapkv"])
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_rejected_drafts_are_not_a_prompt(
    name: str, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent models compute accepted drafts again, from their last checkpoint."""
    model, prompt, starts = build(name), text(200), list[int]()
    start = SecondPass.start

    def count_start(self: SecondPass, tokens: TokenSequence[int]) -> Repetition:
        starts.append(len(tokens))
        return start(self, tokens)

    monkeypatch.setattr(SecondPass, "start", count_start)
    plain, drafted = (
        [
            s.token
            for s in kvant.generate(
                model, Letters(), prompt, kv_cache=f"raw,prune={score}:25%", draft=draft, **OPTIONS
            )
        ]
        for draft in (None, WrongDrafts())
    )
    assert drafted == plain
    assert starts == [200] * 2 * (score == "kvzip")


def test_conversation_repeats_all_its_tokens(tmp_path: Path) -> None:
    model = build("llama")
    session, lengths = kvant.Session(model, Letters(), SPEC), []
    for seed in range(3):
        list(session.send(text(100, seed=seed), max_new_tokens=8, ignore_end=True))
        lengths.append(int((session.cache.states[0].positions() >= 0).sum(-1).max()))
    assert lengths == [32 + 7, 208 // 4 + 7, 316 // 4 + 7]
    session.save(tmp_path / "talk")
    loaded = kvant.Session.load(tmp_path / "talk", model, Letters())
    for session_ in (session, loaded):
        list(session_.send(text(50, seed=9), max_new_tokens=8, ignore_end=True))
    assert loaded.tokens == session.tokens
    assert kvant.load(tmp_path / "talk").length == 316 + 7  # to inspect it


REFUSED: dict[str, Callable[[Any], Any]] = {
    "cache_for": lambda model: kvant.cache_for(model, SPEC),
    "attach": lambda model: kvant.attach(model, SPEC),
    "Cache": lambda model: kvant.Cache(2, SPEC),
    "Sequences": lambda model: kvant.Sequences(2, SPEC),
    "recode": lambda model: kvant.Cache(2, "raw,prune=keydiff:25%").recode(SPEC),
}


@pytest.mark.parametrize("user", REFUSED)
def test_caches_without_a_model_refuse_the_score(user: str) -> None:
    model = build("llama")
    with pytest.raises(kvant.SpecError) as error:
        REFUSED[user](model)
    message = str(error.value)
    assert "prune=kvzip:25%: the score needs a second pass of the model over the prompt" in message
    assert "use kvant.generate, kvant.Session, kvant.Engine or `kvant run`" in message
    assert "\n" not in message and not kvant.hf.get_attachments(model)


def test_prompt_without_room_to_repeat_it_is_refused() -> None:
    model = build("llama")  # of 512 positions
    with pytest.raises(kvant.ContextError, match=r"480 tokens with .*kvzip.* shorten it to 4"):
        kvant.generate(model, Letters(), text(480), kv_cache=SPEC)
    with Engine(model, Letters(), SPEC) as engine, pytest.raises(kvant.ContextError, match="480"):
        engine.submit(text(480))
    steps = list(kvant.generate(model, Letters(), text(410), kv_cache=SPEC, **OPTIONS))
    assert len(steps) == 20  # in smaller chunks


def test_model_that_reads_dense_rows_itself_is_refused() -> None:
    model = build("llama", attn_implementation="eager")
    with pytest.raises(kvant.CacheError, match=r"not recorded: .*\(kvant\.attach\)"):
        next(kvant.generate(model, Letters(), text(200), kv_cache=SPEC))
