"""Requests side by side: what each gets is what it would get alone, whatever happens to others."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.zoo import FAMILIES, build
from kvant import Engine
from kvant.engine import Stream
from kvant.generation import TransformersDecoder
from kvant.hf import TransformersCache, get_attachments
from kvant.weights import is_packed

VOCABULARY = 128
DECODERS = [name for name, family in FAMILIES.items() if family.kind != "encoder-decoder"]
FEW = ("llama", "gemma3", "bloom", "llama4", "deepseek_v32", "falcon_h1", "mamba", "lfm2")


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(1, longest))]
        for _ in range(count)
    ]


def alone(model: Any, prompt: list[int], spec: str = "raw", **asked: Any) -> list[int]:
    steps = kvant.generate(model, Numbers(), prompt, kv_cache=spec, ignore_end=True, **asked)
    return [step.token for step in steps]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread, and no cache with pages."""
    yield
    assert not [one for one in threading.enumerate() if one.name == "kvant-engine"]
    gc.collect()
    caches = [
        one for one in gc.get_objects() if issubclass(type(one), TransformersCache) and one.nbytes
    ]
    assert not caches


class Watched(Engine):
    """An engine that ends with an error where its pools pass its limit after any step."""

    def _perform(self, action: Any) -> None:
        super()._perform(action)
        pools, limit = self._batch.stats([]), self._scheduler.max_bytes
        now = pools["nbytes_held"] + pools["nbytes_free"]
        assert limit is None or now <= limit, f"{now} bytes of {limit} after {action}"


def engine_for(model: Any, spec: str = "raw", **given: Any) -> Engine:
    return Watched(model, Numbers(), spec, **given)


def finished(engine: Engine) -> None:
    """Nothing is held once nobody is served."""
    while (told := engine.stats())["running"] or told["waiting"]:
        threading.Event().wait(0.001)
    engine.close()
    engine._batch.check()
    assert not any(engine._batch.stats([]).values()) and not engine._requests


def test_a_slow_dtype_is_logged_once_a_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvant.devices.is_slow", lambda dtype, device: dtype == torch.bfloat16)
    model = build("llama").bfloat16()
    for served in (model, model, build("llama")):
        engine_for(served).close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvant", "WARNING")
    assert "dtype=torch.float32" in record.getMessage()


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4,window=30,sinks=4", "turbo4v4"])
def test_tokens_are_those_of_each_alone(llama: Any, spec: str) -> None:
    asked = prompts(9, longest=90)
    counts = [5, 30, 1, 12, 70, 8, 8, 3, 20]
    with engine_for(llama, spec, max_sequences=4) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=n, ignore_end=True)
            for prompt, n in zip(asked, counts, strict=True)
        ]
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    for prompt, n, tokens in zip(asked, counts, found, strict=True):
        assert tokens == alone(llama, prompt, spec, max_new_tokens=n)


def families() -> list[Any]:
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.laws) for name in DECODERS]


@pytest.mark.parametrize("name", families())
def test_every_family_while_requests_come_and_go(name: str) -> None:
    model, chance = build(name), random.Random(name)
    asked = prompts(7, seed=1, longest=24)
    counts = [chance.randint(1, 9) for _ in asked]
    with engine_for(model, max_sequences=3) as engine:
        streams = []
        for prompt, n in zip(asked, counts, strict=True):
            streams.append(engine.submit(prompt, max_new_tokens=n, ignore_end=True))
            if chance.random() < 0.4:
                streams[-1].result()
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    for prompt, n, tokens in zip(asked, counts, found, strict=True):
        assert tokens == alone(model, prompt, max_new_tokens=n)


def test_what_is_drawn_does_not_depend_on_who_is_beside(llama: Any) -> None:
    asked = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_k": 20},
        {"temperature": 1.0, "seed": 3, "top_p": 0.8},
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": -6},
    ]
    texts = prompts(len(asked))
    with engine_for(llama) as engine:
        streams = [
            engine.submit(text, max_new_tokens=15, ignore_end=True, **one)
            for text, one in zip(texts, asked, strict=True)
        ]
        found = [list(stream.result().tokens) for stream in streams]
    for text, one, tokens in zip(texts, asked, found, strict=True):
        assert tokens == alone(llama, text, max_new_tokens=15, **one)


