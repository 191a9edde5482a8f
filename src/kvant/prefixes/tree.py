"""A radix tree of cached prefixes for one model, spec and salt.

    root -- 64 tokens -- 64 tokens -+- 64 tokens  [entry: 0 to 63 tail tokens, a cache]
                          [entry]   +- 64 tokens  [entry] [entry]

Each node is a page of 64 tokens, found by its key; its tokens are compared as well. An entry is a
cache of one sequence over shared pools, at the node of its last whole page. An entry *serves* a
length if a prompt with the same first tokens can resume at this length. Every entry serves its own
length. If pages suffice (no window, state or dense tail), it also serves the end of each page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvant.cache import Cache
from kvant.hf import TransformersCache
from kvant.prefixes.keys import PAGE_TOKENS, make_page_key, make_page_keys
from kvant.prefixes.prefix_store import PrefixWrite, RestoredPrefix


@dataclass(eq=False)
class TreeNode:
    """A page of tokens in the tree."""

    key: bytes
    tokens: tuple[int, ...]
    length: int  # tokens from the root to its end
    parent: TreeNode | None
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    entries: list[PrefixEntry] = field(default_factory=list)  # whose last whole page this is


@dataclass(eq=False)
class PrefixEntry:
    """A cached sequence."""

    node: TreeNode
    tail_tokens: tuple[int, ...]  # its tokens after the node
    cache: TransformersCache
    num_prefilled: int  # first tokens that were prefilled; the others were decoded
    last_used: float = 0.0  # monotonic seconds
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
        """Caches of replaced entries, whose pages are referenced until they are written."""
        page_sets = [write.page_set for write in self.writes]
        caches = [page_set.cache for page_set in page_sets if page_set is not None]
        return [cache for cache in caches if cache is not self.cache.states]

    def cancel_writes(self) -> None:
        """Cancel pending store writes and release their pages."""
        for write in self.writes:
            write.cancel()


@dataclass(frozen=True)
class PrefixMismatch:
    """The first difference between a prompt and the nearest cached prefix."""

    position: int
    cached_tokens: tuple[int, ...]  # up to 8 from the position on
    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True)
class PrefixMatch:
    """The result of a lookup in the tree."""

    entry: PrefixEntry | None
    length: int  # tokens that the entry serves
    num_shared: int  # tokens of whole pages in the tree, whether an entry serves them or not
    mismatch: PrefixMismatch | None


class PrefixTree:
    """The entries under one root key."""

    def __init__(self, root_key: bytes, *, pages_suffice: bool) -> None:
        self.pages_suffice = pages_suffice  # entries can be resumed at the end of any page
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
        """Find the entry that serves the longest length <= `max_length`.

        With `alignment` above 1 the length is a multiple of it, and all its tokens were prefilled.
        """
        path = self._find_path(tokens)
        best, length = None, 0
        for node in reversed(path):
            if length >= min(node.length + PAGE_TOKENS, max_length):
                break
            for entry in self._find_candidates(node, tokens, last=node is path[-1]):
                common = min(_count_common_tokens(node, entry, tokens), max_length)
                served = find_resumable_length(entry, common, alignment)
                if served > length:
                    best, length = entry, served
        return PrefixMatch(best, length, path[-1].length, self._find_mismatch(path[-1], tokens))

    def insert(
        self, tokens: Sequence[int], cache: TransformersCache, num_prefilled: int
    ) -> PrefixEntry | None:
        """Insert a cache of `tokens` and remove the entries that it replaces.

        Return None on a hash collision: a page has the key of other tokens.
        """
        whole = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
        pages = [tuple(tokens[at : at + PAGE_TOKENS]) for at in range(0, whole, PAGE_TOKENS)]
        keys = make_page_keys(self.root.key, tokens)
        path = [self.root]
        while len(path) < len(keys):
            child = path[-1].children.get(keys[len(path)])
            if child is None:
                break
            if child.tokens != pages[len(path) - 1]:
                return None
            path.append(child)
        new = PrefixEntry(path[-1], tuple(tokens[whole:]), cache, num_prefilled)
        replaced = [e for node in path for e in node.entries if self._replaces(new, e, tokens)]
        new.num_uses = sum(entry.num_uses for entry in replaced)
        new.writes = [w for entry in replaced for w in entry.writes if w.page_set is not None]
        # New nodes are linked to each other first and to the tree by one assignment, so that an
        # interrupt leaves no node without entries.
        last = path[-1]
        for number in range(len(path), len(keys)):
            node = TreeNode(keys[number], pages[number - 1], number * PAGE_TOKENS, new.node)
            if new.node is not last:
                new.node.children[node.key] = node
            new.node = node
        new.node.entries.append(new)
        if new.node is not last:
            top = new.node
            while top.parent is not last and top.parent is not None:
                top = top.parent
            last.children[top.key] = top
        for entry in replaced:
            self.remove(entry)
        return new

    def list_entries_sharing(self, tokens: Sequence[int]) -> list[PrefixEntry]:
        """Return the entries with the first page of `tokens`, and those shorter than a page."""
        nodes, entries = self._find_path(tokens)[1:2], list(self.root.entries)
        while nodes:
            node = nodes.pop()
            entries += node.entries
            nodes.extend(node.children.values())
        return entries

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry, and nodes that are empty without it."""
        node: TreeNode | None = entry.node
        entry.node.entries.remove(entry)
        while node is not None and node.parent is not None and not (node.entries or node.children):
            del node.parent.children[node.key]
            node = node.parent

    # ---- internals

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

    def _find_candidates(
        self, node: TreeNode, tokens: Sequence[int], *, last: bool
    ) -> Iterator[PrefixEntry]:
        """Yield the entries at a node; after the last node, also one of the most similar branch."""
        yield from node.entries
        if last and node.children:
            page = tokens[node.length : node.length + PAGE_TOKENS]
            child = max(node.children.values(), key=lambda c: _count_common_items(c.tokens, page))
            while not child.entries and child.children:
                child = next(reversed(child.children.values()))
            yield from child.entries[-1:]

    def _replaces(self, new: PrefixEntry, old: PrefixEntry, tokens: Sequence[int]) -> bool:
        """Return whether the entry of `tokens` serves all that an older entry does."""
        end, count = old.length, len(tokens)
        is_prefix = old.tail_tokens == tuple(tokens[old.node.length : end])
        serves = end == count or (self.pages_suffice and new.cache.find_exact_rewind(end) == end)
        return is_prefix and end <= count and new.num_prefilled >= old.num_prefilled and serves

    def _find_mismatch(self, node: TreeNode, tokens: Sequence[int]) -> PrefixMismatch | None:
        """Return the first difference from the most similar branch after a node.

        Return None without a branch, or if a branch equals the next tokens up to the end of the
        shorter.
        """
        page = tuple(tokens[node.length : node.length + PAGE_TOKENS])
        branches = [entry.tail_tokens for entry in node.entries]
        branches += [child.tokens for child in node.children.values()]
        counts = [_count_common_items(branch, page) for branch in branches]
        if not branches or any(
            count in (len(branch), len(page))
            for branch, count in zip(branches, counts, strict=True)
        ):
            return None
        count = max(counts)
        branch = branches[counts.index(count)]
        end = count + 8
        return PrefixMismatch(node.length + count, branch[count:end], page[count:end])


def _count_common_tokens(node: TreeNode, entry: PrefixEntry, tokens: Sequence[int]) -> int:
    """Count common first tokens of an entry and `tokens`; both start with the path to `node`."""
    if entry.node is node:
        return node.length + _count_common_items(entry.tail_tokens, tokens[node.length :])
    child = entry.node
    while child.parent is not None and child.parent is not node:
        child = child.parent
    return node.length + _count_common_items(
        child.tokens, tokens[node.length : node.length + PAGE_TOKENS]
    )


def find_resumable_length(
    prefix: PrefixEntry | RestoredPrefix, max_length: int, alignment: int
) -> int:
    """Return the longest length <= `max_length` from which generation can continue."""
    if alignment == 1:
        return prefix.cache.find_exact_rewind(max_length)
    aligned = min(max_length, prefix.num_prefilled) // alignment * alignment
    return aligned if prefix.cache.find_exact_rewind(aligned) == aligned else 0


def _count_common_items(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the equal first items of two sequences."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
