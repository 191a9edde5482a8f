"""Test concurrent requests: each gets the output it would get alone, whatever happens to others."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.reading import text
from hf.zoo import FAMILIES, build
from kvant import Engine
from kvant.engine import Stream
from kvant.engine.actions import Action, SwapOut
from kvant.engine.engine import _round_weights
from kvant.engine.scheduler import Scheduler
from kvant.generation import TransformersDecoder
from kvant.hf import TransformersCache, get_attachments
from kvant.native import get_library
from kvant.prefixes.memory import PrefixPools
from kvant.weights.packing import is_packed

VOCABULARY = 128
DECODERS = [name for name, family in FAMILIES.items() if family.kind != "encoder-decoder"]
FEW = ("llama", "gemma3", "bloom", "llama4", "deepseek_v32", "falcon_h1", "mamba", "lfm2")


def make_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(1, longest))]
        for _ in range(count)
    ]


def generate_alone(model: Any, prompt: list[int], spec: str = "raw", **options: Any) -> list[int]:
    steps = kvant.generate(model, Numbers(), prompt, kv_cache=spec, ignore_end=True, **options)
    return [step.token for step in steps]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Assert that no thread and no cache with pages is left."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "kvant-engine"]
    gc.collect()
    caches = [
        thread
        for thread in gc.get_objects()
        if issubclass(type(thread), TransformersCache) and thread.nbytes
    ]
    assert not caches


class CheckedEngine(Engine):
    """An engine that fails if its pools exceed its limit after any step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        worker, perform = self._worker, self._worker._perform

        def check_step(action: Any) -> None:
            perform(action)
            pools, limit = worker.batch.caches.stats([]), worker.scheduler.max_bytes
            now = pools["nbytes_held"] + pools["nbytes_free"]
            assert limit is None or now <= limit, f"{now} bytes of {limit} after {action}"

        worker._perform = check_step  # type: ignore[method-assign]


def make_engine(model: Any, spec: str = "raw", **options: Any) -> Engine:
    return CheckedEngine(model, Numbers(), spec, **options)


def wait_until_idle(engine: Engine) -> None:
    """Wait until the engine is idle, and assert that it holds nothing."""
    while (stats := engine.stats())["running"] or stats["waiting"]:
        threading.Event().wait(0.001)
    engine.close()
    engine._worker.batch.caches.empty_cache.state.pools.check()
    assert not any(engine._worker.batch.caches.stats([]).values()) and not engine._worker.requests


def test_slow_dtype_is_logged_once_per_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "kvant.platform.devices.is_slow", lambda dtype, device: dtype == torch.bfloat16
    )
    model = build("llama").bfloat16()
    for served in (model, model, build("llama")):
        make_engine(served, pack=False).close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvant", "WARNING")
    assert "dtype=torch.float32" in record.getMessage()


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_engine_rounds_weights_which_stay_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.weights.packing.MIN_PACKED_VALUES", 1)
    model = build("llama")
    with make_engine(model, weights="affine8") as engine:
        tokens = engine.submit(list(range(3, 40)), max_new_tokens=5, ignore_end=True).result()
    assert len(tokens.tokens) == 5 and model.lm_head.weight.is_rounded
    with pytest.raises(ValueError, match="weights='affine8' with pack=False: drop one of them"):
        make_engine(model, weights="affine8", pack=False)
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    with pytest.raises(ValueError, match="rounded for a CPU, not for meta"):
        make_engine(model, weights="affine8")


def test_raw_weights_are_not_rounded_and_packed_until_the_engine_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvant.weights.packing.MIN_PACKED_VALUES", 1)
    _round_weights(SimpleNamespace(device=torch.device("cuda")), "raw")
    model = build("llama").bfloat16()
    with make_engine(model, weights="raw"):
        pass
    assert not is_packed(model)


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4,window=30,sinks=4", "turbo4v4"])
def test_batched_tokens_equal_those_of_each_request_alone(llama: Any, spec: str) -> None:
    inputs = make_prompts(9, longest=90)
    counts = [5, 30, 1, 12, 70, 8, 8, 3, 20]
    with make_engine(llama, spec, max_sequences=4) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=n, ignore_end=True)
            for prompt, n in zip(inputs, counts, strict=True)
        ]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    for prompt, n, tokens in zip(inputs, counts, actual, strict=True):
        assert tokens == generate_alone(llama, prompt, spec, max_new_tokens=n)