def test_steps_tell_text_and_why_it_ended(llama: Any) -> None:
    (prompt,) = prompts(1)
    tokens = alone(llama, prompt, max_new_tokens=12)
    stop = f"<{tokens[6]}>"
    with engine_for(llama) as engine:
        whole = engine.submit(prompt, max_new_tokens=12, ignore_end=True)
        assert "".join(step.text for step in whole) == "".join(f"<{t}>" for t in tokens)
        assert whole.result().finish_reason == "length"
        cut = engine.submit(prompt, max_new_tokens=12, ignore_end=True, stop=stop).result()
        assert cut.finish_reason == "stop" and stop not in cut.text
        assert cut.text == "".join(f"<{t}>" for t in tokens[: tokens.index(tokens[6])])
        assert cut.usage.prompt_tokens == len(prompt)
        assert cut.usage.completion_tokens == len(cut.tokens) == tokens.index(tokens[6]) + 1


def test_several_continuations_share_the_prompt(llama: Any) -> None:
    prompt = prompts(1)[0] * 20
    given = {"max_new_tokens": 9, "temperature": 1.0, "seed": 7}
    seen = []
    with engine_for(llama, "affine8,tail=0") as engine:
        stream = engine.submit(
            prompt,
            n=3,
            ignore_end=True,
            on_step=lambda step: seen.append(engine.stats()["nbytes_shared"]),
            **given,
        )
        found = [list(result.tokens) for result in stream.results()]
        assert {step.choice for step in stream} == {0, 1, 2}
        finished(engine)
    assert max(seen) > 0 and len(set(map(tuple, found))) == 3
    for index, tokens in enumerate(found):
        expected = alone(llama, prompt, "affine8,tail=0", **given | {"seed": 7 + index})
        assert tokens == expected


def test_the_likeliest_tokens_are_told(llama: Any) -> None:
    (prompt,) = prompts(1)
    with engine_for(llama) as engine:
        steps = list(engine.submit(prompt, max_new_tokens=4, logprobs=3, ignore_end=True))
    for step in steps:
        token, logprob = step.likeliest[0]
        assert len(step.likeliest) == 3 and token == step.token
        assert logprob == pytest.approx(step.logprob, abs=1e-5)
        assert [p for _, p in step.likeliest] == sorted(
            (p for _, p in step.likeliest), reverse=True
        )


def test_a_cancel_takes_effect_within_a_step(llama: Any) -> None:
    with engine_for(llama) as engine:
        other = engine.submit(prompts(1)[0], max_new_tokens=60, ignore_end=True)
        stream = engine.submit(prompts(2)[1], max_new_tokens=5000, ignore_end=True)
        first = next(stream)
        stream.cancel()
        rest = list(stream)
        result = stream.result()
        assert result.finish_reason == "cancelled" and len(result.tokens) == 1 + len(rest) < 5000
        assert result.tokens[0] == first.token
        assert len(other.result().tokens) == 60
        assert engine.stats()["cancelled"] == 1
        finished(engine)


def test_text_that_waits_for_a_stop_string_is_there_when_a_request_is_cancelled(llama: Any) -> None:
    (prompt,) = prompts(1)
    tokens = alone(llama, prompt, max_new_tokens=4)
    stop = f"<{tokens[1]}><999>"  # the second token may be its beginning: never the whole
    with engine_for(llama) as engine:
        two = threading.Event()
        stream = engine.submit(
            prompt,
            max_new_tokens=5000,
            stop=stop,
            ignore_end=True,
            on_step=lambda step: two.is_set() or (stream.usage.completion_tokens < 2 or two.set()),
        )
        two.wait(60)
        stream.cancel()
        result = stream.result()
    assert result.text == "".join(f"<{token}>" for token in result.tokens)


def test_who_asks_is_told_once_that_nothing_comes_any_more(llama: Any) -> None:
    told = []
    with engine_for(llama) as engine:
        stream = engine.submit(prompts(1)[0], max_new_tokens=3, ignore_end=True)
        stream.add_done_callback(lambda: told.append("early"))
        stream.result()
        finished(engine)
        assert stream.done
        stream.add_done_callback(lambda: told.append("late"))
    assert told == ["early", "late"]


