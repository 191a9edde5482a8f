"""Test offline generation: replies in order, and errors with their prompt."""

from __future__ import annotations

from typing import Any

import pytest

import kvant
from engine.test_engine import generate_alone, make_prompts
from generation.speakers import Numbers
from hf.zoo import build
from kvant.engine import Engine, iterate_results


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def test_replies_keep_the_order_of_the_prompts(llama: Any) -> None:
    inputs = make_prompts(11)
    options = {"max_new_tokens": 9, "temperature": 0.9, "ignore_end": True}
    actual = kvant.generate_many(
        llama, Numbers(), inputs, kv_cache="affine8", max_sequences=3, seed=4, **options
    )
    for index, (prompt, result) in enumerate(zip(inputs, actual, strict=True)):
        options |= {"seed": 4 + index}
        api_options = {name: value for name, value in options.items() if name != "ignore_end"}
        assert list(result.tokens) == generate_alone(llama, prompt, "affine8", **api_options)


def test_error_names_the_invalid_prompt(llama: Any) -> None:
    with pytest.raises(kvant.PromptError, match="token 999"):
        kvant.generate_many(llama, Numbers(), [[5], [999], [6]], max_new_tokens=2)
    with pytest.raises(TypeError, match="one text"):
        kvant.generate_many(llama, Numbers(), "5 6", max_new_tokens=2)  # type: ignore[arg-type]
    assert kvant.generate_many(llama, Numbers(), []) == []


def test_few_prompts_are_read_ahead(llama: Any) -> None:
    """Eight times the running requests; each finished request admits another."""
    streams: list[Any] = []
    ahead = []
    with Engine(llama, Numbers(), "raw", max_sequences=1) as engine:

        def ask(index: int) -> Any:
            ahead.append(sum(not stream.done for stream in streams))
            streams.append(engine.submit([5 + index], max_new_tokens=2, ignore_end=True))
            return streams[-1]

        results = iterate_results([lambda i=i: ask(i) for i in range(19)], 1)  # type: ignore[misc]
        assert len(list(results)) == 19
    assert max(ahead) < 8


def test_one_long_reply_does_not_block_the_others(llama: Any) -> None:
    calls = []
    with Engine(llama, Numbers(), "raw", max_sequences=2) as engine:

        def ask(index: int) -> Any:
            if index == 0:
                return engine.submit([5], max_new_tokens=5000, ignore_end=True, on_step=wait)
            stream = engine.submit([5 + index], max_new_tokens=1, ignore_end=True)
            stream.add_done_callback(lambda: calls.append(index))
            return stream

        def wait(step: Any) -> None:
            if len(calls) == 40:
                raise KeyError("enough")

        results = list(iterate_results([lambda i=i: ask(i) for i in range(41)], 2))  # type: ignore[misc]
    assert sorted(calls) == list(range(1, 41))
    assert [isinstance(result, Exception) for result in results] == [True] + 40 * [False]


def test_closed_engine_gives_no_reply(llama: Any) -> None:
    class Torn(BaseException):
        """An error that no request can cause."""

    def tear(step: Any) -> None:
        raise Torn

    with Engine(llama, Numbers(), "raw") as engine:
        submits = [lambda: engine.submit([5], on_step=tear), lambda: engine.submit([6])]
        with pytest.raises(kvant.EngineError, match="Torn"):
            list(iterate_results(submits, 1))
        with pytest.raises(kvant.EngineError, match=r"Torn.*: make another one"):
            engine.submit([6])
