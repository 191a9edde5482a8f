"""Many prompts: their replies in order, and errors of the one they are of."""

from __future__ import annotations

from typing import Any

import pytest

import kvant
from engine.test_engine import alone, prompts
from generation.speakers import Numbers
from hf.zoo import build
from kvant.engine import Engine, in_order


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
    asked = []
    with Engine(llama, Numbers(), "raw", max_sequences=1) as engine:

        def ask(index: int) -> Any:
            asked.append(index)
            return engine.submit([5 + index], max_new_tokens=2, ignore_end=True)

        results = in_order([lambda i=i: ask(i) for i in range(19)], 1)  # type: ignore[misc]
        next(results)
        assert asked == list(range(8))
        assert len(list(results)) == 18