def test_an_error_of_a_callback_is_nobody_elses(llama: Any) -> None:
    def fail() -> None:
        raise RuntimeError("too late")

    with engine_for(llama) as engine:
        stream = engine.submit(prompts(1)[0], max_new_tokens=30, ignore_end=True)
        stream.add_done_callback(fail)
        other = engine.submit(prompts(2)[1], max_new_tokens=40, ignore_end=True)
        assert len(stream.result().tokens) == 30 and len(other.result().tokens) == 40
        finished(engine)


def test_async_streams(llama: Any) -> None:
    asked = prompts(5)

    async def read(stream: Stream) -> list[int]:
        return [step.token async for step in stream]

    async def main(engine: Engine) -> list[list[int]]:
        streams = [engine.submit(p, max_new_tokens=10, ignore_end=True) for p in asked]
        return await asyncio.gather(*map(read, streams))

    with engine_for(llama) as engine:
        found = asyncio.run(main(engine))
    assert found == [alone(llama, prompt, max_new_tokens=10) for prompt in asked]


def test_an_error_of_who_is_told_ends_one_request(llama: Any) -> None:
    def fail(step: Any) -> None:
        raise ZeroDivisionError("mine")

    asked = prompts(3)
    with engine_for(llama) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=9, ignore_end=True, on_step=on)
            for prompt, on in zip(asked, (None, fail, None), strict=True)
        ]
        with pytest.raises(ZeroDivisionError, match="mine"):
            streams[1].result()
        for place in (0, 2):
            expected = alone(llama, asked[place], max_new_tokens=9)
            assert list(streams[place].result().tokens) == expected
        finished(engine)


class Dies(Exception):
    """What a forward of the tests dies of."""


def deadly(decoder: TransformersDecoder, token: int, chance: random.Random | None = None) -> Any:
    """A hook that lets forwards die halfway in which a token comes, or now and then."""
    layers = [m for m in decoder.model.modules() if type(m).__name__.endswith("MLP")]
    coming: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        coming[:] = [kwargs["input_ids"]]

    def within(module: Any, args: Any) -> None:
        bad = (coming[0] == token).any() and coming[0].shape[1] == 1
        if bad or (chance is not None and chance.random() < 0.05):
            raise Dies("halfway")

    return [
        decoder.model.register_forward_pre_hook(before, with_kwargs=True),
        layers[-1].register_forward_pre_hook(within),
    ]


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("spec", ["raw", "affine8,tail=0"])
def test_only_the_request_fails_that_a_forward_dies_of(name: str, spec: str) -> None:
    model = build(name)
    asked = prompts(4, seed=3, longest=80)
    expected = [alone(model, prompt, spec, max_new_tokens=20) for prompt in asked]
    others = {token for place in (0, 2, 3) for token in expected[place]}
    bad = next(t for t in expected[1][3:] if t not in others)
    hooks = deadly(TransformersDecoder(model), bad)
    try:
        with engine_for(model, spec) as engine:
            streams = [engine.submit(p, max_new_tokens=20, ignore_end=True) for p in asked]
            with pytest.raises(Dies):
                streams[1].result()
            found = [list(streams[place].result().tokens) for place in (0, 2, 3)]
            finished(engine)
    finally:
        for hook in hooks:
            hook.remove()
    assert found == [expected[place] for place in (0, 2, 3)]


