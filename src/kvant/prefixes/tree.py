"""The prefixes of one model, stored by one spec for one salt: which tokens are there, and whose.

What is kept is a cache of one sequence over pools that all of them share: its pages are held, not
copied. Pages of 64 tokens have a node each, found by their key; their tokens are compared besides.
A cache is kept behind the node where it ends. It serves its own length; where its pages are all
that going on needs (no window, no state, no dense tail), it serves the end of every page before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvant.cache import Cache
from kvant.hf import TransformersCache
from kvant.prefixes.keys import PAGE_TOKENS, make_page_key, make_page_keys
from kvant.prefixes.prefix_store import PrefixWrite, RestoredPrefix

CHECKPOINT_INTERVAL = 2048  # tokens of a long prompt, at which its cache is kept
MIN_LONG_PROMPT = 4096  # tokens of a prompt that is long
MAX_INTERVAL_CHECKPOINTS = 4  # of those that are kept so


@dataclass(eq=False)
class TreeNode:
    """A page of tokens that some caches begin with."""

    key: bytes
    tokens: tuple[int, ...]
    length: int  # up to its end
    parent: TreeNode | None
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    entries: list[PrefixEntry] = field(
        default_factory=list
    )  # that end here, or within the next page


@dataclass(eq=False)
class PrefixEntry:
    """A cache to go on from."""

    node: TreeNode
    tail_tokens: tuple[int, ...]  # its tokens behind the node
    cache: TransformersCache
    num_prefilled: int  # of its tokens, so many were read as prompts; others were decoded
    last_used: float = 0.0  # when, by the clock of its owner
    num_uses: int = 0
    writes: list[PrefixWrite] = field(
        default_factory=list
    )  # to a store, also of those it stands for

    @property
    def length(self) -> int:
        return self.node.length + len(self.tail_tokens)

    @property
    def has_unwritten(self) -> bool:
        """Is some of it yet to be in a store?"""
        return any(write.page_set is not None for write in self.writes)

    @property
    def pending_caches(self) -> list[Cache]:
        """Others whose pages are held until they are written."""
        pieces = [write.page_set for write in self.writes]
        caches = [one.cache for one in pieces if one is not None]
        return [cache for cache in caches if cache is not self.cache.states]

    def cancel_writes(self) -> None:
        """Let nobody write it any more, who holds its pages for that."""
        for write in self.writes:
            write.cancel()


@dataclass(frozen=True)
class PrefixMismatch:
    """Where tokens stop being those of the nearest prefix that is kept."""

    position: int
    cached_tokens: tuple[int, ...]  # tokens that follow there,
    prompt_tokens: tuple[int, ...]  # and those that were asked for


@dataclass(frozen=True)
class PrefixMatch:
    """What there is of some tokens."""

    entry: PrefixEntry | None
    length: int  # that it serves
    num_shared: int  # whole pages of tokens that something kept has, whether it serves them or not
    mismatch: PrefixMismatch | None


class PrefixTree:
    """All that is kept under one root."""

    def __init__(
        self, root_key: bytes, pools_key: bytes, *, pages_suffice: bool, metadata: Mapping[str, str]
    ) -> None:
        self.pools_key = pools_key  # the name of the pools
        self.metadata = metadata  # whose it is, for people
        self.pages_suffice = pages_suffice  # to go on from the end of any of them
        self.root = TreeNode(root_key, (), 0, None)

    def __iter__(self) -> Iterator[PrefixEntry]:
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            yield from node.entries
            nodes.extend(node.children.values())

    def match_prefix(
        self, tokens: Sequence[int], max_length: int, alignment: int = 1
    ) -> PrefixMatch:
        """The longest length <= `most` that something serves.

        With `every` above 1 it is a multiple of that, and all of it was read as a prompt.
        """
        path = self._find_path(tokens)
        best, length = None, 0
        for node in reversed(path):
            if length >= min(node.length + PAGE_TOKENS, max_length):
                break
            for kept in self._find_candidates(node, tokens, last=node is path[-1]):
                serves = find_resumable_length(
                    kept, min(_count_common_tokens(node, kept, tokens), max_length), alignment
                )
                if serves > length:
                    best, length = kept, serves
        return PrefixMatch(best, length, path[-1].length, self._find_mismatch(path[-1], tokens))

    def insert(
        self, tokens: Sequence[int], cache: TransformersCache, num_prefilled: int
    ) -> PrefixEntry | None:
        """Keep a cache of all of these tokens; those that it can stand for are let go.

        None where the key of a page is that of other tokens.
        """
        whole = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
        pages = [tuple(tokens[at : at + PAGE_TOKENS]) for at in range(0, whole, PAGE_TOKENS)]
        names = make_page_keys(self.root.key, tokens)
        path = [self.root]
        while (
            len(path) < len(names) and (old := path[-1].children.get(names[len(path)])) is not None
        ):
            if old.tokens != pages[len(path) - 1]:
                return None
            path.append(old)
        new = PrefixEntry(path[-1], tuple(tokens[whole:]), cache, num_prefilled)
        gone = [one for node in path for one in node.entries if self._replaces(new, one, tokens)]
        new.num_uses = sum(one.num_uses for one in gone)
        new.writes = [w for one in gone for w in one.writes if w.page_set is not None]
        # New nodes hang on each other, and all on the tree by one assignment: no interrupt leaves
        # a node that nothing is behind.
        last = path[-1]
        for number in range(len(path), len(names)):
            node = TreeNode(names[number], pages[number - 1], number * PAGE_TOKENS, new.node)
            if new.node is not last:
                new.node.children[node.key] = node
            new.node = node
        new.node.entries.append(new)
        if new.node is not last:
            top = new.node
            while top.parent is not last and top.parent is not None:
                top = top.parent
            last.children[top.key] = top
        for one in gone:
            self.remove(one)
        return new

    def find_sharing(self, tokens: Sequence[int]) -> list[PrefixEntry]:
        """All caches that begin with the first page of these tokens, or are shorter than a page."""
        nodes, found = self._find_path(tokens)[1:2], list(self.root.entries)
        while nodes:
            node = nodes.pop()
            found += node.entries
            nodes.extend(node.children.values())
        return found

    def remove(self, entry: PrefixEntry) -> None:
        """Let go of one, and of nodes that nothing is behind."""
        node: TreeNode | None = entry.node
        entry.node.entries.remove(entry)
        while node is not None and node.parent is not None and not (node.entries or node.children):
            del node.parent.children[node.key]
            node = node.parent

    # ---- within

    def _find_path(self, tokens: Sequence[int]) -> list[TreeNode]:
        """The nodes that these tokens begin with, the top first."""
        path = [self.root]
        for begin in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            page = tuple(tokens[begin : begin + PAGE_TOKENS])
            node = path[-1].children.get(make_page_key(path[-1].key, page))
            if node is None or node.tokens != page:
                break
            path.append(node)
        return path

    def _find_candidates(
        self, node: TreeNode, tokens: Sequence[int], *, last: bool
    ) -> Iterator[PrefixEntry]:
        """What ends behind a node; behind the last one also what goes on most like the tokens."""
        yield from node.entries
        if last and node.children:
            rest = tokens[node.length : node.length + PAGE_TOKENS]
            child = max(
                node.children.values(), key=lambda one: _count_common_items(one.tokens, rest)
            )
            while not child.entries and child.children:
                child = next(reversed(child.children.values()))
            yield from child.entries[-1:]

    def _replaces(self, new: PrefixEntry, old: PrefixEntry, tokens: Sequence[int]) -> bool:
        """Does a new one of these tokens serve all that an older one does?"""
        end, count = old.length, len(tokens)
        begins = old.tail_tokens == tuple(tokens[old.node.length : end])
        serves = end == count or (self.pages_suffice and new.cache.find_exact_rewind(end) == end)
        return begins and end <= count and new.num_prefilled >= old.num_prefilled and serves

    def _find_mismatch(self, node: TreeNode, tokens: Sequence[int]) -> PrefixMismatch | None:
        """The first token behind a node that is another one than in all that is kept."""
        rest = tuple(tokens[node.length : node.length + PAGE_TOKENS])
        ways = [kept.tail_tokens for kept in node.entries] + [
            one.tokens for one in node.children.values()
        ]
        if not ways or any(_count_common_items(way, rest) in (len(way), len(rest)) for way in ways):
            return None
        way = max(ways, key=lambda one: _count_common_items(one, rest))
        at = _count_common_items(way, rest)
        return PrefixMismatch(node.length + at, way[at : at + 8], rest[at : at + 8])


def _count_common_tokens(node: TreeNode, entry: PrefixEntry, tokens: Sequence[int]) -> int:
    """How many of these tokens something has that begins with a node of them."""
    if entry.node is node:
        return node.length + _count_common_items(entry.tail_tokens, tokens[node.length :])
    page = entry.node
    while page.parent is not None and page.parent is not node:
        page = page.parent
    return node.length + _count_common_items(
        page.tokens, tokens[node.length : node.length + PAGE_TOKENS]
    )


def find_resumable_length(
    prefix: PrefixEntry | RestoredPrefix, max_length: int, alignment: int
) -> int:
    """The longest length that a cache serves."""
    if alignment == 1:
        return prefix.cache.find_exact_rewind(max_length)
    asked = min(max_length, prefix.num_prefilled) // alignment * alignment
    return asked if prefix.cache.find_exact_rewind(asked) == asked else 0


def _count_common_items(first: Sequence[int], second: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
