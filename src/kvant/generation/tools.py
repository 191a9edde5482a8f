"""Tools as text, for chat templates that do not support them.

The functions are described in the system message, or before the first user message if the template
has no system message. Calls are text of the assistant, results are text of the user.

    system     Be brief.               + signatures of the functions, and how to call them
    assistant  [{"name": "weather", "arguments": {"city": "Rome"}}]
    user       weather returned: It rains.

A call has the form that `Grammar.calls` enforces. The text depends only on the messages and the
tools, so equal conversations share prefixes.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from transformers.utils import get_json_schema

from kvant.errors import PromptError

Message = Mapping[str, Any]  # role, content, and further fields of a template
Tool = Mapping[str, Any] | Callable[..., Any]  # JSON, or a Python function with a docstring

PROBE = "kvant_probe"  # a word that appears in the output if a template renders its field
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
DESCRIPTION = """\
You can call these functions. Each line has a name and the JSON schema of the arguments:
{functions}

If a function helps, reply with a JSON list of calls and no other text:
[{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}]
The results are in the next message. If no function helps, reply in plain text."""


def supports_tools(
    tokenizer: Any,
    messages: Sequence[Message] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> bool:
    """Return whether a tokenizer's chat template renders tools; `options` are the template's.

    The template is tried with one short message; if it raises, with `messages`.
    """
    options = {**options, "tools": [PROBE_TOOL]}
    text = _render(tokenizer, [{"role": "user", "content": "a"}], options)
    if text is None and messages:
        text = _render(tokenizer, messages, options)
    return text is not None and PROBE in text


def supports_system_message(
    tokenizer: Any, options: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Return whether a tokenizer's chat template renders a system message."""
    messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "a"}]
    return PROBE in (_render(tokenizer, messages, options) or "")


def has_tools(messages: Sequence[Message]) -> bool:
    """Return whether any message is a tool call or its result."""
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


def convert_tools_to_text(
    messages: Sequence[Message], tools: Sequence[Tool], *, system: bool
) -> list[Message]:
    """Return the messages with tools, calls and results as text.

    `system` tells whether the description of the tools goes into a system message.
    """
    plain = _calls_as_text(messages)
    if not tools:
        return plain
    role, candidates = ("system", plain[:1]) if system else ("user", plain)
    text = _description(tools)
    index = next((i for i, message in enumerate(candidates) if message.get("role") == role), None)
    if index is None:
        return [{"role": role, "content": text}, *plain]
    content = _text(plain[index])
    new_content = _paragraphs(content, text) if system else _paragraphs(text, content)
    plain[index] = {**plain[index], "content": new_content}
    return plain


def _description(tools: Sequence[Tool]) -> str:
    return DESCRIPTION.format(functions="\n".join(_json(_function(tool)) for tool in tools))


def _function(tool: Tool) -> Any:
    """Return the name and schema of a tool; for a Python function, from its docstring."""
    if callable(tool):
        try:
            tool = get_json_schema(tool)
        except Exception as error:  # annotations may be arbitrary objects
            name = getattr(tool, "__name__", repr(tool))
            raise PromptError(f"tools: {name} cannot be described: {error}") from error
    if not isinstance(tool, Mapping):
        raise PromptError(
            f"tools: {reprlib.repr(tool)} is no function, and no mapping that describes one"
        )
    return tool.get("function", tool)


def _calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Turn calls into assistant text, and results into user text, joined into one turn."""
    names: dict[str, str] = {}  # call id: name of the function
    plain: list[Message] = []
    joins = False  # whether a user message continues the results before it
    for message in messages:
        role, calls = message.get("role"), message.get("tool_calls") or ()
        if role == "tool":
            name = message.get("name") or names.get(
                str(message.get("tool_call_id")), "the function"
            )
            message = {"role": "user", "content": f"{name} returned: {_text(message)}"}
        elif calls:
            functions = [_parse_function(call) for call in calls]
            for call, function in zip(calls, functions, strict=True):
                names[str(call.get("id"))] = function["name"]
            call_list = [{"name": f["name"], "arguments": _arguments(f)} for f in functions]
            fields = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**fields, "content": _paragraphs(_text(message), _json(call_list))}
        if joins and message["role"] == "user":
            content = _paragraphs(_text(plain[-1]), _text(message))
            plain[-1] = {"role": "user", "content": content}
        else:
            plain.append(message)
        joins = role == "tool" or (joins and role == "user")
    return plain


def _parse_function(call: Any) -> Mapping[str, Any]:
    """Return the function of a call, a mapping with a name."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(
            f"messages: a call of a tool needs the name of its function: {reprlib.repr(call)}"
        )
    return function


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return a call's arguments as an object; text that is not a JSON object, unchanged."""
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _text(message: Message) -> str:
    """Return the content of a message as one text, its parts joined."""
    content = message.get("content") or ""
    try:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)
    except (KeyError, TypeError):
        raise PromptError(
            f"messages: content that is no text, nor parts of text: {reprlib.repr(content)}"
        ) from None


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"tools: a function or a call that is no JSON: {error}") from error


def _render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str | None:
    """Render messages with the chat template; return None if it raises."""
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception:  # a template is a program and may raise anything
        return None
    return text
