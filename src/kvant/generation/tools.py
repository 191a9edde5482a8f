"""Tools for a chat template that does not know them: all as text.

The functions are described in the system message, or before the first user message where the
template takes no system message. Calls are text of the assistant, results are text of the user.

    system     Be brief.               + signatures of the functions, and how to call them
    assistant  [{"name": "weather", "arguments": {"city": "Rome"}}]
    user       weather returned: It rains.

A call has the form that `Grammar.calls` forces. The text depends on the messages and the tools
alone, so equal conversations share prefixes.
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

Message = Mapping[str, Any]  # role and content, and whatever else a template knows
Tool = Mapping[str, Any] | Callable[..., Any]  # JSON, or a Python function with a docstring

PROBE = "kvant_probe"  # a template that renders this word knows where it stands
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


def knows_tools(
    tokenizer: Any,
    messages: Sequence[Message] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> bool:
    """Whether the chat template of a tokenizer renders the tools that it gets.

    It is tried with one message, and with `messages` where it raises at that; `options` are those
    of the template.
    """
    how = {**options, "tools": [PROBE_TOOL]}
    text = _render(tokenizer, [{"role": "user", "content": "a"}], how)
    if text is None and messages:
        text = _render(tokenizer, messages, how)
    return text is not None and PROBE in text


def takes_system(tokenizer: Any, options: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether the chat template of a tokenizer renders a system message."""
    messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "a"}]
    return PROBE in (_render(tokenizer, messages, options) or "")


def has_tools(messages: Sequence[Message]) -> bool:
    """Whether some messages are calls of tools, or their results."""
    return any(one.get("role") == "tool" or one.get("tool_calls") for one in messages)


def tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], *, system: bool
) -> list[Message]:
    """Return the messages with tools, calls and results as text.

    `system`: whether a system message may hold the description of the tools.
    """
    plain = _calls_as_text(messages)
    if not tools:
        return plain
    role, searched = ("system", plain[:1]) if system else ("user", plain)
    text = _description(tools)
    place = next((i for i, one in enumerate(searched) if one.get("role") == role), None)
    if place is None:
        return [{"role": role, "content": text}, *plain]
    said = _text(plain[place])
    whole = _paragraphs(said, text) if system else _paragraphs(text, said)
    plain[place] = {**plain[place], "content": whole}
    return plain


def _description(tools: Sequence[Tool]) -> str:
    return DESCRIPTION.format(functions="\n".join(_json(_function(tool)) for tool in tools))


def _function(tool: Tool) -> Any:
    """Return the name and the schema of a tool; of a Python function from its docstring."""
    if callable(tool):
        try:
            tool = get_json_schema(tool)
        except Exception as error:  # its types may be anything
            name = getattr(tool, "__name__", repr(tool))
            raise PromptError(f"tools: {name} cannot be described: {error}") from error
    if not isinstance(tool, Mapping):
        raise PromptError(
            f"tools: {reprlib.repr(tool)} is no function, and no mapping that describes one"
        )
    return tool.get("function", tool)


def _calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls in what the assistant says; results in what the user says, in one turn."""
    names: dict[str, str] = {}  # of the functions called, by the id of the call
    plain: list[Message] = []
    joins = False  # whether a user message belongs to the results before it
    for one in messages:
        role, calls = one.get("role"), one.get("tool_calls") or ()
        if role == "tool":
            name = one.get("name") or names.get(str(one.get("tool_call_id")), "the function")
            one = {"role": "user", "content": f"{name} returned: {_text(one)}"}
        elif calls:
            functions = [_parse_function(call) for call in calls]
            for call, function in zip(calls, functions, strict=True):
                names[str(call.get("id"))] = function["name"]
            listed = [{"name": f["name"], "arguments": _arguments(f)} for f in functions]
            kept = {name: value for name, value in one.items() if name != "tool_calls"}
            one = {**kept, "content": _paragraphs(_text(one), _json(listed))}
        if joins and one["role"] == "user":
            whole = _paragraphs(_text(plain[-1]), _text(one))
            plain[-1] = {"role": "user", "content": whole}
        else:
            plain.append(one)
        joins = role == "tool" or (joins and role == "user")
    return plain


def _parse_function(call: Any) -> Mapping[str, Any]:
    """Return the function of a call: a mapping with a name."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(
            f"messages: a call of a tool needs the name of its function: {reprlib.repr(call)}"
        )
    return function


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object; text that holds none as it is."""
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _text(message: Message) -> str:
    """The content of a message, of which parts may be listed."""
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


def _render(tokenizer: Any, messages: Sequence[Message], how: Mapping[str, Any]) -> str | None:
    """Render messages by the template; return None where it raises."""
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **how)
    except Exception:  # a template is a program of the model's, and may raise anything
        return None
    return text
