"""Requests for functions with JSON schemas, and the calls that answer them.

    You call functions. ... | {"name": ..., "parameters": ...} | Request: ... Call: {...}
    instruction             | functions, one a line            | examples

A prompt ends with as many examples as fit. Its requests use the same functions with values drawn
anew; none of them is an example.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

INSTRUCTION = "You call functions. Answer each request with one call. The functions:\n\n"
CITIES = ("Paris", "London", "Tokyo", "Berlin", "Madrid", "Rome", "Boston", "Chicago", "Cairo")
NAMES = ("Anna", "Peter", "Maria", "James", "Laura", "David", "Emma", "Thomas", "Sarah")
ROOMS = ("kitchen", "bedroom", "bathroom", "garage", "office", "hall")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ITEMS = ("milk", "bread", "eggs", "apples", "rice", "cheese", "coffee", "sugar")
NUMBERS = tuple(range(2, 60))
LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese")


@dataclass(frozen=True)
class Function:
    """A function, the values of its arguments, and requests that name all of them."""

    name: str
    description: str
    values: dict[str, tuple[Any, ...]]
    requests: tuple[str, ...]

    @property
    def schema(self) -> str:
        """The line that describes the function: its arguments as a JSON schema."""
        properties = {
            name: {"type": "integer" if values is NUMBERS else "string"}
            for name, values in self.values.items()
        }
        parameters = {"type": "object", "properties": properties, "required": [*properties]}
        return json.dumps(
            {"name": self.name, "description": self.description, "parameters": parameters}
        )

    @property
    def num_requests(self) -> int:
        """How many requests differ."""
        return len(self.requests) * math.prod(map(len, self.values.values()))


FUNCTIONS = (
    Function(
        "set_timer",
        "Start a timer",
        {"minutes": NUMBERS},
        ("Set a timer for {minutes} minutes.", "Remind me in {minutes} minutes."),
    ),
    Function(
        "get_weather",
        "Get the weather forecast of a city",
        {"city": CITIES, "day": DAYS},
        ("What is the weather in {city} on {day}?", "Will it rain in {city} on {day}?"),
    ),
    Function(
        "call_contact",
        "Call a person by telephone",
        {"name": NAMES},
        ("Call {name}.", "I want to talk to {name} on the phone."),
    ),
    Function(
        "turn_on_light",
        "Turn on the light in a room",
        {"room": ROOMS},
        ("Turn on the light in the {room}.", "It is too dark in the {room}."),
    ),
    Function(
        "turn_off_light",
        "Turn off the light in a room",
        {"room": ROOMS},
        ("Turn off the light in the {room}.", "It is too bright in the {room}."),
    ),
    Function(
        "add_to_list",
        "Add an item to the shopping list",
        {"item": ITEMS, "count": NUMBERS},
        ("Put {count} {item} on the shopping list.", "We need to buy {count} {item}."),
    ),
    Function(
        "book_train",
        "Book a train between two cities",
        {"origin": CITIES, "destination": CITIES},
        ("Book a train from {origin} to {destination}.", "Go by rail: {origin} to {destination}."),
    ),
    Function(
        "translate_word",
        "Translate an English word",
        {"word": ITEMS, "language": LANGUAGES},
        ("What is {word} in {language}?", "Translate the word {word} to {language}."),
    ),
    Function(
        "create_meeting",
        "Create a meeting in the calendar",
        {"name": NAMES, "day": DAYS},
        ("Plan a meeting with {name} on {day}.", "I will meet {name} on {day}."),
    ),
    Function(
        "set_volume",
        "Set the volume of the speaker in percent",
        {"percent": NUMBERS},
        ("Set the volume to {percent} percent.", "Play it at {percent} percent."),
    ),
)


@dataclass(frozen=True)
class CallRequest:
    """A request and the call that answers it."""

    text: str
    name: str
    arguments: dict[str, Any]

    @property
    def question(self) -> str:
        return f"\nRequest: {self.text}\nCall:"

    @property
    def answer(self) -> str:
        return f" {json.dumps({'name': self.name, 'arguments': self.arguments})}\n"


@dataclass(frozen=True)
class CallScore:
    """What is right about a generated call; each includes the one before."""

    is_valid: bool  # JSON: an object with `name` and `arguments`
    is_function: bool
    is_correct: bool  # all arguments, too


def score_call(text: str, request: CallRequest) -> CallScore:
    """Compare the first line of a generated text with the expected call."""
    try:
        call = json.loads(text.partition("\n")[0])
    except ValueError:
        return CallScore(False, False, False)
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return CallScore(False, False, False)
    is_function = call["name"] == request.name
    return CallScore(True, is_function, is_function and call["arguments"] == request.arguments)


@dataclass(frozen=True)
class CallExam:
    prompt: list[int]
    requests: tuple[CallRequest, ...]


def make_call_exam(tokenizer: Any, length: int, num_requests: int, seed: int) -> CallExam:
    """Make a prompt of at most `length` tokens, and the requests that follow it."""
    drawn = _draw_requests(random.Random(seed))
    requests = _draw_distinct(drawn, num_requests)
    schemas = "\n".join(function.schema for function in FUNCTIONS)
    prompt: list[int] = tokenizer.encode(f"{INSTRUCTION}{schemas}\n")
    num_functions = len(prompt)
    while True:
        example = next(drawn)
        if example in requests:
            continue
        ids = tokenizer.encode(example.question + example.answer, add_special_tokens=False)
        if len(prompt) + len(ids) > length:
            break
        prompt += ids
    if len(prompt) == num_functions:
        raise ValueError(f"a prompt of {length} tokens: the functions alone are {num_functions}")
    return CallExam(prompt, requests)


def _draw_distinct(drawn: Iterator[CallRequest], count: int) -> tuple[CallRequest, ...]:
    limit = sum(function.num_requests for function in FUNCTIONS) - 1  # one or more are examples
    if count > limit:
        raise ValueError(f"{count} requests: at most {limit} differ from each other and an example")
    requests: dict[str, CallRequest] = {}
    while len(requests) < count:
        request = next(drawn)
        requests[request.text] = request
    return tuple(requests.values())


def _draw_requests(rng: random.Random) -> Iterator[CallRequest]:
    """Yield requests of all functions in turn, each turn in another order."""
    while True:
        for function in rng.sample(FUNCTIONS, len(FUNCTIONS)):
            arguments = {name: rng.choice(values) for name, values in function.values.items()}
            yield CallRequest(
                rng.choice(function.requests).format(**arguments), function.name, arguments
            )
