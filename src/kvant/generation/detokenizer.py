"""Text of tokens as they are generated, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 8  # preceding tokens that affect how a tokenizer joins text
MAX_PARTIAL_TOKENS = 3  # tokens of an incomplete character: one less than UTF-8 has bytes


class IncrementalDetokenizer:
    """Turn a growing list of tokens into text.

        _prefix_offset      _read_offset
    ----|-------------------|-------------------> tokens
        | decoded again     | text uncertain

    Both offsets are between characters: tokenizers with byte fallback decode all bytes around a
    part of a character as replacement characters.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        previous_tokens: Sequence[int] = (),
        *,
        include_special_tokens: bool = False,
    ) -> None:
        """Continue `previous_tokens`, which affect how a tokenizer joins words.

        If they end within a character, it is part of the text. With `include_special_tokens` the
        names of special tokens are part of the text.
        """
        self._decode: Callable[[list[int]], str] = partial(
            tokenizer.decode, skip_special_tokens=not include_special_tokens
        )
        self.stop = tuple(stop)
        self.stop_string: str | None = None  # the one that ended the text
        begin, end = self._find_whole_characters(tokenizer, previous_tokens)
        self._tokens = list(previous_tokens[begin:])
        self._prefix_offset = 0  # where decoding starts
        self._read_offset = end - begin  # where the uncertain text starts
        self._boundaries = [0, self._read_offset]  # offsets between characters, ascending
        self._pending_text = ""  # possible beginning of a stop string

    def _find_whole_characters(self, tokenizer: Any, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the range of the last tokens that decodes without parts of characters."""
        last_tokens = max(0, len(tokens) - CONTEXT_TOKENS), len(tokens)
        partial_counts = range(MAX_PARTIAL_TOKENS + 1)
        for num_after, num_before in product(partial_counts, partial_counts):
            end = max(0, len(tokens) - num_after)
            begin = max(0, len(tokens) - CONTEXT_TOKENS - num_before)
            text = self._decode(list(tokens[begin:end]))
            is_partial = text.endswith(REPLACEMENT_CHARACTER)
            if is_partial and end == len(tokens) and _end_with_replacement(tokenizer, tokens):
                return last_tokens
            if not is_partial and not text.startswith(REPLACEMENT_CHARACTER):
                return begin, end
        return last_tokens

    @property
    def has_stopped(self) -> bool:
        return self.stop_string is not None

    def append_token(self, token: int) -> str:
        """Append a token; return the text that became certain."""
        self._tokens.append(token)
        old_text = self._decode(self._tokens[self._prefix_offset : self._read_offset])
        new_text = self._decode(self._tokens[self._prefix_offset :])
        if new_text.endswith(REPLACEMENT_CHARACTER) or len(new_text) < len(old_text):
            return ""
        limit = self._read_offset - CONTEXT_TOKENS
        old_boundaries = [offset for offset in self._boundaries if offset <= limit]
        self._prefix_offset = max(old_boundaries, default=self._prefix_offset)
        self._read_offset = len(self._tokens)
        newer = [offset for offset in self._boundaries if offset >= self._prefix_offset]
        self._boundaries = [*newer, self._read_offset]
        piece = new_text[len(old_text) :]
        return self._cut_at_stop(piece) if self.stop else piece

    def flush(self) -> str:
        """Return the text that was held back: no more tokens follow."""
        if self.has_stopped:
            return ""
        old_text = self._decode(self._tokens[self._prefix_offset : self._read_offset])
        piece = self._decode(self._tokens[self._prefix_offset :])[len(old_text) :]
        self._read_offset = len(self._tokens)
        text = self._cut_at_stop(piece)
        text, self._pending_text = text + self._pending_text, ""
        return text

    def _cut_at_stop(self, piece: str) -> str:
        text = self._pending_text + piece
        found = [(text.find(string), string) for string in self.stop if string in text]
        if found:
            position, self.stop_string = min(found, key=lambda pair: pair[0])
            self._pending_text = ""
            return text[:position]
        num_pending = max((_count_overlap(text, string) for string in self.stop), default=0)
        self._pending_text = text[len(text) - num_pending :]
        return text[: len(text) - num_pending]


def _end_with_replacement(tokenizer: Any, tokens: Sequence[int]) -> bool:
    """Return whether tokens end with a whole U+FFFD, and not with a part of a character."""
    own = tokenizer.encode(REPLACEMENT_CHARACTER, add_special_tokens=False)
    # Some tokenizers put a token of a space before a text.
    return any(
        count and list(tokens[-count:]) == own[-count:] for count in (len(own), len(own) - 1)
    )


def _count_overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of `text` that begins `string`."""
    limit = min(len(text), len(string) - 1)
    return next((n for n in range(limit, 0, -1) if text.endswith(string[:n])), 0)
