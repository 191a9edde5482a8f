"""Prompts as tokens: text, token ids, or messages that the model's chat template renders.

Tools are text for chat templates that do not support them: the functions are described in the
system message, or before the first user message if the template has no system message. Calls are
text of the assistant, results are text of the user.

    system     Be brief.               + signatures of the functions, and how to call them
    assistant  [{"name": "weather", "arguments": {"city": "Rome"}}]
    user       weather returned: It rains.

A call has the form that `Grammar.calls` enforces. The text depends only on the messages and the
tools, so equal conversations share prefixes.
"""

from __future__ import annotations

import json
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from kvant.errors import ContextError, PromptError
from kvant.prefixes.tree import PrefixMiss, count_shared_prefix
from kvant.vision.processing import expand_placeholders, has_images, list_images

Message = Mapping[str, Any]  # role, content, and further fields of a template
Tool = Mapping[str, Any] | Callable[..., Any]  # JSON, or a Python function with a docstring

CHARACTERS_PER_TOKEN = 4  # initial estimate
MAX_CUT_TOKENS = 64  # tokens that cutting a text may add, compared with the uncut text


@dataclass(frozen=True)
class Messages:
    """Messages with roles, and the tools and options of the chat template.

    >>> tokenizer.chat_template = "{{ messages[0].content }}"  # chat models have their own
    >>> prompt = kvant.Messages([{"role": "user", "content": "import "}])
    >>> steps = kvant.generate(model, tokenizer, prompt, max_new_tokens=4, ignore_end=True)
    >>> len(list(steps))
    4
    """

    messages: Sequence[Message]
    tools: Sequence[Any] = ()  # functions that the model may call, as JSON or in Python
    options: Mapping[str, Any] = field(default_factory=dict)  # of the template: enable_thinking
    marks: Sequence[int] = ()  # counts of leading messages; other prompts may differ after each
    continues: bool = False  # whether the last message is the beginning of the reply

    def __post_init__(self) -> None:
        reserved = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        if invalid := sorted(set(self.options) & set(reserved)):
            raise PromptError(f"{invalid[0]!r} is not an option of a chat template")

    def adapt_to(self, tokenizer: Any) -> Messages:
        """Return these messages with tools as text, if the template does not support tools."""
        if not (self.tools or has_tools(self.messages)):
            return self
        if supports_tools(tokenizer, self.messages, self.options):
            return self
        system = supports_system_message(tokenizer, self.options)
        plain = convert_tools_to_text(self.messages, self.tools, system=system)
        return replace(self, messages=plain, tools=())

    def render_text(self, tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
        """Render messages with the chat template and its options; expand processed images."""
        more = dict(self.options) | ({"tools": list(self.tools)} if self.tools else {})
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **more, **options)
        return expand_placeholders(text, list_images(messages))


