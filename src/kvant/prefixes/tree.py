"""A radix tree of cached prefixes for one model, spec and salt.

    root -- 64 tokens -- 64 tokens -+- 64 tokens  [entry: 0 to 63 tail tokens, a cache]
                          [entry]   +- 64 tokens  [entry] [entry]

Each node is a token page: 64 tokens, whatever page size the layers have. It is found by its key,
and its tokens are compared as well. An entry is a cache of one sequence over shared pools, at the
node of its last whole page. An entry *serves* a length if a prompt with the same first tokens can
resume at this length. Every entry serves its own length. If its KV pages are enough to resume (no
window, state or dense tail), it also serves each length that is a page end in all layers.
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvant.cache import Cache
from kvant.hf import TransformersCache
from kvant.prefixes.keys import PAGE_TOKENS, make_page_key
from kvant.prefixes.prefix_store import CachedPrefix, PrefixWrite, pages_suffice
from kvant.vision import ImageFeatures
from kvant.vision.prompt import FIRST_IMAGE_HASH


@dataclass(eq=False)
class TreeNode:
    """A page of tokens in the tree."""

    key: bytes
    tokens: tuple[int, ...]
    length: int  # tokens from the root to its end
    parent: TreeNode | None
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    entries: list[PrefixEntry] = field(default_factory=list)  # their last whole page is this node

    def iterate_entries(self) -> Iterator[PrefixEntry]:
        """Yield the entries of this node and of all nodes below it."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield from node.entries
            nodes.extend(node.children.values())


@dataclass(eq=False)
class PrefixEntry:
    """A cached sequence."""

    node: TreeNode
    tail_tokens: tuple[int, ...]  # its tokens after the node
    cache: TransformersCache
    num_prefilled: int  # first tokens that were prefilled; the others were decoded
    features: Mapping[bytes, ImageFeatures] = field(default_factory=dict)  # by digest of an image
    last_used: float = field(default_factory=time.monotonic)
    num_uses: int = 0
    writes: list[PrefixWrite] = field(default_factory=list)  # also those of replaced entries

    @property
    def length(self) -> int:
        return self.node.length + len(self.tail_tokens)

    @property
    def has_unwritten(self) -> bool:
        """Whether a store write is pending."""
        return any(write.page_set is not None for write in self.writes)

    @property
    def pending_caches(self) -> list[Cache]:
        """Caches of replaced entries; they hold their pages until the store has them."""
        page_sets = [write.page_set for write in self.writes]
        caches = [page_set.cache for page_set in page_sets if page_set is not None]
        return [cache for cache in caches if cache is not self.cache.states]

    def record_use(self) -> None:
        """Count a prompt that resumed from this entry."""
        self.last_used = time.monotonic()
        self.num_uses += 1

    def remove(self) -> None:
        """Remove this entry, and nodes that are empty without it; cancel its store writes."""
        # A pending write would hold the pages even after the removal, until it is done.
        for write in self.writes:
            write.cancel()
        node = self.node
        node.entries.remove(self)
        while node.parent is not None and not (node.entries or node.children):
            del node.parent.children[node.key]
            node = node.parent


class PrefixMiss(Protocol):
    """The reason why the cached prefix of a prompt is not longer."""

    def describe(self, tokenizer: Any, locate: Callable[[int], str]) -> str:
        """Return a sentence; `locate` describes the message that has the token at a position."""


@dataclass(frozen=True)
class PrefixesUnsupported:
    """Prefixes are not cached for this kind of model."""

    reason: str

    def describe(self, tokenizer: Any, locate: Callable[[int], str]) -> str:
        return f"prefixes are not cached for this model: {self.reason}"