def family_params() -> list[Any]:
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.laws) for name in DECODERS]


@pytest.mark.parametrize("name", family_params())
def test_every_family_serves_requests_that_join_and_leave(name: str) -> None:
    model, chance = build(name), random.Random(name)
    inputs = make_prompts(7, seed=1, longest=24)
    counts = [chance.randint(1, 9) for _ in inputs]
    with make_engine(model, max_sequences=3) as engine:
        streams = []
        for prompt, n in zip(inputs, counts, strict=True):
            streams.append(engine.submit(prompt, max_new_tokens=n, ignore_end=True))
            if chance.random() < 0.4:
                streams[-1].result()
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    for prompt, n, tokens in zip(inputs, counts, actual, strict=True):
        assert tokens == generate_alone(model, prompt, max_new_tokens=n)


def test_sampled_tokens_do_not_depend_on_the_batch(llama: Any) -> None:
    option_sets = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_k": 20},
        {"temperature": 1.0, "seed": 3, "top_p": 0.8},
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": -6},
    ]
    prompts = make_prompts(len(option_sets))
    with make_engine(llama) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=15, ignore_end=True, **options)
            for prompt, options in zip(prompts, option_sets, strict=True)
        ]
        actual = [list(stream.result().tokens) for stream in streams]
    for prompt, options, tokens in zip(prompts, option_sets, actual, strict=True):
        assert tokens == generate_alone(llama, prompt, max_new_tokens=15, **options)


def test_steps_carry_text_and_finish_reason(llama: Any) -> None:
    (prompt,) = make_prompts(1)
    tokens = generate_alone(llama, prompt, max_new_tokens=12)
    stop = f"<{tokens[6]}>"
    with make_engine(llama) as engine:
        whole = engine.submit(prompt, max_new_tokens=12, ignore_end=True)
        assert "".join(step.text for step in whole) == "".join(f"<{t}>" for t in tokens)
        assert whole.result().finish_reason == "length"
        cut = engine.submit(prompt, max_new_tokens=12, ignore_end=True, stop=stop).result()
        assert cut.finish_reason == "stop" and stop not in cut.text
        assert cut.text == "".join(f"<{t}>" for t in tokens[: tokens.index(tokens[6])])
        assert cut.usage.prompt_tokens == len(prompt)
        assert cut.usage.completion_tokens == len(cut.tokens) == tokens.index(tokens[6]) + 1


def test_several_continuations_share_the_prompt(llama: Any) -> None:
    prompt = make_prompts(1)[0] * 20
    options = {"max_new_tokens": 9, "temperature": 1.0, "seed": 7}
    calls = []
    with make_engine(llama, "affine8,tail=0") as engine:
        stream = engine.submit(
            prompt,
            n=3,
            ignore_end=True,
            on_step=lambda step: calls.append(engine.stats()["nbytes_shared"]),
            **options,
        )
        actual = [list(result.tokens) for result in stream.results()]
        assert {step.choice for step in stream} == {0, 1, 2}
        wait_until_idle(engine)
    assert max(calls) > 0 and len(set(map(tuple, actual))) == 3
    for index, tokens in enumerate(actual):
        expected = generate_alone(llama, prompt, "affine8,tail=0", **options | {"seed": 7 + index})
        assert tokens == expected


def test_top_logprobs_are_returned(llama: Any) -> None:
    (prompt,) = make_prompts(1)
    with make_engine(llama) as engine:
        steps = list(engine.submit(prompt, max_new_tokens=4, logprobs=3, ignore_end=True))
    for step in steps:
        token, logprob = step.likeliest[0]
        assert len(step.likeliest) == 3 and token == step.token
        assert logprob == pytest.approx(step.logprob, abs=1e-5)
        assert [p for _, p in step.likeliest] == sorted(
            (p for _, p in step.likeliest), reverse=True
        )


def test_cancel_takes_effect_within_a_step(llama: Any) -> None:
    with make_engine(llama) as engine:
        other = engine.submit(make_prompts(1)[0], max_new_tokens=60, ignore_end=True)
        stream = engine.submit(make_prompts(2)[1], max_new_tokens=5000, ignore_end=True)
        first = next(stream)
        stream.cancel()
        rest = list(stream)
        result = stream.result()
        assert result.finish_reason == "cancelled" and len(result.tokens) == 1 + len(rest) < 5000
        assert result.tokens[0] == first.token
        assert len(other.result().tokens) == 60
        assert engine.stats()["cancelled"] == 1
        wait_until_idle(engine)


