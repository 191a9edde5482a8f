"""Test drafts in the engine: every reply is the one without drafts, whatever happens."""

from __future__ import annotations

import random
from functools import wraps
from typing import Any, ClassVar

import pytest
import torch

import kvant
from engine.test_engine import (
    VOCABULARY,
    generate_alone,
    make_engine,
    make_prompts,
    no_leaks,
    wait_until_idle,
)
from generation.draft_times import EvenClock
from generation.speakers import DEMO, model_of, tokenizer_of
from hf.zoo import build, valid_spec
from kvant.generation import Grammar
from kvant.generation.speculation import DraftSizer, NGramDrafter
from kvant.hf.model import get_cache_argument
from thin import thin_rows

pytestmark = pytest.mark.usefixtures(no_leaks.__name__, "every_draft_is_verified")
SPECS = (
    "raw",
    "affine8",
    "affine4,tail=3",
    "affine4,window=30,sinks=4",
    "raw,prune=keydiff:25%",
    "affine8,prune=snapkv:25%",
    "raw,prune=tova:25%",
    "raw,capacity=200",
)
FAMILIES = ("llama", "gemma3", "mistral", "gpt_oss", "llama4", "bloom", "falcon_h1", "qwen3_next")
CELLS = [
    (name, spec)
    for spec in SPECS
    for name in FAMILIES
    if valid_spec(name, spec) == spec and not ("window" in spec and name == "bloom")
]  # bloom's own attention cannot apply a window
WITHOUT_DRAFTS = ("llama4", "bloom")  # their attention does not support them in batches
REPLY = 40


def make_repetitive_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of different lengths whose second half repeats the first."""
    return [2 * prompt for prompt in make_prompts(count, seed=seed, longest=30)]


class NoisyDrafter:
    """Proposes the tokens of known texts, of which some are changed; their number varies."""

    texts: ClassVar[list[list[int]]] = []

    def propose_drafts(self, tokens: list[int], max_drafts: int) -> list[int]:
        length = len(tokens)
        known = next((text for text in self.texts if text[:length] == tokens), [])
        draw = random.Random(length)
        count = min(max_drafts, draw.randint(0, 8))
        return [
            token if draw.random() < 0.8 else draw.randrange(3, VOCABULARY)
            for token in known[length : length + count]
        ]


@pytest.fixture
def known_texts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list for the texts from which drafts come."""
    texts: ClassVar[list[list[int]]] = []
    monkeypatch.setattr(NoisyDrafter, "texts", texts)
    monkeypatch.setattr("kvant.engine.drafts.NGramDrafter", NoisyDrafter)
    return texts


