"""What a reply may be: JSON of a schema, or any text of a grammar.

Before every token a grammar says which tokens may stand there; the others are never drawn. The end
of a reply may be drawn where the text is whole, and nothing else where it cannot go on. Grammars
are read by llguidance, which is optional; a `Vocabulary` is a tokenizer as it knows one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.errors import GrammarError
from kvant.generation.prefill import count_shared_prefix

# Between the parts of JSON: a new line, and so many spaces. A model that is not sure of what comes
# would else write spaces for ever.
JSON_WHITESPACE = r"\n?[ \t]{0,16}"


@dataclass(frozen=True)
class Grammar:
    """A set of texts, in the words of llguidance. `Grammar.json(schema)` is the usual one.

    >>> grammar = kvant.Grammar.regex("[0-9]{3}")
    >>> steps = kvant.generate(model, tokenizer, "size = ", grammar=grammar)
    >>> "".join(step.text for step in steps).isdigit()
    True
    """

    text: str

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None) -> Grammar:
        """What fits a JSON schema; without one, any JSON object."""
        wanted = {"type": "object"} if schema is None else schema
        return cls(
            _import_llguidance().LLMatcher.grammar_from_json_schema(
                json.dumps(wanted), overrides={"whitespace_pattern": JSON_WHITESPACE}
            )
        )

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """What a regular expression matches as a whole; it may look neither ahead nor behind."""
        return cls(_import_llguidance().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """What a grammar in the language of Lark, as llguidance reads it, gives for `start`."""
        return cls(_import_llguidance().LLMatcher.grammar_from_lark(text))

    @classmethod
    def calls(cls, functions: Mapping[str, Mapping[str, Any]], max_calls: int = 1) -> Grammar:
        """A list of calls of functions, by name with the schemas of their arguments.

        `[{"name": ..., "arguments": {...}}]`, with `most` calls at most.
        """
        call = " | ".join(f"call{place}" for place in range(len(functions)))
        more = f'("," " "? call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        lines = [f'start: "[" call {more} "]"', f"call: {call}"]
        for place, (name, schema) in enumerate(functions.items()):
            head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            told = {
                "type": "object",
                **schema,
                "x-guidance": {"whitespace_pattern": JSON_WHITESPACE},
            }
            lines += [
                f'call{place}: {head} args{place} "}}"',
                f"args{place}: %json {json.dumps(told)}",
            ]
        return cls.lark("\n".join(lines))


class GrammarVocabulary:
    """The tokens of a tokenizer, and those that end a reply."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        if not end_tokens:
            raise GrammarError("a grammar without a token that ends a reply: no text could end")
        if not getattr(tokenizer, "is_fast", False):
            kind = type(tokenizer).__name__
            raise GrammarError(f"a grammar for {kind}: a fast tokenizer of transformers is needed")
        _import_llguidance()
        from llguidance.hf import from_tokenizer

        self.end_tokens = end_tokens
        try:
            self._llg_tokenizer = from_tokenizer(tokenizer, eos_token=sorted(end_tokens))
        except ValueError as error:
            raise GrammarError(
                f"a grammar for this tokenizer: {_shorten_message(str(error))}"
            ) from None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Refuses what is no grammar, or more of one than can be followed."""
        matcher = _import_llguidance().LLMatcher(self._llg_tokenizer, grammar.text, log_level=0)
        if matcher.is_error():
            raise GrammarError(
                f"a grammar that cannot be followed: {_shorten_message(matcher.get_error())}"
            )
        return CompiledGrammar(grammar, self, matcher)


class CompiledGrammar:
    """A grammar over a vocabulary; two of the same are equal."""

    def __init__(self, grammar: Grammar, vocabulary: GrammarVocabulary, matcher: Any) -> None:
        self._key = grammar, vocabulary
        self._matcher = matcher

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompiledGrammar) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def make_matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._key[1].end_tokens)


class GrammarMatcher:
    """Rules along one reply, which may be taken back as far as it was guessed."""

    def __init__(self, matcher: Any, end_tokens: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._consumed_tokens: list[int] = []

    def compute_token_mask(self, tokens: Sequence[int], vocab_size: int) -> Tensor:
        """Which of `size` tokens may stand behind these: bool [size]; behind the end, any."""
        if not self._end_tokens.isdisjoint(tokens):  # somebody guesses on
            return torch.ones(vocab_size, dtype=torch.bool)
        self._advance_to(list(tokens))
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(
                "the grammar cannot be followed any further: "
                f"{_shorten_message(self._matcher.get_error())}"
            )
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=vocab_size)
        return torch.from_numpy(bits).bool()

    def _advance_to(self, tokens: list[int]) -> None:
        shared = count_shared_prefix(self._consumed_tokens, tokens)
        if shared < len(self._consumed_tokens):  # what was guessed, and is not so
            self._matcher.rollback(len(self._consumed_tokens) - shared)
        if not self._matcher.consume_tokens(tokens[shared:]):
            why = _shorten_message(self._matcher.get_error())
            raise GrammarError(f"the grammar does not go on with {tokens[shared:]}: {why}")
        self._consumed_tokens = tokens


def compile_grammar(
    grammar: Grammar | None, tokenizer: Any, end_tokens: frozenset[int]
) -> CompiledGrammar | None:
    """A grammar over the tokens of a model, where there is one."""
    return None if grammar is None else _compile_grammar(grammar, tokenizer, end_tokens)


@lru_cache(maxsize=64)
def _compile_grammar(
    grammar: Grammar, tokenizer: Any, end_tokens: frozenset[int]
) -> CompiledGrammar:
    return _make_vocabulary(tokenizer, end_tokens).compile(grammar)


@lru_cache(maxsize=4)
def _make_vocabulary(tokenizer: Any, end_tokens: frozenset[int]) -> GrammarVocabulary:
    """Of a large tokenizer it takes a second."""
    return GrammarVocabulary(tokenizer, end_tokens)


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError("a grammar needs llguidance: pip install 'kvant[grammar]'") from None
    return llguidance


def _shorten_message(message: str) -> str:
    """The first lines of an error, as one."""
    return " ".join(message.split())[:300]