def test_cancel_returns_text_withheld_for_a_stop_string(llama: Any) -> None:
    (prompt,) = make_prompts(1)
    tokens = generate_alone(llama, prompt, max_new_tokens=4)
    stop = f"<{tokens[1]}><999>"  # the second token may begin the stop string, never complete it
    with make_engine(llama) as engine:
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


def test_callback_is_notified_of_the_end_once(llama: Any) -> None:
    events = []
    with make_engine(llama) as engine:
        stream = engine.submit(make_prompts(1)[0], max_new_tokens=3, ignore_end=True)
        stream.add_done_callback(lambda: events.append("early"))
        stream.result()
        wait_until_idle(engine)
        assert stream.done
        stream.add_done_callback(lambda: events.append("late"))
    assert events == ["early", "late"]


def test_callback_error_affects_no_other_request(llama: Any) -> None:
    def fail() -> None:
        raise RuntimeError("too late")

    with make_engine(llama) as engine:
        stream = engine.submit(make_prompts(1)[0], max_new_tokens=30, ignore_end=True)
        stream.add_done_callback(fail)
        other = engine.submit(make_prompts(2)[1], max_new_tokens=40, ignore_end=True)
        assert len(stream.result().tokens) == 30 and len(other.result().tokens) == 40
        wait_until_idle(engine)


def test_async_streams_yield_the_same_tokens(llama: Any) -> None:
    inputs = make_prompts(5)

    async def read(stream: Stream) -> list[int]:
        return [step.token async for step in stream]

    async def main(engine: Engine) -> list[list[int]]:
        streams = [engine.submit(p, max_new_tokens=10, ignore_end=True) for p in inputs]
        return await asyncio.gather(*map(read, streams))

    with make_engine(llama) as engine:
        actual = asyncio.run(main(engine))
    assert actual == [generate_alone(llama, prompt, max_new_tokens=10) for prompt in inputs]


def test_callback_error_ends_one_request(llama: Any) -> None:
    def fail(step: Any) -> None:
        raise ZeroDivisionError("mine")

    inputs = make_prompts(3)
    with make_engine(llama) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=9, ignore_end=True, on_step=on)
            for prompt, on in zip(inputs, (None, fail, None), strict=True)
        ]
        with pytest.raises(ZeroDivisionError, match="mine"):
            streams[1].result()
        for place in (0, 2):
            expected = generate_alone(llama, inputs[place], max_new_tokens=9)
            assert list(streams[place].result().tokens) == expected
        wait_until_idle(engine)


class ForwardFailed(Exception):
    """The error that test forwards raise."""


def make_failing_forward(
    decoder: TransformersDecoder, token: int, chance: random.Random | None = None
) -> Any:
    """Return a hook that fails forwards halfway, at a given token or at random."""
    layers = [m for m in decoder.model.modules() if type(m).__name__.endswith("MLP")]
    coming: list[Any] = []

    def fail_before(module: Any, args: Any, kwargs: Any) -> None:
        coming[:] = [kwargs["input_ids"]]

    def fail_within(module: Any, args: Any) -> None:
        bad = (coming[0] == token).any() and coming[0].shape[1] == 1
        if bad or (chance is not None and chance.random() < 0.05):
            raise ForwardFailed("halfway")

    return [
        decoder.model.register_forward_pre_hook(fail_before, with_kwargs=True),
        layers[-1].register_forward_pre_hook(fail_within),
    ]


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("spec", ["raw", "affine8,tail=0"])
def test_only_the_request_that_breaks_a_forward_fails(name: str, spec: str) -> None:
    model = build(name)
    inputs = make_prompts(4, seed=3, longest=80)
    expected = [generate_alone(model, prompt, spec, max_new_tokens=20) for prompt in inputs]
    other_tokens = {token for place in (0, 2, 3) for token in expected[place]}
    bad = next(t for t in expected[1][3:] if t not in other_tokens)
    hooks = make_failing_forward(TransformersDecoder(model), bad)
    try:
        with make_engine(model, spec) as engine:
            streams = [engine.submit(p, max_new_tokens=20, ignore_end=True) for p in inputs]
            with pytest.raises(ForwardFailed):
                streams[1].result()
            actual = [list(streams[place].result().tokens) for place in (0, 2, 3)]
            wait_until_idle(engine)
    finally:
        for hook in hooks:
            hook.remove()
    assert actual == [expected[place] for place in (0, 2, 3)]


