"""The second pass over a prompt: the model repeats it, and `kvzip` scores rows by its attention.

    cache of the prompt   |--- chunk 1 ---|--- chunk 2 ---|- chunk 3 -|
    forks of it                                                       | R  chunk 1      |
                                                                      | R' t  chunk 2   |
                                                                      | R' t  chunk 3 |

R and R' request to repeat the text, t are the last tokens of the chunk before. Each fork is dropped
at the end of its chunk, after several forwards. What remains is the largest attention weight of
each row of the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvant.cache.pruning import check_recorded, count_allowed_rows
from kvant.cache.row_attention import RowAttention
from kvant.errors import ContextError
from kvant.generation.conversation import encode_text
from kvant.generation.settings import find_smallest_limit
from kvant.hf import TransformersCache
from kvant.recipes import CacheSpec, iterate_attention
from kvant.retention import Pruning

MAX_REPEATED_TOKENS = 2048  # tokens of the prompt that a fork repeats: larger chunks find more
MIN_REPEATED_TOKENS = 64  # with fewer, the requests would cost more than the prompt
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
        first, following = (
            tuple(encode_text(tokenizer, text, add_special_tokens=False))
            for text in (FIRST_REQUEST, NEXT_REQUEST)
        )
        return cls(
            tuple(rule for rule in rules if rule is not None and rule.score.repeats_prompt),
            first,
            following,
            find_smallest_limit(max_context, *(layer.capacity for layer in layers)),
        )

    def drops_rows(self, num_tokens: int) -> bool:
        """Return whether the prune of a prompt of this length drops rows."""
        return any(count_allowed_rows(rule, num_tokens) < num_tokens for rule in self.rules)

    def check_room(self, num_tokens: int) -> None:
        """Raise if a prompt of this length is to be repeated, without positions for that."""
        if self.drops_rows(num_tokens):
            self._compute_chunk_size(num_tokens)

    def start(self, tokens: Sequence[int]) -> Repetition:
        """Return the repetition of a prompt, before its first forward."""
        size, chunks = self._compute_chunk_size(len(tokens)), deque[list[int]]()
        for begin in range(0, len(tokens), size):
            leading = tokens[max(0, begin - NUM_LEADING_TOKENS) : begin]
            request = self.next_request if begin else self.first_request
            chunks.append([*request, *leading, *tokens[begin : begin + size]])
        return Repetition(chunks, RowAttention(len(tokens)))

    @property
    def _max_request(self) -> int:
        """The most tokens of a chunk besides those that it repeats."""
        return max(len(self.first_request), len(self.next_request) + NUM_LEADING_TOKENS)

    def _compute_chunk_size(self, num_tokens: int) -> int:
        if self.max_length is None:
            return MAX_REPEATED_TOKENS
        largest = min(MAX_REPEATED_TOKENS, self.max_length - num_tokens - self._max_request)
        if largest < min(MIN_REPEATED_TOKENS, num_tokens):
            fits = self.max_length - self._max_request - MIN_REPEATED_TOKENS
            raise ContextError(
                f"a prompt of {num_tokens} tokens with prune={self.rules[0].score.name}, which "
                f"repeats it within {self.max_length} positions: shorten it to {max(fits, 0)}, or "
                "use a score without a second pass, such as keydiff"
            )
        return largest


@dataclass
class Repetition:
    """The second pass over one prompt, forward by forward."""

    chunks: deque[list[int]]  # tokens of the forks that are left, with their requests
    attention: RowAttention
    fork: TransformersCache | None = None  # has the first tokens of the first chunk

    @property
    def position(self) -> int:
        """Tokens before the next forward: the prompt, and those that the fork has."""
        return self.attention.num_columns if self.fork is None else self.fork.length

    @property
    def chunk_end(self) -> int:
        """Tokens of the prompt and of the first chunk."""
        return self.attention.num_columns + len(self.chunks[0])

    @property
    def num_tokens_left(self) -> int:
        """Tokens of all forwards that are left."""
        return sum(map(len, self.chunks)) + self.attention.num_columns - self.position

    @property
    def max_fork_tokens(self) -> int:
        """The most tokens that a fork appends to the prompt; 0: none is left."""
        return max(map(len, self.chunks), default=0)

    def run(self, run_forward: RunForward, cache: TransformersCache) -> None:
        """Run all forwards that are left, and prune the cache of the prompt."""
        while self.chunks:
            self.run_next(run_forward, cache, MAX_FORWARD)

    def run_next(self, run_forward: RunForward, cache: TransformersCache, count: int) -> None:
        """Run the next `count` tokens of a chunk on a fork of the prompt's cache.

        The cache is pruned after the last chunk. After an error, the chunk begins again.
        """
        try:
            self._run_on_fork(run_forward, cache, count)
        except BaseException:
            self.drop_fork()
            raise
        if self.position == self.chunk_end:
            self.drop_fork()
            self.chunks.popleft()
        if not self.chunks:
            cache.prune(self.attention)

    def drop_fork(self) -> None:
        """Free the pages of the fork; its chunk begins again."""
        self.fork = None

    def _run_on_fork(self, run_forward: RunForward, cache: TransformersCache, count: int) -> None:
        self.fork = fork = cache.fork() if self.fork is None else self.fork
        begin = self.position - self.attention.num_columns
        with fork.states.record_attention(self.attention), fork.prompt_mode():
            run_forward(self.chunks[0][begin : begin + count], fork)
        check_recorded(fork.state.layout.attention, self.attention)
