"""Calls of tools/tool_calls.py are scored by their JSON, and counted where raw is right."""

from __future__ import annotations

from typing import Any

import pytest

from call_exams import FUNCTIONS, CallRequest, CallScore, make_call_exam, score_call
from kvant.checkpoints import load
from tool_calls import CallTest, summarize

REQUEST = CallRequest("Set a timer for 5 minutes.", "set_timer", {"minutes": 5})


@pytest.fixture(scope="module")
def model_and_tokenizer() -> tuple[Any, Any]:
    return load(None, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (REQUEST.answer, CallScore(True, True, True)),
        (REQUEST.answer + "Request: more", CallScore(True, True, True)),
        (' {"name": "set_timer", "arguments": {"minutes": 6}}\n', CallScore(True, True, False)),
        (' {"name": "set_time", "arguments": {"minutes": 5}}\n', CallScore(True, False, False)),
        (' {"name": "set_timer", "minutes": 5}\n', CallScore(False, False, False)),
        (" set_timer(5)\n", CallScore(False, False, False)),
        (' {"name": "set_timer", "arguments"', CallScore(False, False, False)),
    ],
)
def test_call_is_scored(text: str, score: CallScore) -> None:
    assert score_call(text, REQUEST) == score


def test_exam_has_no_request_among_its_examples(model_and_tokenizer: tuple[Any, Any]) -> None:
    _, tokenizer = model_and_tokenizer
    exam = make_call_exam(tokenizer, 2000, 20, seed=1)
    text = tokenizer.decode(exam.prompt)
    assert 1900 < len(exam.prompt) <= 2000
    assert all(function.schema in text for function in FUNCTIONS)
    assert {request.name for request in exam.requests} == {f.name for f in FUNCTIONS}
    assert not any(request.question in text for request in exam.requests)
    assert make_call_exam(tokenizer, 2000, 20, seed=1) == exam


def test_requests_of_an_exam_differ(model_and_tokenizer: tuple[Any, Any]) -> None:
    count = sum(function.num_requests for function in FUNCTIONS)
    exam = make_call_exam(model_and_tokenizer[1], 1400, 200, seed=0)
    assert len({request.text for request in exam.requests}) == 200
    with pytest.raises(ValueError, match=f"{count} requests: at most {count - 1} differ"):
        make_call_exam(model_and_tokenizer[1], 1400, count, seed=0)


def test_short_prompt_is_refused(model_and_tokenizer: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="a prompt of 100 tokens: the functions alone are"):
        make_call_exam(model_and_tokenizer[1], 100, 1, seed=0)


def test_end_token_ends_an_answer_and_is_no_part_of_it(
    model_and_tokenizer: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = model_and_tokenizer
    end_token = tokenizer.encode("(", add_special_tokens=False)[0]
    monkeypatch.setattr(model.generation_config, "eos_token_id", end_token)
    test = CallTest(model, tokenizer, 1600, 2)
    tokens = tokenizer.encode("call(", add_special_tokens=False)
    assert test._is_complete(tokens) and not test._is_complete(tokens[:-1])
    assert test._decode(tokens) == test._decode(tokens[:-1]) == "call"


def test_answers_do_not_depend_on_the_batch(model_and_tokenizer: tuple[Any, Any]) -> None:
    test = CallTest(*model_and_tokenizer, 1600, 6)
    exam, cache = test._read_prompt(0)
    single = [test._answer(cache, [request])[0] for request in exam.requests]
    assert test._answer(cache, exam.requests) == single


def test_requests_are_answered_by_every_format(model_and_tokenizer: tuple[Any, Any]) -> None:
    test = CallTest(*model_and_tokenizer, 1600, 2)
    for name in ("raw", "affine4,window=256", "raw,prune=keydiff:512"):
        scores = test.measure({"prompt": 0, "format": name})["scores"]
        assert len(scores) == 2 and set(scores) <= set("0123")


def test_summary_counts_what_raw_answers_right() -> None:
    rows = [
        {"prompt": 0, "format": "raw", "scores": "3303"},
        {"prompt": 0, "format": "affine2", "scores": "3130"},
    ]
    raw, lossy = summarize(rows)
    assert (raw["requests"], raw["arguments"]) == (3, 1.0)
    assert [lossy[name] for name in ("valid", "function", "arguments")] == [2 / 3, 1 / 3, 1 / 3]