def encode_text(
    tokenizer: Any, text: str, limit: int | None = None, *, add_special_tokens: bool = True
) -> list[int]:
    """Encode a prompt; raise if it is not valid Unicode, early if it far exceeds `limit` tokens.

    A tokenizer needs hundreds of bytes per token while it works. So growing slices of a long text
    are encoded, each twice as long, until one exceeds the limit.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt has U+{ord(text[error.start]):04X} at character {error.start}: half of a "
            "surrogate pair is no Unicode text; send the character itself, or both halves"
        ) from None
    options = {} if add_special_tokens else {"add_special_tokens": False}
    size = len(text) if limit is None else CHARACTERS_PER_TOKEN * (limit + MAX_CUT_TOKENS)
    while size < len(text):
        count = len(tokenizer.encode(text[:size], **options))
        if limit is not None and count - MAX_CUT_TOKENS >= limit:
            raise ContextError(
                f"a prompt of {len(text)} characters: its first {size} have {limit} tokens or "
                "more, which is the limit; shorten it, or keep a window (window=N in the spec) "
                "and allow a longer context"
            )
        size *= 2
    return list(tokenizer.encode(text, **options))


def encode_truncated(tokenizer: Any, prompt: Prompt, limit: int) -> list[int]:
    """Encode a prompt, cut to `limit` tokens; keep the special tokens before and after a text.

        | special | plain            | special |
                  begin              end

    Like `encode_text`, encode no more of a long text than the limit needs.
    """
    if not isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt, limit)[:limit]
    size = CHARACTERS_PER_TOKEN * (limit + MAX_CUT_TOKENS)
    while size < len(prompt) and len(tokenizer.encode(prompt[:size])) - MAX_CUT_TOKENS < limit:
        size *= 2
    tokens = encode_text(tokenizer, prompt[:size])
    if len(tokens) <= limit:
        return tokens
    plain = encode_text(tokenizer, prompt[:size], add_special_tokens=False)
    ends = range(len(plain), len(tokens) + 1)
    end = next((end for end in ends if tokens[end - len(plain) : end] == plain), len(tokens))
    suffix = tokens[end:]
    return [*tokens[: max(limit - len(suffix), 0)], *suffix][:limit]


def encode_messages(
    tokenizer: Any, conversation: Messages, max_context: int | None = None
) -> list[int]:
    """Return the tokens before the reply to the last message."""
    if getattr(tokenizer, "chat_template", None) is None:
        if conversation.tools:
            raise PromptError(
                "tools for a tokenizer without a chat template: describe them in one text"
            )
        raise PromptError("messages for a tokenizer without a chat template: give one text")
    try:
        adapted = conversation.adapt_to(tokenizer)
        end = "continue_final_message" if conversation.continues else "add_generation_prompt"
        text = adapted.render_text(tokenizer, adapted.messages, **{end: True})
    except PromptError:  # content that cannot be rendered as text
        raise
    except Exception as error:  # a template is a program and may raise anything
        raise PromptError(f"the chat template of the model refuses this: {error}") from error
    return encode_text(tokenizer, text, max_context, add_special_tokens=False)


def find_branch_points(tokenizer: Any, prompt: Prompt, tokens: Sequence[int]) -> list[int]:
    """Return the lengths after the system messages, after marks, and before the last message.

    Other prompts may differ there. A prompt without messages has none.
    """
    conversation = parse_messages(prompt)
    if conversation is None:
        return []
    adapted = conversation.adapt_to(tokenizer)
    roles = [message.get("role") for message in adapted.messages]
    num_system = next((i for i, role in enumerate(roles) if role != "system"), 0)
    heads = [adapted.messages[:num_system], adapted.messages[:-1]]
    heads += [
        replace(conversation, messages=conversation.messages[:mark]).adapt_to(tokenizer).messages
        for mark in conversation.marks
        if mark < len(conversation.messages) - 1
    ]
    counts = (_count_leading_tokens(tokenizer, adapted, head, tokens) for head in heads if head)
    return sorted({count for count in counts if count is not None})


def describe_prefix_miss(tokenizer: Any, messages: Messages | None, miss: PrefixMiss) -> str:
    """Describe why no longer prefix of a prompt was found; name the message that differs."""
    return miss.describe(tokenizer, partial(_locate_token, tokenizer, messages))


def _locate_token(tokenizer: Any, conversation: Messages | None, position: int) -> str:
    """Describe the message of a token, such as "message 2 (user)"; "" without messages."""
    if conversation is None:
        return ""
    tokens, messages = encode_messages(tokenizer, conversation), conversation.messages

    def has_token(count: int) -> bool:
        """Return whether the first `count` messages have the token."""
        head = replace(conversation, messages=messages[:count]).adapt_to(tokenizer)
        return (_count_leading_tokens(tokenizer, head, head.messages, tokens) or 0) > position

    number = 1 + bisect_left(range(1, len(messages) + 1), True, key=has_token)
    if number > len(messages):
        return f"after message {len(messages)}"
    return f"message {number} ({messages[number - 1].get('role')})"


def _count_leading_tokens(
    tokenizer: Any, adapted: Messages, head: Sequence[Message], tokens: Sequence[int]
) -> int | None:
    """Return how many of `tokens` are those of the first messages, or None if the template raises.

    A template may reject a part of the messages, or render it in another way.
    """
    with suppress(Exception):
        ids = tokenizer.encode(adapted.render_text(tokenizer, head), add_special_tokens=False)
        return count_shared_prefix(ids, tokens)
    return None


ONE_PROMPT_MESSAGE = (
    "one prompt at a time is generated; for several, "
    "[list(kvant.generate(model, tokenizer, one)) for one in prompts]"
)
Prompt = str | Sequence[int] | Tensor | Sequence[Message] | Messages


def encode_prompt(tokenizer: Any, prompt: Prompt, max_context: int | None = None) -> list[int]:
    """Return the tokens of a prompt: text, token ids [T] or [1, T], or messages."""
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt, max_context)
    if (messages := parse_messages(prompt)) is not None:
        return encode_messages(tokenizer, messages, max_context)
    if isinstance(prompt, Mapping):
        raise PromptError("a mapping is no prompt: from a tokenizer's output give ['input_ids']")
    parts: Any = prompt if isinstance(prompt, list | tuple) else [prompt]
    if any(isinstance(part, str) or (len(parts) > 1 and _is_batch(part)) for part in parts):
        raise PromptError(ONE_PROMPT_MESSAGE)
    return _parse_token_ids(prompt)


def parse_messages(prompt: Any) -> Messages | None:
    """Return a prompt that has messages; None for text and tokens."""
    if isinstance(prompt, list | tuple) and prompt:
        is_messages = all(isinstance(message, Mapping) for message in prompt)
        return Messages(prompt) if is_messages else None
    return prompt if isinstance(prompt, Messages) else None


def _is_batch(part: Any) -> bool:
    return isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.ndim > 0)


def _parse_token_ids(prompt: Any) -> list[int]:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{type(prompt).__name__} is no prompt: text, token ids or messages are needed: {error}"
        ) from None
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise PromptError(f"a prompt of {ids.dtype}: token ids are whole numbers")
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise PromptError(
            ONE_PROMPT_MESSAGE if ids.ndim == 2 else f"token ids {list(ids.shape)}: [T] or [1, T]"
        )
    return [int(token) for token in ids.tolist()]


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
    text = DESCRIPTION.format(functions="\n".join(_json(_function(tool)) for tool in tools))
    index = next((i for i, message in enumerate(candidates) if message.get("role") == role), None)
    if index is None:
        return [{"role": role, "content": text}, *plain]
    content = plain[index].get("content") or ""
    new_content = _join_contents(content, text) if system else _join_contents(text, content)
    plain[index] = {**plain[index], "content": new_content}
    return plain


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
            content = _join_contents(plain[-1]["content"], message.get("content") or "")
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


def _join_contents(*contents: Any) -> str | list[Any]:
    """Join contents of messages: texts as paragraphs, with images as a list of parts."""
    messages = [{"content": content} for content in contents]
    if not has_images(messages):
        return _paragraphs(*map(_text, messages))
    texts = [[{"type": "text", "text": c}] if isinstance(c, str) else [*c] for c in contents if c]
    return [part for parts in texts for part in parts]


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
