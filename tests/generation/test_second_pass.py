"""Test the second pass of `prune=kvzip`: its weights, its refusals, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
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
from kvant.cache.row_attention import RowAttention
from kvant.engine import Engine
from kvant.engine import engine as engine_module
from kvant.engine.actions import Decode, Prefill, Repeat
from kvant.engine.batch import Batch
from kvant.engine.chunk_sizer import ChunkSizer
from kvant.engine.request import Request, Sequence
from kvant.generation import TransformersDecoder, second_pass
from kvant.generation.prefiller import Prefiller
from kvant.generation.second_pass import Repetition, SecondPass
from kvant.generation.speculation import DraftTarget

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
    monkeypatch.setattr(second_pass, "MAX_REPEATED_TOKENS", 100)
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


def run_pass(decoder: TransformersDecoder, cache: Any, prompt: list[int]) -> RowAttention:
    repetition = make_second_pass(cache.spec).start(prompt)
    repetition.run(decoder.compute_logits, cache)
    return repetition.attention


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
def test_rows_with_the_max_attention_survive(name: str, adaptive: str) -> None:
    """Softcaps (gemma2) and sink logits (gpt_oss) are part of the weights."""
    decoder, prompt = make_decoder(build(name)), text(220)
    cache = prefill(decoder, f"raw,prune=kvzip:{KEEP}{adaptive}", prompt)
    inputs = [*make_second_pass(cache.spec).start(prompt).chunks]
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
        monkeypatch.setattr("kvant.cache.row_attention.MAX_LOGITS", limit)
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


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Call `act` after this forward on a fork, which has its rows then."""
    compute_logits, count = TransformersDecoder.compute_logits, iter(range(1000))

    def compute(self: TransformersDecoder, ids: list[int], cache: Any, num_logits: int = 1) -> Any:
        logits = compute_logits(self, ids, cache, num_logits)
        if cache.states.holder.row_attention is not None and next(count) == number:
            assert cache.length > cache.states.holder.row_attention.num_columns
            act()
        return logits

    monkeypatch.setattr(TransformersDecoder, "compute_logits", compute)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupted_pass_leaves_the_prompt_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompt = TransformersDecoder(build("llama")), text(250)
    cache = decoder.make_cache(SPEC)
    prefiller = Prefiller(decoder, cache, second_pass=make_second_pass(cache.spec))
    with monkeypatch.context() as patch:
        fail_at(patch, 4, interrupt)  # of three a chunk
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
def test_engine_gives_the_tokens_of_the_loop(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_pass, "MAX_FORWARD", 512)  # a fork is one forward in both
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
    with Engine(model, Letters(), spec, chunk_seconds=60) as engine:  # chunks of the loop
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
            request = make_request(0, len(prompt), OPTIONS["max_new_tokens"])
            memory_model = budget.memory_model
            transient = memory_model.count_transient_slots(request.num_prompt_tokens)
            limit = memory_model.compute_nbytes(budget.count_peak(request) + transient)
        refused = pytest.raises(kvant.ContextError)
        with Engine(model, Letters(), spec, max_bytes=limit - 1) as engine, refused:
            engine.submit(prompt, **OPTIONS)
        with Engine(model, Letters(), spec, max_bytes=limit) as engine:
            assert len(engine.submit(prompt, **OPTIONS).result().tokens) == 20
        assert 0 < max(held) <= limit and len(held) == 3  # forwards, each of a whole chunk
        held.clear()


def test_cancel_during_the_pass_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted, streams = Event(), list[Any]()

    def cancel() -> None:
        assert submitted.wait(60)
        streams[0].cancel()

    monkeypatch.setattr(engine_module, "MAX_PREFILL_CHUNK", 64)  # several forwards a fork
    with Engine(build("llama"), Letters(), SPEC) as engine:
        fail_at(monkeypatch, 4, cancel)
        streams.append(engine.submit(text(300), **OPTIONS))
        submitted.set()
        result = streams[0].result()
        assert not result.tokens and engine.stats()["nbytes_held"] == 0
        other = engine.submit(text(250), **OPTIONS).result()  # also after a failed one
        assert len(other.tokens) == 20
        engine._worker.batch.caches.empty_cache.state.pools.check()