def run_random_requests(count: int) -> None:
    model, chance = build("llama"), random.Random(11)
    inputs = make_prompts(count, seed=4)
    counts = [chance.randint(1, 25) for _ in inputs]
    decoder = TransformersDecoder(model)
    assert decoder.support.reason == ""  # checked once per class, while no forward fails
    hooks = make_failing_forward(decoder, -1, random.Random(12))
    lost = 0
    try:
        with make_engine(model, "affine8", max_sequences=12) as engine:
            streams = []
            for number, (prompt, n) in enumerate(zip(inputs, counts, strict=True)):
                fails = number % 10 == 3

                def notify(step: Any, fails: bool = fails) -> None:
                    if fails and chance.random() < 0.3:
                        raise ZeroDivisionError

                streams.append(
                    engine.submit(prompt, max_new_tokens=n, ignore_end=True, on_step=notify)
                )
                if number % 7 == 5:
                    streams[chance.randrange(len(streams))].cancel()
            results: list[list[int] | None] = []
            for stream in streams:
                try:
                    result = stream.result()
                    results.append(list(result.tokens))
                except (ZeroDivisionError, ForwardFailed):
                    results.append(None)
                    lost += 1
            wait_until_idle(engine)
    finally:
        for hook in hooks:
            hook.remove()
    assert count / 20 < lost < count / 2
    for prompt, n, tokens in zip(inputs, counts, results, strict=True):
        if tokens is not None:
            assert (
                tokens == generate_alone(model, prompt, "affine8", max_new_tokens=n)[: len(tokens)]
            )


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.laws)])
def test_cancels_errors_and_failures_leave_nothing_allocated(count: int) -> None:
    run_random_requests(count)


def test_byte_limit_for_four_requests_serves_forty(llama: Any) -> None:
    inputs = make_prompts(40, seed=5, longest=60)
    four = 4 * kvant.plan(llama, "affine8", context=70).nbytes
    peak = []

    def look(step: Any) -> None:
        stats = engine.stats()
        peak.append((stats["nbytes_held"] + stats["nbytes_free"], stats["sequences"]))

    with make_engine(llama, "affine8", max_bytes=four) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=10, ignore_end=True, on_step=look)
            for prompt in inputs
        ]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    assert max(nbytes for nbytes, _ in peak) <= four and max(n for _, n in peak) >= 4
    assert actual == [
        generate_alone(llama, prompt, "affine8", max_new_tokens=10) for prompt in inputs
    ]


@pytest.mark.parametrize("name", ["llama", pytest.param("falcon_h1", marks=pytest.mark.laws)])
def test_overcommitted_requests_are_swapped_out(name: str) -> None:
    model, inputs = build(name), make_prompts(5, seed=6, longest=20)
    max_bytes = 3 * kvant.plan(model, "raw", context=20).nbytes
    peak = []

    def look(step: Any) -> None:
        stats = engine.stats()
        peak.append(stats["nbytes_held"] + stats["nbytes_free"])

    with make_engine(model, max_bytes=2 * max_bytes, overcommit=4.0) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=80, ignore_end=True, on_step=look)
            for prompt in inputs
        ]
        actual = [list(stream.result().tokens) for stream in streams]
        num_swaps = sum(stream.timeline.num_swaps for stream in streams)
        assert engine.stats()["put_aside"] == num_swaps > 0
        wait_until_idle(engine)
    assert max(peak) <= 2 * max_bytes
    assert actual == [generate_alone(model, prompt, max_new_tokens=80) for prompt in inputs]


