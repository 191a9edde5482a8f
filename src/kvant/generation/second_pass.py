"""The second pass over a prompt: the model repeats it, and `kvzip` scores rows by its attention.

    cache of the prompt   |--- chunk 1 ---|--- chunk 2 ---|- chunk 3 -|
    forks of it                                                       | R  chunk 1      |
                                                                      | R' t  chunk 2   |
                                                                      | R' t  chunk 3 |

R and R' request to repeat the text, t are the last tokens of the chunk before. Each fork is dropped
at the end of its chunk. What remains is the largest attention weight of each row of the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvant.cache.pruning import count_allowed_rows
from kvant.cache.row_weights import RowWeights
from kvant.errors import ContextError
from kvant.generation.conversation import encode_text
from kvant.hf import TransformersCache
from kvant.recipes import CacheSpec, iterate_attention
from kvant.retention import Pruning

MAX_CHUNK = 2048  # tokens of the prompt that a fork repeats: larger chunks find more
MIN_CHUNK = 64  # with fewer, the requests would cost more than the prompt
MAX_FORWARD = 512  # tokens of a forward: bounds its memory
NUM_LEADING_TOKENS = 8  # of the chunk before: they tell the model where to start
FIRST_REQUEST = "\n\nRepeat the text above:\n\n"
NEXT_REQUEST = "\n\nRepeat the text above, starting with:\n\n"

RunForward = Callable[[list[int], TransformersCache], Tensor]


@dataclass(frozen=True)
class SecondPass:
    """How the prompts of a model are repeated, for the prunes of a spec that need it."""

    rules: tuple[Pruning, ...]
    first_request: tuple[int, ...]
    next_request: tuple[int, ...]
    max_length: int | None  # of a fork: the positions of the model, or the capacity of the cache

    @classmethod
    def from_spec(
        cls, spec: CacheSpec, tokenizer: Any, max_context: int | None
    ) -> SecondPass | None:
        """Return the second pass that a spec needs, within the model's positions; None: none."""
        if not spec.repeats_prompt:
            return None
        layers = [*iterate_attention(*spec.layers)]
        rules = dict.fromkeys(layer.prune for layer in layers)
        limits = [max_context, *(layer.capacity for layer in layers)]
        first, following = (
            tuple(encode_text(tokenizer, text, add_special_tokens=False))
            for text in (FIRST_REQUEST, NEXT_REQUEST)
        )
        return cls(
            tuple(rule for rule in rules if rule is not None and rule.score.repeats_prompt),
            first,
            following,
            min((limit for limit in limits if limit is not None), default=None),
        )

    def count_chunks(self, num_tokens: int) -> int:
        """Return the chunks of a prompt of this length; 0: no row of it would be dropped."""
        if not self._drops_rows(num_tokens):
            return 0
        return -(-num_tokens // self._compute_chunk_size(num_tokens))

    def count_fork_tokens(self, num_tokens: int) -> int:
        """Return the most tokens that a fork appends to a prompt of this length."""
        if not self._drops_rows(num_tokens):
            return 0
        return self._max_request + min(num_tokens, MAX_CHUNK)

    def start(self, tokens: Sequence[int]) -> Repetition:
        """Return the repetition of a prompt, before its first forward."""
        size, inputs = self._compute_chunk_size(len(tokens)), deque[list[int]]()
        for begin in range(0, len(tokens), size):
            leading = tokens[max(0, begin - NUM_LEADING_TOKENS) : begin]
            request = self.next_request if begin else self.first_request
            inputs.append([*request, *leading, *tokens[begin : begin + size]])
        return Repetition(inputs, RowWeights(len(tokens)))

    def _drops_rows(self, num_tokens: int) -> bool:
        return any(count_allowed_rows(rule, num_tokens) < num_tokens for rule in self.rules)

    @property
    def _max_request(self) -> int:
        """The most tokens of a chunk besides those that it repeats."""
        return max(len(self.first_request), len(self.next_request) + NUM_LEADING_TOKENS)

    def _compute_chunk_size(self, num_tokens: int) -> int:
        if self.max_length is None:
            return MAX_CHUNK
        largest = min(MAX_CHUNK, self.max_length - num_tokens - self._max_request)
        if largest < min(MIN_CHUNK, num_tokens):
            fits = self.max_length - self._max_request - MIN_CHUNK
            raise ContextError(
                f"a prompt of {num_tokens} tokens with prune={self.rules[0].score.name}, which "
                f"repeats it within {self.max_length} positions: shorten it to {max(fits, 0)}, or "
                "use a score without a second pass, such as keydiff"
            )
        return largest


@dataclass
class Repetition:
    """The second pass over one prompt, chunk by chunk."""

    inputs: deque[list[int]]  # tokens of the chunks that are left, with their requests
    weights: RowWeights

    def run_chunk(self, run_forward: RunForward, cache: TransformersCache) -> None:
        """Run the next chunk on a fork of the prompt's cache; after the last one, prune it."""
        self._run_on_fork(run_forward, cache, self.inputs[0])
        self.inputs.popleft()
        if not self.inputs:
            cache.prune(self.weights)

    def _run_on_fork(
        self, run_forward: RunForward, cache: TransformersCache, tokens: list[int]
    ) -> None:
        fork = cache.fork()
        fork.states.holder.row_weights = self.weights
        with fork.prompt_mode():
            for begin in range(0, len(tokens), MAX_FORWARD):
                run_forward(tokens[begin : begin + MAX_FORWARD], fork)
