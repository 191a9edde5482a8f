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
    """Turns of a session, and words of its texts."""

    turns: int = 12
    system: int = 600
    tools: int = 6  # each has `result` words
    result: int = 60


class AgentClient:
    """An agent's conversation, from which its requests are made."""

    def __init__(self, size: SessionSize, seed: int, agent: str = MAIN_AGENT) -> None:
        """All sessions of an `agent` have the same system text and tools."""
        self.size = size
        self.rng = random.Random(agent)
        self.system = self.make_text(size.system)
        self.tools = [self._make_tool(number) for number in range(size.tools)]
        self.rng = random.Random(seed)
        self.messages: list[Body] = []

    def make_text(self, num_words: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(num_words))

    def ask(self, text: str) -> None:
        """Append a message of the user."""
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def call_tool(self) -> None:
        """Append a call of a tool and its result."""
        number = len(self.messages)
        call = {"type": "tool_use", "id": f"call_{number}", "name": "tool_0", "input": {}}
        content = [{"type": "text", "text": self.make_text(8)}, call]
        self.messages.append({"role": "assistant", "content": content})
        text = self.make_text(self.size.result)
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        self.messages.append({"role": "user", "content": [result]})

    def clear_old_results(self) -> None:
        """Replace all results but the newest."""
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
        about = self.make_text(self.size.result)
        return {"name": f"tool_{number}", "description": about, "input_schema": schema}


def run_tool_loop(client: AgentClient) -> Iterator[AgentRequest]:
    """Each request adds a call and its result."""
    client.ask(client.make_text(30))
    for _ in range(client.size.turns):
        yield AgentRequest(client.make_body())
        client.call_tool()


def change_header(client: AgentClient) -> Iterator[AgentRequest]:
    """The first line of the system text changes with each request, as Claude Code's does."""
    for number, request in enumerate(run_tool_loop(client)):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
        system = [{"type": "text", "text": header}, *request.body["system"]]
        yield AgentRequest(request.body | {"system": system})


def change_date(client: AgentClient) -> Iterator[AgentRequest]:
    """The system text ends with a date, which changes in the middle of the session."""
    system = client.system
    for number, request in enumerate(run_tool_loop(client)):
        day = 26 + (2 * number >= client.size.turns)
        text = {"type": "text", "text": f"{system}\nToday is 2026-11-{day}.", **MARK}
        yield AgentRequest(request.body | {"system": [text]})


def count_tokens(client: AgentClient) -> Iterator[AgentRequest]:
    """The last message ends with a count, which the next request leaves out."""
    for number, request in enumerate(run_tool_loop(client)):
        text = f"Used: {number * client.size.result} of 200000 tokens."
        request.body["messages"][-1]["content"].append({"type": "text", "text": text})
        yield request


def compact(client: AgentClient) -> Iterator[AgentRequest]:
    """In the middle the conversation is summarized, and goes on after the summary."""
    client.ask(client.make_text(30))
    for number in range(client.size.turns):
        if number == client.size.turns // 2:
            client.messages[-1]["content"].append({"type": "text", "text": SUMMARY_REQUEST})
            yield AgentRequest(client.make_body())
            client.messages = []
            client.ask(f"Go on. {client.make_text(80)}")
        yield AgentRequest(client.make_body())
        client.call_tool()


def cancel_turn(client: AgentClient) -> Iterator[AgentRequest]:
    """A request in the middle is cancelled, and sent again with a hint of the user."""
    for number, request in enumerate(run_tool_loop(client)):
        if number == client.size.turns // 2:
            yield AgentRequest(deepcopy(request.body), is_cancelled=True)
            hint = {"type": "text", "text": f"No: {client.make_text(10)}"}
            client.messages[-1]["content"].append(hint)
            yield AgentRequest(client.make_body())
        else:
            yield request


def call_sub_agent(client: AgentClient) -> Iterator[AgentRequest]:
    """In the middle a sub-agent with a system text and tools of its own answers a question."""
    for number, request in enumerate(run_tool_loop(client)):
        yield request
        if number == client.size.turns // 2:
            sub = AgentClient(client.size, client.rng.randrange(1 << 20), SUB_AGENT)
            for sub_request in run_tool_loop(sub):
                yield AgentRequest(sub_request.body, SUB_AGENT)


def edit_message(client: AgentClient) -> Iterator[AgentRequest]:
    """In the middle the user goes back two turns, and asks for something else."""
    client.ask(client.make_text(30))
    for number in range(client.size.turns):
        if number == client.size.turns // 2:
            del client.messages[-4:]
            hint = {"type": "text", "text": f"Instead: {client.make_text(10)}"}
            client.messages[-1]["content"].append(hint)
        yield AgentRequest(client.make_body())
        client.call_tool()


def clear_results(client: AgentClient) -> Iterator[AgentRequest]:
    """In the middle old results of tools are removed."""
    for number, request in enumerate(run_tool_loop(client)):
        yield request
        if number == client.size.turns // 2:
            client.clear_old_results()


SESSIONS: Mapping[str, Callable[[AgentClient], Iterator[AgentRequest]]] = {
    "tool loop": run_tool_loop,
    "changing header": change_header,
    "new date": change_date,
    "token count": count_tokens,
    "compaction": compact,
    "cancelled turn": cancel_turn,
    "sub-agent": call_sub_agent,
    "edited message": edit_message,
    "cleared results": clear_results,
}


def make_session(kind: str, size: SessionSize, seed: int = 0) -> list[AgentRequest]:
    """Return the requests of a session of this kind."""
    return list(SESSIONS[kind](AgentClient(size, seed)))