@pytest.mark.parametrize("score", ["snapkv", "expected", "keydiff"])
def test_swap_between_prefill_and_decode_loses_no_prune(
    llama: Any, monkeypatch: pytest.MonkeyPatch, score: str
) -> None:
    """A file records no prune that is due, nor the queries for its score."""
    choose_action, num_swaps = Scheduler.choose_action, 0

    def swap_first(self: Scheduler, now_ms: int) -> Action | None:
        nonlocal num_swaps
        if not num_swaps and self.queue.running and self.queue.running[0].num_output_tokens == 1:
            num_swaps += 1
            return SwapOut(self.queue.running[0])
        return choose_action(self, now_ms)

    spec, prompt = f"raw,prune={score}:25%", text(300)
    expected = generate_alone(llama, prompt, spec, max_new_tokens=20)
    assert expected != generate_alone(llama, prompt, max_new_tokens=20)
    monkeypatch.setattr(Scheduler, "choose_action", swap_first)
    with make_engine(llama, spec) as engine:
        stream = engine.submit(prompt, max_new_tokens=20, ignore_end=True)
        assert list(stream.result().tokens) == expected and num_swaps == 1
        wait_until_idle(engine)


def test_model_is_packed_and_attached_only_while_it_is_served() -> None:
    model = build("llama", head_dim=64, hidden_size=128).bfloat16()
    for options, packed in (({}, True), ({"pack": False}, False)):
        with make_engine(model, **options) as engine:
            assert (
                len(engine.submit([5, 6], max_new_tokens=3, ignore_end=True).result().tokens) == 3
            )
            assert (is_packed(model), bool(get_attachments(model))) == (packed, True)
        assert not is_packed(model) and not get_attachments(model)
    kvant.pack(model)
    kvant.attach(model, "raw")
    with make_engine(model):
        pass
    assert is_packed(model) and get_attachments(model)