def test_failed_pass_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine_module, "MAX_PREFILL_CHUNK", 64)  # several forwards a fork
    with Engine(build("llama"), Letters(), SPEC) as engine:
        fail_at(monkeypatch, 4, fail)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.submit(text(300), **OPTIONS).result()
        assert len(engine.submit(text(250), **OPTIONS).result().tokens) == 20
        assert engine.stats()["nbytes_held"] == 0


def test_sequence_swapped_out_during_the_pass_continues(tmp_path: Path) -> None:
    model, prompt = build("llama"), text(300)
    decoder, replies, swapped = make_decoder(model), list[list[int]](), list[int]()
    for swaps in (False, True):
        batch, sequence = Batch(decoder, decoder.make_cache(SPEC)), Sequence(list(prompt))
        logits = batch.prefill(sequence, 300)
        repetition = make_second_pass(batch.caches.empty_cache.spec).start(prompt)
        while repetition.chunks:
            batch.repeat(sequence, repetition, 64)
            if swaps and repetition.chunks and repetition.fork is not None and len(swapped) < 2:
                swapped.append(repetition.position)
                repetition.drop_fork()
                batch.caches.swap_out(sequence, tmp_path / "swapped", is_decoding=False)
                batch.caches.swap_in(sequence, model)
        replies.append([])
        for _ in range(10):
            replies[-1].append(int(logits.argmax()))
            sequence.tokens.append(replies[-1][-1])
            logits = batch.decode([sequence])[0][0]
    assert replies[0] == replies[1] and swapped == [364, 364]


def make_request(number: int, num_tokens: int, max_new_tokens: int) -> Request:
    """Return a request whose prompt is repeated."""
    repetition = make_second_pass(kvant.parse(SPEC, 1)).start(text(num_tokens))
    request = Request(number, num_tokens, max_new_tokens, repetition=repetition)
    request.is_active = True
    return request


def perform(action: Prefill | Repeat) -> None:
    """Change the counts of a request like a forward and its prune."""
    if isinstance(action, Prefill):
        action.request.num_computed_tokens += action.count
        return
    repetition: Any = action.request.repetition
    num_columns = repetition.attention.num_columns
    assert num_columns <= action.position == repetition.position
    repetition.fork = Fork(action.position + action.count)
    assert repetition.fork.length <= repetition.chunk_end
    if repetition.fork.length == repetition.chunk_end:
        repetition.drop_fork()
        repetition.chunks.popleft()


@dataclass
class Fork:
    length: int


def test_scheduler_repeats_a_prompt_in_chunks_before_its_first_token() -> None:
    request, sizer, actions = make_request(0, 300, 5), ChunkSizer(64), list[Any]()
    num_tokens = request.num_tokens_left
    assert num_tokens > 600
    while not isinstance(action := sizer.choose_forward([request], 0.1), Decode):
        assert isinstance(action, Prefill | Repeat) and 0 < action.count <= 64
        actions.append(action)
        perform(action)
    kinds = [type(action) for action in actions]
    assert kinds == [Prefill] * 5 + [Repeat] * (len(kinds) - 5) and request.is_decoding
    assert sum(action.count for action in actions) == num_tokens


def test_repeating_prompts_do_not_keep_shorter_ones_waiting() -> None:
    """Every second chunk is of the prompt with the fewest tokens left, its repetition included."""
    oldest, repeating, short = (make_request(i, n, 5) for i, n in enumerate((400, 300, 20)))
    short.repetition = None
    short.num_prompt_tokens = 200
    sizer, requests = ChunkSizer(64), [oldest, repeating, short]
    repeating.num_computed_tokens = 300
    for _ in range(10):
        action = sizer.choose_forward(requests, 0.1)
        assert isinstance(action, Prefill | Repeat)
        sizer.record_forward(action, requests)
        perform(action)
        if short.is_decoding:
            break
    assert short.is_decoding


