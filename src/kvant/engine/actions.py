"""What an engine's thread does next: the actions that the scheduler chooses."""

from __future__ import annotations

from dataclasses import dataclass

from kvant.engine.request import Request
from kvant.vision import ProcessedImage


@dataclass(frozen=True)
class RequestAction:
    request: Request


class MatchPrefix(RequestAction):
    """Look up the prompt of a request in the cached prefixes."""


@dataclass(frozen=True)
class Evict:
    """Evict unused prefixes until `nbytes` bytes are freed or none is left."""

    nbytes: int
    include_unwritten: bool = False  # also evict prefixes with pending store writes


class LookUpStore(RequestAction):
    """Look up the prompt of a request in a store.

    Memory for the whole prompt stays reserved while the request waits for the store.
    """


@dataclass(frozen=True)
class Prefill(RequestAction):
    """Prefill the next `count` tokens of the prompt of a request."""

    count: int


@dataclass(frozen=True)
class EncodeImage(RequestAction):
    """Encode an image of a request, before a chunk that has some of its tokens."""

    image: ProcessedImage


@dataclass(frozen=True)
class Repeat(RequestAction):
    """Run the next `count` tokens of the second pass over a prompt.

    The model repeats the prompt on forks of its cache, to score the prompt's KV rows for pruning.
    """

    count: int
    position: int  # tokens before these: the prompt, and those of the pass so far


@dataclass(frozen=True)
class Decode:
    """Decode one token for each sequence of `requests`, which have the same adapter."""

    requests: tuple[Request, ...]


class SwapOut(RequestAction):
    """Write the pages of a request to files and free them."""


class SwapIn(RequestAction):
    """Read the pages of a swapped-out request back."""


@dataclass(frozen=True)
class FreePools:
    """Free all pools, once no running request and no cached prefix uses them."""


PromptAction = Prefill | EncodeImage | Repeat
ForwardAction = PromptAction | Decode
Action = MatchPrefix | Evict | LookUpStore | ForwardAction | SwapOut | SwapIn | FreePools