def five_hundred(count: int) -> None:
    model, chance = build("llama"), random.Random(11)
    asked = prompts(count, seed=4)
    counts = [chance.randint(1, 25) for _ in asked]
    hooks = deadly(TransformersDecoder(model), -1, random.Random(12))
    lost = 0
    try:
        with engine_for(model, "affine8", max_sequences=12) as engine:
            streams = []
            for number, (prompt, n) in enumerate(zip(asked, counts, strict=True)):
                fails = number % 10 == 3

                def on(step: Any, fails: bool = fails) -> None:
                    if fails and chance.random() < 0.3:
                        raise ZeroDivisionError

                streams.append(engine.submit(prompt, max_new_tokens=n, ignore_end=True, on_step=on))
                if number % 7 == 5:
                    streams[chance.randrange(len(streams))].cancel()
            found: list[list[int] | None] = []
            for stream in streams:
                try:
                    result = stream.result()
                    found.append(list(result.tokens))
                except (ZeroDivisionError, Dies):
                    found.append(None)
                    lost += 1
            finished(engine)
    finally:
        for hook in hooks:
            hook.remove()
    assert count / 20 < lost < count / 2
    for prompt, n, tokens in zip(asked, counts, found, strict=True):
        if tokens is not None:
            assert tokens == alone(model, prompt, "affine8", max_new_tokens=n)[: len(tokens)]


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.laws)])
def test_cancels_errors_and_deaths_leave_nothing_behind(count: int) -> None:
    five_hundred(count)


def test_a_limit_of_bytes_for_four_serves_forty(llama: Any) -> None:
    asked = prompts(40, seed=5, longest=60)
    four = 4 * kvant.plan(llama, "affine8", context=70).nbytes
    most = []

    def look(step: Any) -> None:
        told = engine.stats()
        most.append((told["nbytes_held"] + told["nbytes_free"], told["sequences"]))

    with engine_for(llama, "affine8", max_bytes=four) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=10, ignore_end=True, on_step=look)
            for prompt in asked
        ]
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    assert max(nbytes for nbytes, _ in most) <= four and max(n for _, n in most) >= 4
    assert found == [alone(llama, prompt, "affine8", max_new_tokens=10) for prompt in asked]


@pytest.mark.parametrize("name", ["llama", pytest.param("falcon_h1", marks=pytest.mark.laws)])
def test_what_was_promised_too_much_waits_in_files(name: str) -> None:
    model, asked = build(name), prompts(5, seed=6, longest=20)
    few = 3 * kvant.plan(model, "raw", context=20).nbytes
    most = []

    def look(step: Any) -> None:
        told = engine.stats()
        most.append(told["nbytes_held"] + told["nbytes_free"])

    with engine_for(model, max_bytes=2 * few, overcommit=4.0) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=80, ignore_end=True, on_step=look)
            for prompt in asked
        ]
        found = [list(stream.result().tokens) for stream in streams]
        assert engine.stats()["put_aside"] > 0
        finished(engine)
    assert max(most) <= 2 * few
    assert found == [alone(model, prompt, max_new_tokens=80) for prompt in asked]


def test_the_model_is_packed_and_attached_for_as_long_as_it_is_served() -> None:
    model = build("llama", head_dim=64, hidden_size=128).bfloat16()
    for given, packed in (({}, True), ({"pack": False}, False)):
        with engine_for(model, **given) as engine:
            assert (
                len(engine.submit([5, 6], max_new_tokens=3, ignore_end=True).result().tokens) == 3
            )
            assert (is_packed(model), bool(get_attachments(model))) == (packed, True)
        assert not is_packed(model) and not get_attachments(model)
    kvant.pack(model)
    kvant.attach(model, "raw")
    with engine_for(model):
        pass
    assert is_packed(model) and get_attachments(model)