def test_closing_the_engine_cancels_its_requests(llama: Any) -> None:
    engine = make_engine(llama)
    stream = engine.submit(make_prompts(1)[0], max_new_tokens=5000, ignore_end=True)
    next(stream)
    engine.close()
    assert stream.result().finish_reason == "cancelled"
    with pytest.raises(kvant.CacheError, match="closed"):
        engine.submit([5], max_new_tokens=1)
    engine.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
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
        ({"salt": ["a"]}, TypeError, "salt=.* a text is needed"),
        ({"salt": "\ud800"}, ValueError, "salt=.* UTF-8"),
        ({"tenant": b"a"}, TypeError, "tenant=.* a text is needed"),
        ({"logit_bias": {5: 1e39}}, ValueError, "logit_bias of token 5=1e[+]39"),
    ],
    ids=str,
)
def test_invalid_request_is_refused_before_it_queues(
    llama: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with make_engine(llama, max_bytes="1MiB", max_context=10**7) as engine:
        with pytest.raises(error, match=message):
            engine.submit(**{"prompt": [5, 6]} | options)
        assert engine.stats()["requests"] == 0
        assert len(engine.submit([5, 6], max_new_tokens=2, ignore_end=True).result().tokens) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_sequences": 0}, ValueError, "max_sequences=0"),
        ({"max_bytes": "much"}, kvant.SpecError, "much"),
        ({"max_bytes": 0}, ValueError, "max_bytes=0"),
        ({"overcommit": 0.0}, ValueError, "overcommit=0.0"),
        ({"overcommit": 2.0}, ValueError, "overcommit=2.0 without max_bytes"),
        ({"chunk_seconds": 0.0}, ValueError, "chunk_seconds=0.0"),
        ({"backend": "cuda"}, ValueError, "cuda"),
        ({"max_context": 0}, ValueError, "max_context=0"),
    ],
    ids=str,
)
def test_invalid_engine_arguments_are_refused(
    llama: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_engine(llama, **options)


def test_lone_surrogate_is_refused_as_a_prompt(llama: Any) -> None:
    with (
        make_engine(llama) as engine,
        pytest.raises(kvant.PromptError, match=r"U\+D800 at character 1: half of a surrogate"),
    ):
        engine.submit("a\ud800", max_new_tokens=1)


def test_forked_process_cannot_submit(llama: Any) -> None:
    """The engine's thread belongs to the parent: the child would wait for ever."""
    with make_engine(llama) as engine:
        engine._worker.pid = os.getpid() + 1
        with pytest.raises(kvant.EngineError, match="make an engine in the child"):
            engine.submit([5, 6], max_new_tokens=1)


def test_only_transformers_models_are_served() -> None:
    with pytest.raises(TypeError, match="models of transformers"):
        Engine(lambda ids, cache: torch.zeros(1, 1, 5), Numbers())


def test_stats_report_queue_lengths_and_waiting_times(llama: Any) -> None:
    with make_engine(llama, max_sequences=2, max_bytes="64MiB") as engine:
        streams = [engine.submit(p, max_new_tokens=8, ignore_end=True) for p in make_prompts(6)]
        for stream in streams:
            stream.result()
        stats = engine.stats()
    assert (stats["requests"], stats["finished"], stats["failed"]) == (6, 6, 0)
    assert stats["completion_tokens"] == 48 and stats["max_bytes"] == 64 << 20
    for name in ("first_token_seconds", "between_tokens_seconds"):
        assert 0 < stats[name]["median"] <= stats[name]["p95"]


@pytest.mark.parametrize("name", ["mamba", "falcon_h1"])
def test_stats_report_recurrent_state_bytes(name: str) -> None:
    model, peak = build(name), []
    with make_engine(model, max_sequences=3) as engine:
        streams = [
            engine.submit(
                prompt,
                max_new_tokens=8,
                ignore_end=True,
                on_step=lambda step: peak.append(engine.stats()["nbytes_states"]),
            )
            for prompt in make_prompts(3)
        ]
        for stream in streams:
            stream.result()
        wait_until_idle(engine)
    state_nbytes = kvant.plan(model, "raw", context=1).state_nbytes
    assert 3 * state_nbytes <= max(peak) <= 9 * state_nbytes


@pytest.mark.parametrize("where", ["action", "message"])
def test_dead_engine_thread_fails_every_request(llama: Any, where: str) -> None:
    """Regression: a second message that failed kept all requests open."""

    class Torn(BaseException):
        """An error that no request can cause."""

    def tear(action: Action) -> None:
        raise Torn

    def fail() -> None:
        raise ZeroDivisionError("of a message")

    started, go = threading.Event(), threading.Event()

    def wait(step: Any) -> None:
        started.set()
        go.wait(60)

    with make_engine(llama) as engine:
        worker, streams = engine._worker, [engine.submit([5], on_step=wait)]
        assert started.wait(60)  # the thread handles no message before `go`
        if where == "action":
            worker._perform = tear  # type: ignore[method-assign]
        else:
            worker._inbox.put(fail)
            worker._inbox.put(fail)  # the end of the thread handles this one
        streams += [engine.submit([6]) for _ in range(2)]
        go.set()
        for stream in streams:
            error = "Torn" if where == "action" else "of a message"
            with pytest.raises(kvant.EngineError, match=f"the engine ended: .*{error}"):
                stream.result(60)
        with pytest.raises(kvant.EngineError, match=rf"{error}.*: make another one"):
            engine.submit([5])


class RefusingNumbers(Numbers):
    """A tokenizer that cannot decode the tokens of a padded vocabulary."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        if 100 in tokens:
            raise IndexError("piece id is out of range")
        return super().decode(tokens)


def test_token_that_the_tokenizer_refuses_fails_its_request_alone(llama: Any) -> None:
    """Regression: the engine ended, and the request never did."""
    with Engine(llama, RefusingNumbers(), "raw", pack=False) as engine:
        streams = [
            engine.submit([5, 6], max_new_tokens=9, ignore_end=True, logit_bias=bias)
            for bias in (None, {100: 1e9})
        ]
        with pytest.raises(IndexError, match="out of range"):
            streams[1].result(60)
        assert list(streams[0].result(60).tokens) == generate_alone(llama, [5, 6], max_new_tokens=9)


@pytest.mark.parametrize("where", ["add", "lookup"])
def test_failure_of_prefixes_fails_their_request_alone(
    llama: Any, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: the engine ended, and the request whose message failed never did."""

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("of prefixes")

    with make_engine(llama, max_bytes="1MiB", store=str(tmp_path)) as engine:
        reuse = engine._worker.prefix_reuse
        if where == "add":
            monkeypatch.setattr(reuse, "open_namespace", fail)
            with pytest.raises(ZeroDivisionError):
                engine.submit([5, 6], max_new_tokens=2).result(60)
        else:
            monkeypatch.setattr(PrefixPools, "estimate_prefill_seconds", fail)
            assert engine.submit([5, 6], max_new_tokens=2, ignore_end=True).result(60).tokens
        monkeypatch.undo()
        assert engine.submit([5, 6], max_new_tokens=2, ignore_end=True).result(60).tokens


def test_forward_that_fails_after_all_layers_yields_no_token(llama: Any) -> None:
    """Without slack nothing beyond a window can be rolled back."""
    spec, inputs = "affine8,window=64,sinks=0,slack=0", make_prompts(2, seed=8, longest=99)
    expected = [generate_alone(llama, prompt, spec, max_new_tokens=25) for prompt in inputs]
    calls = []

    def die(module: Any, args: Any) -> None:
        calls.append(len(args[0]))
        if calls.count(2) == 9 and calls[-1] == 2:
            raise MemoryError("the logits")

    hook = llama.lm_head.register_forward_pre_hook(die)
    try:
        with make_engine(llama, spec) as engine:
            streams = [engine.submit(p, max_new_tokens=25, ignore_end=True) for p in inputs]
            assert [list(stream.result().tokens) for stream in streams] == expected
            wait_until_idle(engine)
    finally:
        hook.remove()
    assert calls.count(2) > 9


def test_fixed_capacity_is_allocated_at_once_and_counted(llama: Any) -> None:
    spec = "raw,capacity=640"
    need = kvant.plan(llama, spec, context=1).nbytes
    with make_engine(llama, spec, max_bytes=need) as engine:
        streams = [engine.submit(p, max_new_tokens=5, ignore_end=True) for p in make_prompts(3)]
        assert all(len(stream.result().tokens) == 5 for stream in streams)
        with pytest.raises(kvant.CapacityError, match="context of"):
            engine.submit([5] * 700)
    with (
        make_engine(llama, spec, max_bytes=need - 1) as engine,
        pytest.raises(kvant.CapacityError, match="of a limit of"),
    ):
        engine.submit([5])


def test_models_of_unknown_state_size_have_no_byte_limit() -> None:
    with pytest.raises(kvant.CacheError, match="state of unknown size"):
        make_engine(build("deepseek_v32"), max_bytes="1GiB")


def test_cancelled_request_leaves_no_swap_file(llama: Any) -> None:
    max_bytes = 2 * kvant.plan(llama, "raw", context=60).nbytes
    with make_engine(llama, max_bytes=max_bytes, overcommit=4.0) as engine:
        streams = [engine.submit(p, max_new_tokens=80, ignore_end=True) for p in make_prompts(5)]
        while not engine.stats()["put_aside"]:
            threading.Event().wait(0.001)
        for stream in streams:
            stream.cancel()
        while engine.stats()["running"] or engine.stats()["waiting"]:
            threading.Event().wait(0.001)
        folder = engine._worker.swap_folder
        assert folder is not None and not list(folder.iterdir())
    assert not folder.exists()


def test_request_with_several_continuations_fails_once(llama: Any) -> None:
    def die(module: Any, args: Any) -> None:
        if args[0].shape[0] > 1 or calls:
            raise ForwardFailed
        calls.append(module)

    calls: list[Any] = []
    hook = llama.lm_head.register_forward_pre_hook(die)
    try:
        with make_engine(llama) as engine:
            stream = engine.submit([5, 6, 7], n=3, max_new_tokens=5, ignore_end=True)
            with pytest.raises(ForwardFailed):
                stream.results()
            assert engine.stats()["failed"] == 1
    finally:
        hook.remove()


def test_step_callback_may_cancel_or_close(llama: Any) -> None:
    def stop(step: Any) -> None:
        raise StopIteration

    with make_engine(llama) as engine:
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(engine.submit([5], max_new_tokens=5, ignore_end=True, on_step=stop))
        stream = engine.submit(
            [5], max_new_tokens=100, ignore_end=True, on_step=lambda step: engine.close()
        )
        assert stream.result().finish_reason == "cancelled" and len(stream.result().tokens) == 1


def test_nan_logits_fail_only_their_request(llama: Any) -> None:
    def spoil(module: Any, args: Any, out: Any) -> Any:
        if len(out) == 2:
            out[-1] = torch.nan
        return out

    hook = llama.lm_head.register_forward_hook(spoil)
    try:
        with make_engine(llama) as engine:
            streams = [engine.submit([5 + i], max_new_tokens=6, ignore_end=True) for i in range(2)]
            errors = []
            for stream in streams:
                try:
                    errors.append(str(len(stream.result().tokens)))
                except ValueError as error:
                    errors.append(str(error))
            assert sorted(errors)[0] == "6" and "logits are NaN" in sorted(errors)[1]
    finally:
        hook.remove()