@pytest.mark.parametrize("n", [1, 2])
def test_single_token_needs_no_second_pass(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SecondPass, tokens: TokenSequence[int]) -> Repetition:
        raise AssertionError(len(tokens))

    monkeypatch.setattr(SecondPass, "start", refuse)
    model, prompt = build("llama"), text(480)  # without room to repeat it
    [step] = kvant.generate(model, Letters(), prompt, kv_cache=SPEC, max_new_tokens=1)
    with Engine(model, Letters(), SPEC) as engine:
        stream = engine.submit(prompt, n=n, temperature=0.0, max_new_tokens=1)
        assert [result.tokens for result in stream.results()] == [(step.token,)] * n or n == 1
        embedding = engine.embed(prompt, kvant.checkpoints.pooling.Pooling("mean")).result()
        assert len(embedding)


def test_session_prunes_after_a_single_token() -> None:
    session = kvant.Session(build("llama"), Letters(), SPEC)
    list(session.send(text(200), max_new_tokens=1, ignore_end=True))
    assert int((session.cache.states[0].positions() >= 0).sum(-1).max()) == 50


def test_attention_of_other_tokens_is_refused() -> None:
    decoder, prompt = make_decoder(build("llama")), text(120)
    cache = prefill(decoder, SPEC, prompt)
    with pytest.raises(kvant.CacheError, match="of 90 rows for a cache of 120 tokens"):
        cache.prune(RowAttention(90))


def test_mask_tensor_during_a_pass_is_refused() -> None:
    cache = kvant.Cache.from_spec(kvant.CacheSpec(kvant.parse(SPEC, 1).layers))
    rows = torch.randn(1, 2, 100, 32)
    cache[0].append(rows, rows)
    with cache.record_attention(RowAttention(100)), cache.prompt_mode():
        view = cache[0].append(rows[:, :, :4], rows[:, :, :4])
        with pytest.raises(kvant.CacheError, match=r"a mask tensor \[1, 1, 4, 104\] during a sec"):
            kvant.attend(rows[:, :, :4], view, mask=torch.ones(1, 1, 4, 104, dtype=torch.bool))


def test_threshold_without_a_cache_needs_no_room() -> None:
    """The strategies that store nothing of a prompt do not repeat it."""
    options: dict[str, Any] = {"kv_cache": SPEC, "max_new_tokens": 2, "ignore_end": True}
    for strategy in ({"strategy": "disabled"}, {"strategy": "long", "threshold": 500}):
        assert (
            len([*kvant.generate(build("llama"), Letters(), text(480), **options, **strategy)]) == 2
        )


class WrongDrafts:
    """Propose tokens of which at most the first few are right."""

    def propose_drafts(
        self, tokens: TokenSequence[int], max_drafts: int, target: DraftTarget
    ) -> list[int]:
        return [3 + (7 * len(tokens) + i) % 120 for i in range(min(max_drafts, 4))]

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


def test_model_that_reads_dense_rows_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward on a fork tells."""
    model = build("llama", attn_implementation="eager")
    run_next, counts = Repetition.run_next, list[int]()

    def count_run(self: Repetition, run_forward: Any, cache: Any, count: int) -> None:
        counts.append(count)
        run_next(self, run_forward, cache, count)

    monkeypatch.setattr(Repetition, "run_next", count_run)
    with pytest.raises(kvant.CacheError, match=r"not recorded: .*\(kvant\.attach\)"):
        next(kvant.generate(model, Letters(), text(200), kv_cache=SPEC))
    assert len(counts) == 1


def test_plain_callable_is_told_to_bring_a_model() -> None:
    with pytest.raises(kvant.SpecError, match="which a transformers model can run"):
        kvant.generate(lambda ids, cache: ids, Letters(), [3], kv_cache=kvant.parse(SPEC, 2))