def test_a_closed_engine_cancels_what_it_served(llama: Any) -> None:
    engine = engine_for(llama)
    stream = engine.submit(prompts(1)[0], max_new_tokens=5000, ignore_end=True)
    next(stream)
    engine.close()
    assert stream.result().finish_reason == "cancelled"
    with pytest.raises(kvant.CacheError, match="closed"):
        engine.submit([5], max_new_tokens=1)
    engine.close()


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"prompt": []}, kvant.PromptError, "no tokens"),
        ({"prompt": [500]}, kvant.PromptError, "token 500"),
        ({"n": 0}, ValueError, "n=0: 1 or more"),
        ({"n": 17}, kvant.CapacityError, "n=17 with max_sequences=16"),
        ({"logprobs": -1}, ValueError, "logprobs=-1: 0 or more"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens=0"),
        ({"max_new_tokens": 10**6}, kvant.CapacityError, "of a limit of"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens=1.5: a whole number"),
        ({"priority": None}, TypeError, "priority=None: a whole number"),
        ({"temperature": -1.0}, ValueError, "temperature=-1.0"),
        ({"stop": ""}, ValueError, "stop"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_before_it_waits(
    llama: Any, given: dict[str, Any], error: type[Exception], told: str
) -> None:
    with engine_for(llama, max_bytes="1MiB", max_context=10**7) as engine:
        with pytest.raises(error, match=told):
            engine.submit(**{"prompt": [5, 6]} | given)
        assert engine.stats()["requests"] == 0
        assert len(engine.submit([5, 6], max_new_tokens=2, ignore_end=True).result().tokens) == 2


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"max_sequences": 0}, ValueError, "max_sequences=0"),
        ({"max_bytes": "much"}, kvant.SpecError, "much"),
        ({"max_bytes": 0}, ValueError, "max_bytes=0"),
        ({"overcommit": 0.0}, ValueError, "overcommit=0.0"),
        ({"overcommit": 2.0}, ValueError, "overcommit=2.0 of no max_bytes"),
        ({"chunk_seconds": 0.0}, ValueError, "chunk_seconds=0.0"),
        ({"backend": "cuda"}, ValueError, "cuda"),
    ],
    ids=str,
)
def test_a_wrong_engine_is_refused(
    llama: Any, given: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        engine_for(llama, **given)


def test_half_of_a_surrogate_pair_is_no_prompt(llama: Any) -> None:
    with (
        engine_for(llama) as engine,
        pytest.raises(kvant.PromptError, match=r"U\+D800 at character 1: half of a surrogate"),
    ):
        engine.submit("a\ud800", max_new_tokens=1)


def test_a_fork_of_the_process_cannot_submit(llama: Any) -> None:
    """The engine's thread is of the parent: the child would wait for ever."""
    with engine_for(llama) as engine:
        engine._pid = os.getpid() + 1
        with pytest.raises(kvant.EngineError, match="make an engine in the child"):
            engine.submit([5, 6], max_new_tokens=1)


def test_only_models_of_transformers_are_served() -> None:
    with pytest.raises(TypeError, match="models of transformers"):
        Engine(lambda ids, cache: torch.zeros(1, 1, 5), Numbers())


def test_statistics_tell_who_waits_and_how_long(llama: Any) -> None:
    with engine_for(llama, max_sequences=2, max_bytes="64MiB") as engine:
        streams = [engine.submit(p, max_new_tokens=8, ignore_end=True) for p in prompts(6)]
        for stream in streams:
            stream.result()
        told = engine.stats()
    assert (told["requests"], told["finished"], told["failed"]) == (6, 6, 0)
    assert told["completion_tokens"] == 48 and told["max_bytes"] == 64 << 20
    for name in ("first_token_seconds", "between_tokens_seconds"):
        assert 0 < told[name]["median"] <= told[name]["p95"]


@pytest.mark.parametrize("name", ["mamba", "falcon_h1"])
def test_statistics_tell_what_recurrent_layers_keep(name: str) -> None:
    model, most = build(name), []
    with engine_for(model, max_sequences=3) as engine:
        streams = [
            engine.submit(
                prompt,
                max_new_tokens=8,
                ignore_end=True,
                on_step=lambda step: most.append(engine.stats()["nbytes_states"]),
            )
            for prompt in prompts(3)
        ]
        for stream in streams:
            stream.result()
        finished(engine)
    one = kvant.plan(model, "raw", context=1).state_nbytes
    assert 3 * one <= max(most) <= 9 * one


def test_a_dead_thread_is_an_error_of_every_request(llama: Any) -> None:
    class Torn(BaseException):
        """Not an error that a request could have."""

    def tear(step: Any) -> None:
        raise Torn

    with engine_for(llama) as engine:
        torn = threading.Event()
        streams = [engine.submit([5], on_step=lambda step: torn.wait(60) and tear(step))]
        streams.append(engine.submit([6]))
        torn.set()
        for stream in streams:
            with pytest.raises(kvant.EngineError, match=r"the engine ended: .*Torn"):
                stream.result()
        with pytest.raises(kvant.CacheError, match="closed"):
            engine.submit([5])


def test_a_forward_that_dies_behind_all_layers_gave_nobody_a_token(llama: Any) -> None:
    """Without slack nothing could be taken back from behind a window."""
    spec, asked = "affine8,window=64,sinks=0,slack=0", prompts(2, seed=8, longest=99)
    expected = [alone(llama, prompt, spec, max_new_tokens=25) for prompt in asked]
    calls = []

    def die(module: Any, args: Any) -> None:
        calls.append(len(args[0]))
        if calls.count(2) == 9 and calls[-1] == 2:
            raise MemoryError("the logits")

    hook = llama.lm_head.register_forward_pre_hook(die)
    try:
        with engine_for(llama, spec) as engine:
            streams = [engine.submit(p, max_new_tokens=25, ignore_end=True) for p in asked]
            assert [list(stream.result().tokens) for stream in streams] == expected
            finished(engine)
    finally:
        hook.remove()
    assert calls.count(2) > 9


def test_a_capacity_is_taken_at_once_and_counts(llama: Any) -> None:
    spec = "raw,capacity=640"
    need = kvant.plan(llama, spec, context=1).nbytes
    with engine_for(llama, spec, max_bytes=need) as engine:
        streams = [engine.submit(p, max_new_tokens=5, ignore_end=True) for p in prompts(3)]
        assert all(len(stream.result().tokens) == 5 for stream in streams)
        with pytest.raises(kvant.CapacityError, match="context of"):
            engine.submit([5] * 700)
    with (
        engine_for(llama, spec, max_bytes=need - 1) as engine,
        pytest.raises(kvant.CapacityError, match="of a limit of"),
    ):
        engine.submit([5])


def test_bytes_that_nobody_can_tell_have_no_limit() -> None:
    with pytest.raises(kvant.CacheError, match="nobody can tell"):
        engine_for(build("deepseek_v32"), max_bytes="1GiB")


def test_a_cancelled_request_leaves_no_file(llama: Any) -> None:
    few = 2 * kvant.plan(llama, "raw", context=60).nbytes
    with engine_for(llama, max_bytes=few, overcommit=4.0) as engine:
        streams = [engine.submit(p, max_new_tokens=80, ignore_end=True) for p in prompts(5)]
        while not engine.stats()["put_aside"]:
            threading.Event().wait(0.001)
        for stream in streams:
            stream.cancel()
        while engine.stats()["running"] or engine.stats()["waiting"]:
            threading.Event().wait(0.001)
        folder = engine._swap_folder
        assert folder is not None and not list(folder.iterdir())
    assert not folder.exists()


def test_a_request_fails_once_however_many_continuations_it_has(llama: Any) -> None:
    def die(module: Any, args: Any) -> None:
        if args[0].shape[0] > 1 or calls:
            raise Dies
        calls.append(module)

    calls: list[Any] = []
    hook = llama.lm_head.register_forward_pre_hook(die)
    try:
        with engine_for(llama) as engine:
            stream = engine.submit([5, 6, 7], n=3, max_new_tokens=5, ignore_end=True)
            with pytest.raises(Dies):
                stream.results()
            assert engine.stats()["failed"] == 1
    finally:
        hook.remove()


def test_who_is_told_of_a_step_may_stop_or_close(llama: Any) -> None:
    def stop(step: Any) -> None:
        raise StopIteration

    with engine_for(llama) as engine:
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(engine.submit([5], max_new_tokens=5, ignore_end=True, on_step=stop))
        stream = engine.submit(
            [5], max_new_tokens=100, ignore_end=True, on_step=lambda step: engine.close()
        )
        assert stream.result().finish_reason == "cancelled" and len(stream.result().tokens) == 1


def test_logits_that_are_not_numbers_fail_their_own_request(llama: Any) -> None:
    def spoil(module: Any, args: Any, out: Any) -> Any:
        if len(out) == 2:
            out[-1] = torch.nan
        return out

    hook = llama.lm_head.register_forward_hook(spoil)
    try:
        with engine_for(llama) as engine:
            streams = [engine.submit([5 + i], max_new_tokens=6, ignore_end=True) for i in range(2)]
            told = []
            for stream in streams:
                try:
                    told.append(str(len(stream.result().tokens)))
                except ValueError as error:
                    told.append(str(error))
            assert sorted(told)[0] == "6" and "not numbers" in sorted(told)[1]
    finally:
        hook.remove()