def submit_all(engine: kvant.Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": REPLY, "ignore_end": True, **options}
    streams = [engine.submit(prompt, **options) for prompt in prompts]
    return [list(stream.result().tokens) for stream in streams]


@pytest.mark.parametrize(("name", "spec"), thin_rows(CELLS))
def test_replies_are_those_without_drafts(
    name: str, spec: str, known_texts: list[list[int]]
) -> None:
    """In batches and alone: hybrids verify drafts only alone."""
    model, prompts, replies = build(name), make_repetitive_prompts(3, seed=1), []
    for draft in (None, "ngram"):
        with make_engine(model, spec, draft=draft, chunk_seconds=60) as engine:
            replies.append(submit_all(engine, prompts))
            known_texts += [p + reply for p, reply in zip(prompts, replies[0], strict=True)]
            assert submit_all(engine, prompts[:1]) == replies[0][:1]
            stats = engine.stats()
            wait_until_idle(engine)
    assert replies[0] == replies[1]
    if name not in WITHOUT_DRAFTS:
        assert 0 < stats["drafts_accepted"] <= stats["drafts"]


def test_hybrids_that_are_joined_lose_no_accepted_draft(known_texts: list[list[int]]) -> None:
    """Alone, the first one returns to checkpoints; then it decodes in a batch."""
    model, prompts = build("falcon_h1"), make_repetitive_prompts(3, seed=1)
    expected = [generate_alone(model, prompt, max_new_tokens=200) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    with make_engine(model, draft="ngram", chunk_seconds=60) as engine:
        streams = []
        for prompt in prompts:
            streams.append(engine.submit(prompt, max_new_tokens=200, ignore_end=True))
            for _ in range(20):
                next(streams[0])
        assert [list(stream.result().tokens) for stream in streams] == expected
        assert engine.stats()["drafts_accepted"] > 0
        wait_until_idle(engine)


def test_accepted_drafts_are_marked(known_texts: list[list[int]]) -> None:
    model, prompts, steps = build("llama"), make_repetitive_prompts(4), list[kvant.Step]()
    expected = [generate_alone(model, prompt, max_new_tokens=99) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    with make_engine(model, draft="ngram") as engine:
        assert submit_all(engine, prompts, max_new_tokens=99, on_step=steps.append) == expected
        stats = engine.stats()
    assert 100 < sum(step.drafted for step in steps) == stats["drafts_accepted"] < stats["drafts"]
    assert stats["completion_tokens"] == len(steps) == 4 * 99


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_seeds_give_the_tokens_of_plain_sampling(
    temperature: float, known_texts: list[list[int]]
) -> None:
    model, prompts = build("llama"), make_repetitive_prompts(3)
    sampling = {"temperature": temperature, "seed": 5, "presence_penalty": 0.2}
    replies = list[list[Any]]()
    for draft in (None, "ngram"):
        steps = list[kvant.Step]()
        with make_engine(model, draft=draft) as engine:
            streams = [
                engine.submit(
                    prompt,
                    n=3,
                    logprobs=2,
                    max_new_tokens=REPLY,
                    ignore_end=True,
                    on_step=steps.append,
                    **sampling,
                )
                for prompt in prompts
            ]
            for prompt, stream in zip(prompts, streams, strict=True):
                known_texts += [[*prompt, *result.tokens] for result in stream.results()]
            accepted = engine.stats()["drafts_accepted"]
            likeliest = sorted((s.choice, [token for token, _ in s.likeliest]) for s in steps)
            texts = [[*result.tokens] for stream in streams for result in stream.results()]
            replies.append([texts, likeliest])
    assert replies[0] == replies[1] and accepted > 100


def test_grammars_are_followed() -> None:
    model, tokenizer = model_of(DEMO), tokenizer_of(DEMO)
    names = {"type": "array", "items": {"enum": ["os.path", "path"]}, "minItems": 8, "maxItems": 8}
    replies, accepted = [], 0
    for draft in (None, "ngram"):
        with kvant.Engine(model, tokenizer, "affine8", draft=draft) as engine:
            streams = [
                engine.submit(text, grammar=Grammar.json(names), max_new_tokens=99)
                for text in ("import ", "names = ")
            ]
            replies.append([stream.result().text for stream in streams])
            accepted = engine.stats()["drafts_accepted"]
    assert replies[0] == replies[1] and accepted > 0


@pytest.mark.parametrize("spec", ["raw", "affine8,window=40,sinks=2"])
def test_others_are_untouched_by_cancels_and_ends(spec: str, known_texts: list[list[int]]) -> None:
    model, prompts, draw = build("llama"), make_repetitive_prompts(8), random.Random(0)
    counts = [draw.randint(1, 60) for _ in prompts]
    expected = [
        generate_alone(model, prompt, spec, max_new_tokens=count)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    with make_engine(model, spec, draft="ngram", max_sequences=3, chunk_seconds=60) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=count, ignore_end=True)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        cancelled = engine.submit(prompts[0], max_new_tokens=5000, ignore_end=True)
        for _ in range(20):
            next(cancelled)
        cancelled.cancel()
        assert [list(stream.result().tokens) for stream in streams] == expected
        rest = list(cancelled.result().tokens)
        assert engine.stats()["drafts_accepted"] > 0
        wait_until_idle(engine)
    assert rest == generate_alone(model, prompts[0], spec, max_new_tokens=len(rest))


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
@pytest.mark.parametrize("fails", ["always", "once"])
def test_failed_verification_is_repeated_without_drafts(
    name: str, fails: str, known_texts: list[list[int]]
) -> None:
    """Of a hybrid, the computation of accepted drafts after a checkpoint may fail, too."""
    model, failures = build(name), list[int]()
    prompts = make_repetitive_prompts(3 if name == "llama" else 1)
    expected = [generate_alone(model, prompt, max_new_tokens=REPLY) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    forward = model.forward

    @wraps(forward)
    def fail(*args: Any, **kwargs: Any) -> Any:
        out, cache = forward(*args, **kwargs), kwargs[get_cache_argument(model)]
        is_draft = cache.states.holder.in_speculation and kwargs["input_ids"].shape[1] > 1
        if is_draft and (fails == "always" or len(failures) < 2):
            failures.append(1)
            raise RuntimeError("no memory")
        return out

    model.forward = fail
    with make_engine(model, draft="ngram") as engine:
        assert submit_all(engine, prompts) == expected
        wait_until_idle(engine)
    assert failures


@pytest.mark.parametrize(
    ("spec", "limit", "overcommit"),
    [
        ("raw", "300KiB", 3.0),
        ("affine8", "200KiB", 1.0),
        pytest.param("raw", "300KiB", 1.0, marks=pytest.mark.laws),
        pytest.param("affine8", "200KiB", 3.0, marks=pytest.mark.laws),
    ],
)
def test_the_limit_of_bytes_counts_drafts(
    spec: str, limit: str, overcommit: float, known_texts: list[list[int]]
) -> None:
    """`CheckedEngine` fails above it."""
    model, prompts = build("llama"), make_repetitive_prompts(6, seed=2)
    expected = [generate_alone(model, prompt, spec, max_new_tokens=99) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    options = {"max_bytes": limit, "overcommit": overcommit, "chunk_seconds": 60}
    with make_engine(model, spec, draft="ngram", **options) as engine:
        replies = submit_all(engine, prompts, max_new_tokens=99)
        # Rounding may change a code of a stored row, and then a token.
        assert replies == expected or (spec == "affine8" and all(len(r) == 99 for r in replies))
        assert engine.stats()["drafts_accepted"] > 0
        wait_until_idle(engine)


def test_replies_end_at_the_context_and_at_stop_strings(known_texts: list[list[int]]) -> None:
    model, prompts = build("llama", max_position_embeddings=64), make_repetitive_prompts(3, seed=4)
    replies = []
    for draft in (None, "ngram"):
        with make_engine(model, draft=draft) as engine:
            whole = submit_all(engine, prompts, max_new_tokens=1000)
            known_texts += [p + reply for p, reply in zip(prompts, whole, strict=True)]
            stop = f"<{whole[0][7]}>"
            results = [engine.submit(p, stop=stop, ignore_end=True).result() for p in prompts]
            replies.append([*whole, *(result.text for result in results)])
            wait_until_idle(engine)
    assert replies[0] == replies[1]


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_prefixes_hold_no_rejected_draft(name: str, known_texts: list[list[int]]) -> None:
    model, prompt = build(name), make_repetitive_prompts(1, seed=3)[0]
    prefixes = kvant.Prefixes(max_bytes="64MiB")
    spec = valid_spec(name, "affine8")
    known_texts.append(prompt + generate_alone(model, prompt, spec, max_new_tokens=70))
    with make_engine(model, spec, draft="ngram", prefixes=prefixes) as engine:
        reply = submit_all(engine, [prompt], max_new_tokens=70)[0]
        second = [*prompt, *reply, 5, 6, 7]
        stream = engine.submit(second, max_new_tokens=REPLY, ignore_end=True)
        tokens = list(stream.result().tokens)
        assert stream.result().usage.cached_tokens > 0
        assert engine.stats()["drafts_accepted"] > 0
    assert tokens == generate_alone(model, second, spec, max_new_tokens=REPLY)


def test_a_layer_that_refuses_drafts_is_decoded_without(known_texts: list[list[int]]) -> None:
    """Attention chunks of sequences of different lengths have no mask in transformers."""
    model, prompts = build("llama4"), make_repetitive_prompts(3)
    expected = [generate_alone(model, prompt, max_new_tokens=REPLY) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    with make_engine(model, draft="ngram", chunk_seconds=60) as engine:
        assert submit_all(engine, prompts) == expected
        batch = engine._worker.batch
        assert batch.ragged and not batch.verifies_drafts_in_batch


def test_invalid_drafts_are_refused() -> None:
    model = build("llama")
    with pytest.raises(
        ValueError, match="draft='medusa': 'ngram', a model of transformers, or None"
    ):
        make_engine(model, draft="medusa")
    for count in (0, 16):
        with pytest.raises(ValueError, match=f"max_drafts={count}: 1 to 15"):
            make_engine(model, draft="ngram", max_drafts=count)


def test_output_length_is_that_of_the_longest_unfinished_choice(
    known_texts: list[list[int]],
) -> None:
    """Its slots would otherwise exceed the limit that admitted the request."""
    model, prompt = build("llama"), make_repetitive_prompts(1)[0]
    known_texts.append(prompt + generate_alone(model, prompt, temperature=1.0, seed=1))
    lengths = list[int]()
    with make_engine(model, draft="ngram") as engine:
        set_length = engine._worker.scheduler.set_output_length

        def record(request: Any, num_tokens: int) -> None:
            lengths.append(num_tokens)
            set_length(request, num_tokens)

        engine._worker.scheduler.set_output_length = record  # type: ignore[method-assign]
        stream = engine.submit(
            prompt, n=3, max_new_tokens=99, ignore_end=True, temperature=1.0, seed=1
        )
        stream.results()
        wait_until_idle(engine)
    assert max(lengths) < 99


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `every_draft_is_verified`; all forwards take equally long, so drafts pay."""
    for module in ("generation.loop", "engine.drafts"):
        monkeypatch.setattr(f"kvant.{module}.DraftSizer", DraftSizer)
    for module in ("generation.loop", "engine.worker"):
        monkeypatch.setattr(f"kvant.{module}.time", EvenClock())


@pytest.mark.parametrize("case", ["replayed", "hooked", "unchunked", "recurrent", "batched"])
def test_measured_drafts_are_verified_where_they_pay(
    case: str, fake_clock: None, known_texts: list[list[int]]
) -> None:
    name = {"unchunked": "mamba", "recurrent": "falcon_h1"}.get(case, "llama")
    model, prompts = build(name), make_repetitive_prompts(3 if case == "batched" else 1)
    expected = [generate_alone(model, prompt, max_new_tokens=99) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    if case == "hooked":  # replays wait
        model.lm_head.register_forward_pre_hook(lambda *args: None)
    with make_engine(model, draft="ngram") as engine:
        assert submit_all(engine, prompts, max_new_tokens=99) == expected
        stats = engine.stats()
        wait_until_idle(engine)
    assert (stats["drafts_accepted"] > 10) == (case != "unchunked")


def test_slack_of_the_spec_covers_the_drafts(known_texts: list[list[int]]) -> None:
    model, prompts = build("llama"), make_repetitive_prompts(3)
    spec = "affine8,tail=1,slack=1"
    expected = [generate_alone(model, prompt, spec, max_new_tokens=REPLY) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    with make_engine(model, spec, draft="ngram", chunk_seconds=60) as engine:
        assert engine._spec.layers[0].slack == 9
        assert submit_all(engine, prompts) == expected
        assert engine.stats()["drafts_accepted"] > 0


def test_proposals_do_not_slow_down_with_the_length() -> None:
    """Only the newest tokens are indexed, and compared."""
    tokens = torch.randint(0, VOCABULARY, (5000,)).tolist()
    drafter, lengths = NGramDrafter(), list[int]()

    class Watched(list[int]):
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, slice):
                lengths.append(len(range(*key.indices(len(self)))))
            return super().__getitem__(key)

    for _ in range(5):
        drafter.propose_drafts(Watched(tokens), 8)
    lengths.clear()
    drafter.propose_drafts(Watched([*tokens, 7]), 8)
    assert sum(lengths) < 100


def test_long_texts_are_indexed_in_several_calls() -> None:
    tokens = [*range(12000), 7, 8]
    drafter = NGramDrafter()
    assert drafter.propose_drafts(tokens, 2) == [9, 10]
    assert drafter.propose_drafts([*tokens, 9000, 9001], 2) == []  # these were not indexed yet
    assert drafter.propose_drafts([*tokens, 9000, 9001], 2) == [9002, 9003]
    assert drafter.propose_drafts(tokens, 2) == [9, 10]  # rewound: indexed again


def test_a_refusal_in_a_batch_leaves_drafts_of_single_sequences(
    known_texts: list[list[int]],
) -> None:
    model, prompts = build("llama4"), make_repetitive_prompts(3)
    expected = [generate_alone(model, prompt, max_new_tokens=REPLY) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    with make_engine(model, draft="ngram", chunk_seconds=60) as engine:
        assert submit_all(engine, prompts) == expected
        before = engine.stats()["drafts_accepted"]
        assert submit_all(engine, prompts[:1]) == expected[:1]
        assert engine.stats()["drafts_accepted"] > before
        wait_until_idle(engine)


def test_verification_that_fails_is_not_tried_for_ever(
    fake_clock: None, known_texts: list[list[int]]
) -> None:
    model, prompts, failures = build("llama"), make_repetitive_prompts(1), list[int]()
    expected = [generate_alone(model, prompt, max_new_tokens=99) for prompt in prompts]
    known_texts += [p + reply for p, reply in zip(prompts, expected, strict=True)]
    forward = model.forward

    @wraps(forward)
    def fail(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs[get_cache_argument(model)]
        if cache.states.holder.in_speculation and kwargs["input_ids"].shape[1] > 1:
            failures.append(1)
            raise RuntimeError("no memory")
        return forward(*args, **kwargs)

    model.forward = fail  # not replayed, either
    with make_engine(model, draft="ngram") as engine:
        assert submit_all(engine, prompts, max_new_tokens=99) == expected
        wait_until_idle(engine)
    assert 0 < len(failures) <= 8  # twice for each number of drafts