@dataclass(frozen=True)
class PrefixMismatch:
    """The first difference between a prompt and the nearest cached prefix."""

    position: int
    cached_tokens: tuple[int, ...]  # at most 8, from the position on
    prompt_tokens: tuple[int, ...]

    def describe(self, tokenizer: Any, locate: Callable[[int], str]) -> str:
        cached, prompt = (
            tokenizer.decode([token for token in tokens if token < FIRST_IMAGE_HASH])
            + " (an image)" * any(token >= FIRST_IMAGE_HASH for token in tokens)
            for tokens in (self.cached_tokens, self.prompt_tokens)
        )
        place = ", ".join(filter(None, (f"token {self.position:,}", locate(self.position))))
        return f"prefix lost at {place}: {cached!r} is cached, the prompt has {prompt!r}"


@dataclass(frozen=True)
class PrefixMatch:
    """The result of a lookup in the tree."""

    entry: PrefixEntry | None = None
    length: int = 0  # tokens that the entry serves
    num_shared: int = 0  # first tokens whose whole pages are in the tree, if served or not
    mismatch: PrefixMismatch | None = None


class PrefixTree:
    """The entries of one tree key: of one model, adapter, spec and salt."""

    def __init__(self, tree_key: bytes, alignment: int | None) -> None:
        """With an `alignment`, serve only multiples of it, and only prefilled tokens."""
        self.root = TreeNode(tree_key, (), 0, None)
        self._alignment = alignment

    def __iter__(self) -> Iterator[PrefixEntry]:
        return self.root.iterate_entries()

    def iterate_with_bases(self) -> Iterator[tuple[PrefixEntry, TreeNode]]:
        """Yield each entry, in the order of `iter`, and the nearest node above that has entries.

        Without such a node, it is the root.
        """
        nodes = [(self.root, self.root)]
        while nodes:
            node, base = nodes.pop()
            yield from ((entry, base) for entry in node.entries)
            base = node if node.entries else base
            nodes += [(child, base) for child in node.children.values()]

    def match_prefix(self, tokens: Sequence[int]) -> PrefixMatch:
        """Find the entry that serves the longest prefix of `tokens`, without the last token."""
        path, max_length = self._find_path(tokens), len(tokens) - 1
        best, length = None, 0
        for node in reversed(path):
            if length >= min(node.length + PAGE_TOKENS, max_length):
                break  # entries at this node and above cannot serve more tokens
            page = tokens[node.length : node.length + PAGE_TOKENS]
            for entry, next_tokens in _iterate_candidates(node, page, is_last=node is path[-1]):
                common = min(node.length + count_shared_prefix(next_tokens, page), max_length)
                served = find_resumable_length(entry, common, self._alignment)
                if served > length:
                    best, length = entry, served
        return PrefixMatch(best, length, path[-1].length, _find_mismatch(path[-1], tokens))

    def insert(self, prefix: CachedPrefix) -> PrefixEntry | None:
        """Insert a prefix and remove the entries that it replaces.

        Return None on a hash collision: a page has the key of other tokens.
        """
        tokens = prefix.tokens
        path, whole = self._find_path(tokens), len(tokens) // PAGE_TOKENS * PAGE_TOKENS
        # New nodes are linked to each other first and to the tree by one assignment, so that an
        # interrupt leaves no node without entries.
        node, new_children = path[-1], dict[bytes, TreeNode]()
        for begin in range(node.length, whole, PAGE_TOKENS):
            page = tokens[begin : begin + PAGE_TOKENS]
            key = make_page_key(node.key, page)
            if key in node.children:
                return None
            siblings = new_children if node is path[-1] else node.children
            node = siblings[key] = TreeNode(key, page, begin + PAGE_TOKENS, node)
        new = PrefixEntry(node, tokens[whole:], prefix.cache, prefix.num_prefilled)
        replaced = [e for node in path for e in node.entries if _replaces(new, e, tokens)]
        new.features = dict(ChainMap({**prefix.features}, *({**e.features} for e in replaced)))
        new.num_uses = sum(entry.num_uses for entry in replaced)
        new.writes = [w for entry in replaced for w in entry.writes if w.page_set is not None]
        new.node.entries.append(new)
        path[-1].children.update(new_children)
        for entry in replaced:
            entry.writes = []  # the new entry has them
            entry.remove()
        return new

    def list_entries_sharing(self, tokens: Sequence[int]) -> list[PrefixEntry]:
        """Return the entries that begin with the first page of `tokens`, or have no whole page."""
        path = self._find_path(tokens)
        shared = path[1].iterate_entries() if len(path) > 1 else ()
        return [*self.root.entries, *shared]

    def _find_path(self, tokens: Sequence[int]) -> list[TreeNode]:
        """Return the nodes of the whole pages of `tokens`, from the root as far as they match."""
        path = [self.root]
        for begin in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            page = tuple(tokens[begin : begin + PAGE_TOKENS])
            node = path[-1].children.get(make_page_key(path[-1].key, page))
            if node is None or node.tokens != page:
                break
            path.append(node)
        return path


