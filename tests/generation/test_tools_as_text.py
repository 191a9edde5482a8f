"""Test tools, calls and results for chat templates without tool support."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

import kvant
from generation.speakers import DEMO, tokenizer_of
from kvant.generation.conversation import encode_messages, find_branch_points

CHATML = (  # modelled on the template of SmolLM2-135M-Instruct
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help."
    "<|im_end|>\n{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (  # like Gemma's: no system message, and two alternating roles
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
KNOWING = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
MENTIONING = "You have no tools. {% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OPTIONAL = "{% if use_tools %}{{ tools | tojson }}{% endif %}" + MENTIONING
SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    + KNOWING
)
OPTIONAL_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' or use_system %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"name": "weather", "arguments": {"city": "Zürich"}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "It rains."}
USER = {"role": "user", "content": "How is the weather?"}
LOOP = [USER, CALLED, RESULT]


def format_chat(template: Any, messages: list[Any], tools: Any = (), **options: Any) -> str:
    tokenizer = copy.deepcopy(tokenizer_of(DEMO))
    tokenizer.chat_template = template
    chat = kvant.Messages(messages, tools, options)
    return str(tokenizer.decode(encode_messages(tokenizer, chat)))


def test_functions_are_described_in_a_system_message() -> None:
    text = format_chat(CHATML, [USER], [WEATHER, NOW])
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n")
    assert rest == "<|im_start|>user\nHow is the weather?<|im_end|>\n<|im_start|>assistant\n"
    for tool in (WEATHER, NOW):
        assert f"\n{json.dumps(tool['function'])}\n" in system
    assert '[{"name": "FUNCTION", "arguments": ' in system
    assert text == format_chat(CHATML, [USER], [WEATHER, NOW])


def test_description_follows_the_client_s_system_message() -> None:
    text = format_chat(CHATML, [{"role": "system", "content": "Be brief."}, USER], [WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions.")
    assert text.count("<|im_start|>system") == 1


def test_template_without_system_messages_puts_it_into_the_first_user_message() -> None:
    text = format_chat(ALTERNATING, LOOP, [WEATHER])
    first, second, third = text.split("[assistant]")[0], *text.split("[assistant]")[1].split("[u")
    assert first.startswith("[user]You can call these functions.")
    assert first.endswith("\n\nHow is the weather?")
    assert json.loads(second) == [CALL]
    assert third == "ser]weather returned: It rains."


def test_templates_with_tools_are_left_alone() -> None:
    text = format_chat(KNOWING, LOOP, [WEATHER])
    assert "You can call these functions" not in text and '"role": "tool"' in text
    named = {"default": ALTERNATING, "tool_use": KNOWING}
    assert '"role": "tool"' in format_chat(named, LOOP, [WEATHER])


def test_template_that_only_mentions_tools_does_not_support_them() -> None:
    assert '{"name": "weather"' in format_chat(MENTIONING, [USER], [WEATHER])


def test_template_is_probed_with_its_options() -> None:
    text = format_chat(OPTIONAL, [USER], [WEATHER], use_tools=True)
    assert text.startswith("[{") and "You can call" not in text
    assert "You can call" in format_chat(OPTIONAL, [USER], [WEATHER])


def test_system_message_support_is_probed_with_the_template_options() -> None:
    text = format_chat(OPTIONAL_SYSTEM, [USER], [WEATHER], use_system=True)
    assert text.startswith("[system]You can call")
    assert format_chat(OPTIONAL_SYSTEM, [USER], [WEATHER]).startswith("[user]You can call")


def test_template_that_refuses_a_single_message_is_probed_with_all() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *LOOP]
    text = format_chat(SYSTEM_FIRST, messages, [WEATHER])
    assert text.startswith("[{") and '"role": "tool"' in text and "You can call" not in text


def test_calls_and_results_become_text_without_tools_too() -> None:
    """The last turn of an agent often offers no tools."""
    text = format_chat(CHATML, LOOP)
    assert '<|im_start|>assistant\n[{"name": "weather", "arguments": {"city": "Zürich"}}]' in text
    assert "<|im_start|>user\nweather returned: It rains.<|im_end|>" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"city": "Zürich"}', {"city": "Zürich"}), ("", ""), ("Zürich", "Zürich"), ("[1]", "[1]")],
)
def test_json_text_arguments_are_shown_as_an_object(arguments: str, expected: Any) -> None:
    """OpenAI's messages hold text. Regression: it was quoted twice."""
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    text = format_chat(CHATML, [USER, {**CALLED, "tool_calls": [call]}, RESULT])
    calls = text.split("assistant\n", 1)[1].split("<|im_end|>", 1)[0]
    assert json.loads(calls) == [{"name": "weather", "arguments": expected}]


def test_results_and_user_text_share_a_turn() -> None:
    two = {"id": "2", "type": "function", "function": {"name": "now", "arguments": {}}}
    call_message = {**CALLED, "content": "I look.", "tool_calls": [*CALLED["tool_calls"], two]}
    results = [RESULT, {"role": "tool", "tool_call_id": "2", "content": "Noon."}]
    text = format_chat(
        ALTERNATING, [USER, call_message, *results, {"role": "user", "content": "And?"}]
    )
    calls = json.dumps([CALL, two["function"]], ensure_ascii=False)
    assert text == (
        f"[user]How is the weather?[assistant]I look.\n\n{calls}"
        "[user]weather returned: It rains.\n\nnow returned: Noon.\n\nAnd?"
    )


def test_later_text_may_differ_after_the_description() -> None:
    tokenizer = copy.deepcopy(tokenizer_of(DEMO))
    tokenizer.chat_template = CHATML
    chat = kvant.Messages([USER], [WEATHER])
    tokens = encode_messages(tokenizer, chat)
    first = tokenizer.decode(tokens[: find_branch_points(tokenizer, chat, tokens)[0]])
    assert "reply in plain text." in first and "How is" not in first


def test_tools_without_a_chat_template_are_refused() -> None:
    with pytest.raises(kvant.PromptError, match="tools for a tokenizer without a chat template"):
        format_chat(None, [USER], [WEATHER])


def forecast(city: str) -> str:
    """
    Weather of a city.

    Args:
        city: Its name.
    """
    return city


def forecast_without_docstring(city: str) -> str:
    return city


@pytest.mark.parametrize("template", [CHATML, KNOWING])
def test_a_python_function_is_described(template: str) -> None:
    text = format_chat(template, [USER], [forecast])
    assert '"forecast"' in text and "Weather of a city." in text and "Its name." in text


@pytest.mark.parametrize(
    ("message", "tool", "reason"),
    [
        (
            USER,
            forecast_without_docstring,
            "tools: forecast_without_docstring cannot be described: .* docstring",
        ),
        (USER, "weather", "tools: 'weather' is no function"),
        (USER, {"name": {1}}, "tools: a function or a call that is no JSON"),
        ({**CALLED, "tool_calls": [{"id": "1"}]}, WEATHER, "messages: a call of a tool needs"),
        ({**CALLED, "tool_calls": ["weather"]}, WEATHER, "messages: a call of a tool needs"),
        ({"role": "tool", "content": [{"image": 1}]}, WEATHER, "messages: content that is no"),
    ],
)
def test_tools_that_cannot_become_text_are_refused(message: Any, tool: Any, reason: str) -> None:
    """Regression: the template was blamed: it "refuses this: 'name'"."""
    with pytest.raises(kvant.PromptError, match=f"^{reason}"):
        format_chat(CHATML, [message], [tool])
