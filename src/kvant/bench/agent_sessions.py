"""Sessions in the shape of those that coding agents send, as bodies of POST /v1/messages.

A session is a list of requests, each with the whole conversation so far:

    tools, system text | user | assistant: call | result | assistant: call | result | ...

The kinds differ in the habits by which agents change what they sent before. Texts are random words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from kvant.bench.serve import WORDS

Body = dict[str, Any]
MARK = {"cache_control": {"type": "ephemeral"}}
MAIN_AGENT, SUB_AGENT = "main", "sub"
NUM_KEPT_RESULTS = 3  # results of tools that are not cleared
SUMMARY_REQUEST = "Summarize the conversation so that another session can continue it."
CLEARED_RESULT = "[Old tool result content cleared]"


@dataclass(frozen=True)
class AgentRequest:
    """One request of a session."""

    body: Body
    agent: str = MAIN_AGENT
    is_cancelled: bool = False  # the client stops waiting while the prompt is prefilled


@dataclass(frozen=True)
class SessionSize:
    """How long a session is, and the words of its texts."""

    num_turns: int = 12
    num_tools: int = 6
    system_words: int = 600
    result_words: int = 60  # also of the description of a tool


class AgentConversation:
    """An agent's conversation, from which its requests are made."""

    def __init__(self, size: SessionSize, seed: int, agent: str = MAIN_AGENT) -> None:
        """All sessions of an `agent` have the same system text and tools."""
        self.size = size
        self.rng = random.Random(agent)
        self.system = self.make_text(size.system_words)
        self.tools = [self._make_tool(number) for number in range(size.num_tools)]
        self.rng = random.Random(seed)
        self.messages: list[Body] = []

    def make_text(self, num_words: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(num_words))

    def add_user_message(self, text: str) -> None:
        """Append a user message."""
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def add_tool_call(self) -> None:
        """Append a tool call and its result."""
        number = len(self.messages)
        call = {"type": "tool_use", "id": f"call_{number}", "name": "tool_0", "input": {}}
        content = [{"type": "text", "text": self.make_text(8)}, call]
        self.messages.append({"role": "assistant", "content": content})
        text = self.make_text(self.size.result_words)
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        self.messages.append({"role": "user", "content": [result]})

    def clear_old_results(self) -> None:
        """Replace all tool results but the newest `NUM_KEPT_RESULTS`."""
        blocks = [block for message in self.messages for block in message["content"]]
        results = [block for block in blocks if block["type"] == "tool_result"]
        for block in results[:-NUM_KEPT_RESULTS]:
            block["content"] = CLEARED_RESULT

    def make_body(self) -> Body:
        """Return a request with this conversation; marks end its system and its last message."""
        system = [{"type": "text", "text": self.system, **MARK}]
        messages = deepcopy(self.messages)
        messages[-1]["content"][-1] |= MARK
        return {"system": system, "tools": self.tools, "messages": messages}

    def _make_tool(self, number: int) -> Body:
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        about = self.make_text(self.size.result_words)
        return {"name": f"tool_{number}", "description": about, "input_schema": schema}


def iterate_tool_loop(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield requests that each add a tool call and its result."""
    conversation.add_user_message(conversation.make_text(30))
    for _ in range(conversation.size.num_turns):
        yield AgentRequest(conversation.make_body())
        conversation.add_tool_call()


def iterate_with_new_headers(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield requests whose first line of system text is new each time, as Claude Code's is."""
    for number, request in enumerate(iterate_tool_loop(conversation)):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
        system = [{"type": "text", "text": header}, *request.body["system"]]
        yield AgentRequest(request.body | {"system": system})


def iterate_with_new_date(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield requests whose system text ends with a date, which changes in mid-session."""
    system = conversation.system
    for number, request in enumerate(iterate_tool_loop(conversation)):
        day = 26 + (2 * number >= conversation.size.num_turns)
        text = {"type": "text", "text": f"{system}\nToday is 2026-11-{day}.", **MARK}
        yield AgentRequest(request.body | {"system": [text]})


def iterate_with_token_counts(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield requests whose last message ends with a token count, which the next one omits."""
    for number, request in enumerate(iterate_tool_loop(conversation)):
        text = f"Used: {number * conversation.size.result_words} of 200000 tokens."
        request.body["messages"][-1]["content"].append({"type": "text", "text": text})
        yield request


def iterate_with_compaction(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield a request for a summary in mid-session, then requests that begin with a summary."""
    conversation.add_user_message(conversation.make_text(30))
    for number in range(conversation.size.num_turns):
        if number == conversation.size.num_turns // 2:
            conversation.messages[-1]["content"].append({"type": "text", "text": SUMMARY_REQUEST})
            yield AgentRequest(conversation.make_body())
            conversation.messages = []
            conversation.add_user_message(f"Go on. {conversation.make_text(80)}")
        yield AgentRequest(conversation.make_body())
        conversation.add_tool_call()


def iterate_with_cancelled_turn(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield one request twice: cancelled, and again with a hint of the user."""
    for number, request in enumerate(iterate_tool_loop(conversation)):
        if number == conversation.size.num_turns // 2:
            yield AgentRequest(deepcopy(request.body), is_cancelled=True)
            hint = {"type": "text", "text": f"No: {conversation.make_text(10)}"}
            conversation.messages[-1]["content"].append(hint)
            yield AgentRequest(conversation.make_body())
        else:
            yield request


def iterate_with_sub_agent(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield requests of a sub-agent, with its own system text and tools, in mid-session."""
    for number, request in enumerate(iterate_tool_loop(conversation)):
        yield request
        if number == conversation.size.num_turns // 2:
            sub = AgentConversation(
                conversation.size, conversation.rng.randrange(1 << 20), SUB_AGENT
            )
            for sub_request in iterate_tool_loop(sub):
                yield AgentRequest(sub_request.body, SUB_AGENT)


def iterate_with_edited_message(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield requests that go back two turns in mid-session, with another message."""
    conversation.add_user_message(conversation.make_text(30))
    for number in range(conversation.size.num_turns):
        if number == conversation.size.num_turns // 2:
            del conversation.messages[-4:]
            hint = {"type": "text", "text": f"Instead: {conversation.make_text(10)}"}
            conversation.messages[-1]["content"].append(hint)
        yield AgentRequest(conversation.make_body())
        conversation.add_tool_call()


def iterate_with_cleared_results(conversation: AgentConversation) -> Iterator[AgentRequest]:
    """Yield requests that omit old tool results after mid-session."""
    for number, request in enumerate(iterate_tool_loop(conversation)):
        yield request
        if number == conversation.size.num_turns // 2:
            conversation.clear_old_results()


SESSIONS: Mapping[str, Callable[[AgentConversation], Iterator[AgentRequest]]] = {
    "tool loop": iterate_tool_loop,
    "changing header": iterate_with_new_headers,
    "new date": iterate_with_new_date,
    "token count": iterate_with_token_counts,
    "compaction": iterate_with_compaction,
    "cancelled turn": iterate_with_cancelled_turn,
    "sub-agent": iterate_with_sub_agent,
    "edited message": iterate_with_edited_message,
    "cleared results": iterate_with_cleared_results,
}


def make_session(kind: str, size: SessionSize, seed: int = 0) -> list[AgentRequest]:
    """Return the requests of a session of this kind."""
    return list(SESSIONS[kind](AgentConversation(size, seed)))
