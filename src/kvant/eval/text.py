"""The text that formats are measured on: pieces of tokens, as long as the model's context.

Several documents take turns, a piece each, so that no long one decides alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from kvant.demo.texts import held_out


@dataclass(frozen=True)
class Text:
    """Pieces [1, T] of token ids; each begins as the tokenizer begins a text."""

    pieces: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        return sum(piece.shape[1] for piece in self.pieces)

    @property
    def whole(self) -> list[Tensor]:
        """Those that are as long as the first: the last of a text is shorter."""
        return [piece for piece in self.pieces if piece.shape == self.pieces[0].shape]

    @property
    def digest(self) -> str:
        """The same for the same tokens in the same pieces."""
        sha = hashlib.sha256()
        for piece in self.pieces:
            sha.update(str(piece[0].tolist()).encode())
        return sha.hexdigest()[:16]


def cut(tokenizer: Any, text: str | None, context: int, tokens: int) -> Text:
    """The first `tokens` tokens of a text; without one, of files held out from the demo model."""
    begin = beginning(tokenizer)
    room = context - len(begin)
    if room < 2:
        raise ValueError(f"pieces of {context} tokens: {2 + len(begin)} or more are needed")
    documents = [
        tokenizer.encode(document, add_special_tokens=False)
        for document in (held_out() if text is None else [text])
    ]
    whole = [document for document in documents if len(document) >= room]
    pieces: list[Tensor] = []
    for piece in _in_turn(whole or documents, room):
        missing = tokens - sum(one.shape[1] for one in pieces)
        ids = [*begin, *piece][: max(0, missing)]
        if len(ids) > 1 + len(begin):
            pieces.append(torch.tensor([ids]))
    if not pieces:
        raise ValueError("the text has fewer than 2 tokens: give a longer one")
    return Text(tuple(pieces))


def beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer sets before a text."""
    told: list[int] = tokenizer.encode("")
    return [one for one in told[:1] if one == tokenizer.bos_token_id]


def _in_turn(documents: Sequence[list[int]], room: int) -> Iterator[list[int]]:
    cuts = [[d[at : at + room] for at in range(0, len(d), room)] for d in documents]
    for turn in zip_longest(*cuts):
        yield from (piece for piece in turn if piece)
