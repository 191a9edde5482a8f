"""Grammars: constrain a reply to a JSON schema, a regular expression or a grammar.

Before each token, the matcher computes which tokens may follow; no other token is sampled. Where
the text is complete, an end token is allowed. Where it cannot continue, only an end token is.
llguidance, an optional dependency, parses the grammars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.errors import GrammarError
from kvant.generation.schema_limits import check_schemas
from kvant.prefixes.tree import count_shared_prefix

# Whitespace between the parts of JSON: a newline and at most 16 spaces. An uncertain model could
# otherwise emit whitespace until its token limit.
JSON_WHITESPACE = r"\n?[ \t]{0,16}"


@dataclass(frozen=True)
class Grammar:
    """The texts that a reply may have, in llguidance's syntax; most often from `Grammar.json`.

    >>> grammar = kvant.Grammar.regex("[0-9]{3}")
    >>> steps = kvant.generate(model, tokenizer, "size = ", grammar=grammar)
    >>> "".join(step.text for step in steps).isdigit()
    True
    """

    text: str
    schemas: tuple[str, ...] = field(default=(), repr=False)  # JSON, checked before compiling

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None) -> Grammar:
        """Return the grammar of a JSON schema; without one, of any JSON object."""
        root_schema = json.dumps({"type": "object"} if schema is None else schema)
        text = _import_llguidance().LLMatcher.grammar_from_json_schema(
            root_schema, overrides={"whitespace_pattern": JSON_WHITESPACE}
        )
        return cls(text, (root_schema,))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of a regular expression, which may not use lookaround."""
        return cls(_import_llguidance().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a grammar in llguidance's variant of Lark; its start rule is `start`."""
        return cls(_import_llguidance().LLMatcher.grammar_from_lark(text))

    @classmethod
    def calls(cls, functions: Mapping[str, Mapping[str, Any]], max_calls: int = 1) -> Grammar:
        """Return the grammar of a JSON list of function calls, at most `max_calls`.

        The list is `[{"name": ..., "arguments": {...}}]`. `functions` maps each name to the JSON
        schema of its arguments.
        """
        call = " | ".join(f"call{index}" for index in range(len(functions)))
        more_calls = f'("," " "? call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        lines = [f'start: "[" call {more_calls} "]"', f"call: {call}"]
        for index, (name, schema) in enumerate(functions.items()):
            head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            arguments_schema = {
                "type": "object",
                **schema,
                "x-guidance": {"whitespace_pattern": JSON_WHITESPACE},
            }
            lines += [
                f'call{index}: {head} args{index} "}}"',
                f"args{index}: %json {json.dumps(arguments_schema)}",
            ]
        text = _import_llguidance().LLMatcher.grammar_from_lark("\n".join(lines))
        return cls(text, tuple(map(json.dumps, functions.values())))


class GrammarMatcher:
    """Matches one reply token by token; rolls back over rejected drafts."""

    def __init__(self, matcher: Any, end_tokens: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._consumed_tokens: list[int] = []

    def compute_token_mask(self, tokens: Sequence[int], vocab_size: int) -> Tensor:
        """Return a mask, bool [vocab_size], of the tokens that may follow; all after an end."""
        if not self._end_tokens.isdisjoint(tokens):  # drafts may extend past the end
            return torch.ones(vocab_size, dtype=torch.bool)
        self._advance_to(list(tokens))
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            reason = _shorten_message(self._matcher.get_error())
            raise GrammarError(f"the grammar cannot be matched any further: {reason}")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=vocab_size)
        return torch.from_numpy(bits).bool()

    def _advance_to(self, tokens: list[int]) -> None:
        shared = count_shared_prefix(self._consumed_tokens, tokens)
        if shared < len(self._consumed_tokens):  # drafts were rejected
            self._matcher.rollback(len(self._consumed_tokens) - shared)
        if not self._matcher.consume_tokens(tokens[shared:]):
            reason = _shorten_message(self._matcher.get_error())
            raise GrammarError(f"the grammar does not allow the tokens {tokens[shared:]}: {reason}")
        self._consumed_tokens = tokens


def make_matcher(
    grammar: Grammar | None, tokenizer: Any, end_tokens: frozenset[int]
) -> GrammarMatcher | None:
    """Make the matcher of a reply; raise for a grammar that is invalid or too large."""
    if grammar is None:
        return None
    return GrammarMatcher(_compile_grammar(grammar, tokenizer, end_tokens).deep_copy(), end_tokens)


@lru_cache(maxsize=64)
def _compile_grammar(grammar: Grammar, tokenizer: Any, end_tokens: frozenset[int]) -> Any:
    check_schemas(map(json.loads, grammar.schemas))
    vocabulary = _make_vocabulary(tokenizer, end_tokens)
    matcher = _import_llguidance().LLMatcher(vocabulary, grammar.text, log_level=0)
    if matcher.is_error():
        reason = _shorten_message(matcher.get_error())
        raise GrammarError(f"a grammar that cannot be compiled: {reason}")
    return matcher


@lru_cache(maxsize=4)
def _make_vocabulary(tokenizer: Any, end_tokens: frozenset[int]) -> Any:
    """Make llguidance's form of a tokenizer; cached, as a large one takes a second."""
    if not end_tokens:
        raise GrammarError("a grammar needs an end token, or no text could end")
    if not getattr(tokenizer, "is_fast", False):
        name = type(tokenizer).__name__
        raise GrammarError(f"a grammar for {name}: a fast tokenizer of transformers is needed")
    _import_llguidance()
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=sorted(end_tokens))
    except ValueError as error:
        reason = _shorten_message(str(error))
        raise GrammarError(f"a grammar for this tokenizer: {reason}") from None


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError("a grammar needs llguidance: pip install 'kvant[grammar]'") from None
    return llguidance


def _shorten_message(message: str) -> str:
    """Return the beginning of an error message as one line."""
    return " ".join(message.split())[:300]
