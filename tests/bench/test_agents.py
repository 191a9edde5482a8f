"""Test that sessions of agents reuse what their prompts share, in every kind of model."""

from __future__ import annotations

from typing import Any

import pytest

from engine.test_engine import no_leaks
from generation.test_tools_as_text import CHATML
from hf.zoo import build
from kvant.bench.agent_sessions import SESSIONS, SUMMARY_REQUEST, SessionSize, make_session
from kvant.bench.agents import ReuseCounts, make_prompt, measure_session
from kvant.generation.conversation import encode_messages
from server.speaking import make_character_tokenizer
from thin import thin_rows

pytestmark = pytest.mark.usefixtures(no_leaks.__name__)

# Models with states lose at most a result in each turn: results are short beside a prompt.
SIZE = SessionSize(num_turns=14, num_tools=3, system_words=350, result_words=30)
MAX_TOKENS = 1 << 14
# Full attention, windows, and recurrent states beside attention.
FAMILIES = [
    ("llama", "affine8"),
    ("gemma3", "affine8"),
    ("qwen3_5", "raw"),
    ("falcon_h1", "affine8"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a chat tokenizer in which every character is a token."""
    tokenizer = make_character_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def measure(
    name: str, spec: str, kind: str, tokenizer: Any, *, restarts: bool = False
) -> ReuseCounts:
    model = build(name, max_position_embeddings=MAX_TOKENS)
    requests = make_session(kind, SIZE)
    return measure_session(model, tokenizer, spec, requests, restarts=restarts, num_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "spec", "kind"),
    thin_rows((*family, kind) for family in FAMILIES for kind in SESSIONS),
)
def test_shared_tokens_are_reused(name: str, spec: str, kind: str, tokenizer: Any) -> None:
    counts = measure(name, spec, kind, tokenizer)
    assert counts.reused_tokens >= 0.95 * counts.shared_tokens > 0


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(*row, marks=() if row[0] in ("gemma3", "falcon_h1") else pytest.mark.laws)
        for row in FAMILIES
    ],
)
def test_shared_tokens_are_reused_after_a_restart(name: str, spec: str, tokenizer: Any) -> None:
    counts = measure(name, spec, "cancelled turn", tokenizer, restarts=True)
    assert counts.reused_tokens >= 0.95 * counts.shared_tokens > 0


def test_changing_header_changes_no_prompt(tokenizer: Any) -> None:
    kinds = ("tool loop", "changing header")
    loop, header = ([r.body for r in make_session(kind, SIZE)] for kind in kinds)
    assert header[0]["system"][0]["text"] != header[1]["system"][0]["text"]
    for plain, changing in zip(loop, header, strict=True):
        tokens = encode_messages(tokenizer, make_prompt(changing))
        assert tokens == encode_messages(tokenizer, make_prompt(plain))


def test_sessions_have_the_habits_of_their_names() -> None:
    sessions = {kind: make_session(kind, SIZE) for kind in SESSIONS}
    for kind, requests in sessions.items():
        assert len(requests) >= SIZE.num_turns, kind
        assert [request.is_cancelled for request in requests].count(True) == (
            kind == "cancelled turn"
        )
        assert len({request.agent for request in requests}) == 1 + (kind == "sub-agent")
    assert len({str(r.body["system"]) for r in sessions["new date"]}) == 2
    lengths = [len(request.body["messages"]) for request in sessions["compaction"]]
    assert lengths == [*range(1, 16, 2), *range(1, 14, 2)]
    assert SUMMARY_REQUEST in str(sessions["compaction"][7].body)
    assert "cleared" in str(sessions["cleared results"][-1].body)