def list_caches(entries: Sequence[PrefixEntry]) -> tuple[list[Cache], list[int]]:
    """Return the caches of entries, then those of replaced entries whose store write is pending.

    Also return the index of the entry of each cache.
    """
    caches, owners = [entry.cache.states for entry in entries], list(range(len(entries)))
    for index, entry in enumerate(entries):
        for cache in entry.pending_caches if entry.writes else ():
            caches.append(cache)
            owners.append(index)
    return caches, owners


def find_resumable_length(
    prefix: PrefixEntry | CachedPrefix, max_length: int, alignment: int | None
) -> int:
    """Return the longest length <= `max_length` from which generation can continue."""
    if alignment is None:
        return prefix.cache.find_exact_rewind(max_length)
    aligned = min(max_length, prefix.num_prefilled) // alignment * alignment
    return aligned if prefix.cache.find_exact_rewind(aligned) == aligned else 0


def _iterate_candidates(
    node: TreeNode, page: Sequence[int], *, is_last: bool
) -> Iterator[tuple[PrefixEntry, tuple[int, ...]]]:
    """Yield the entries at a node, each with its tokens after the node.

    After the last node of a path, also yield an entry of the branch most similar to `page`.
    """
    for entry in node.entries:
        yield entry, entry.tail_tokens
    if is_last and node.children:
        child = max(node.children.values(), key=lambda c: count_shared_prefix(c.tokens, page))
        tokens = child.tokens
        while not child.entries and child.children:
            child = next(reversed(child.children.values()))
        for entry in child.entries[-1:]:
            yield entry, tokens


def _replaces(new: PrefixEntry, old: PrefixEntry, tokens: Sequence[int]) -> bool:
    """Return whether the new entry of `tokens` serves all that an older entry does."""
    old_length, new_length = old.length, len(tokens)
    return (
        old.tail_tokens == tuple(tokens[old.node.length : old_length])
        and old_length <= new_length
        and new.num_prefilled >= old.num_prefilled
        and (
            old_length == new_length
            or (
                pages_suffice(new.cache.spec)
                and new.cache.find_exact_rewind(old_length) == old_length
            )
        )
    )


def _find_mismatch(node: TreeNode, tokens: Sequence[int]) -> PrefixMismatch | None:
    """Return the first difference from the most similar branch after a node.

    Return None if there is no branch, or if a branch and the next tokens agree up to the end of
    the shorter of the two.
    """
    page = tuple(tokens[node.length : node.length + PAGE_TOKENS])
    branches = [entry.tail_tokens for entry in node.entries]
    branches += [child.tokens for child in node.children.values()]
    if not branches or any(branch[: len(page)] == page[: len(branch)] for branch in branches):
        return None
    branch = max(branches, key=lambda branch: count_shared_prefix(branch, page))
    begin = count_shared_prefix(branch, page)
    end = begin + 8
    return PrefixMismatch(node.length + begin, branch[begin:end], page[begin:end])


def count_shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    count = min(len(left), len(right))
    if list(left[:count]) == list(right[:count]):
        return count
    return next(i for i in range(count) if left[i] != right[i])
