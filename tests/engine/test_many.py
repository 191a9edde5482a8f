"""Many prompts: their replies in order, and errors of the one they are of."""

from __future__ import annotations

from typing import Any

import pytest

import kvant
from engine.test_engine import alone, prompts
from generation.speakers import Numbers
from hf.zoo import build
from kvant.engine import Engine, iterate_results


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def test_replies_come_in_the_order_of_the_prompts(llama: Any) -> None:
    asked = prompts(11)
    given = {"max_new_tokens": 9, "temperature": 0.9, "ignore_end": True}
    found = kvant.generate_many(
        llama, Numbers(), asked, kv_cache="affine8", max_sequences=3, seed=4, **given
    )
    for index, (prompt, result) in enumerate(zip(asked, found, strict=True)):
        given |= {"seed": 4 + index}
        shown = {name: value for name, value in given.items() if name != "ignore_end"}
        assert list(result.tokens) == alone(llama, prompt, "affine8", **shown)


def test_the_prompt_that_is_wrong_is_the_one_that_is_named(llama: Any) -> None:
    with pytest.raises(kvant.PromptError, match="token 999"):
        kvant.generate_many(llama, Numbers(), [[5], [999], [6]], max_new_tokens=2)
    with pytest.raises(TypeError, match="one text"):
        kvant.generate_many(llama, Numbers(), "5 6", max_new_tokens=2)  # type: ignore[arg-type]
    assert kvant.generate_many(llama, Numbers(), []) == []


def test_few_are_asked_for_ahead(llama: Any) -> None:
    """Eight times those that are served; whoever is done makes room for another."""
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


def test_one_long_reply_does_not_keep_the_others_waiting(llama: Any) -> None:
    done = []
    with Engine(llama, Numbers(), "raw", max_sequences=2) as engine:

        def ask(index: int) -> Any:
            if index == 0:
                return engine.submit([5], max_new_tokens=5000, ignore_end=True, on_step=wait)
            stream = engine.submit([5 + index], max_new_tokens=1, ignore_end=True)
            stream.add_done_callback(lambda: done.append(index))
            return stream

        def wait(step: Any) -> None:
            if len(done) == 40:
                raise KeyError("enough")

        results = list(iterate_results([lambda i=i: ask(i) for i in range(41)], 2))  # type: ignore[misc]
    assert sorted(done) == list(range(1, 41))
    assert [isinstance(one, Exception) for one in results] == [True] + 40 * [False]


def test_an_engine_that_ends_is_no_reply(llama: Any) -> None:
    class Torn(BaseException):
        """Not an error that a request could have."""

    def tear(step: Any) -> None:
        raise Torn

    with Engine(llama, Numbers(), "raw") as engine:
        asks = [lambda: engine.submit([5], on_step=tear), lambda: engine.submit([6])]
        with pytest.raises(kvant.EngineError, match="Torn"):
            list(iterate_results(asks, 1))
