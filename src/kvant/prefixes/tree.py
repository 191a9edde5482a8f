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
from kvant.hf import HostCache
from kvant.prefixes.archive import Restored, Write
from kvant.prefixes.keys import PAGE, chain, key

EVERY = 2048  # tokens of a long prompt, at which its cache is kept
LONG = 4096  # tokens of a prompt that is long
NEWEST = 4  # of those that are kept so


@dataclass(eq=False)
class Node:
    """A page of tokens that some caches begin with."""

    key: bytes
    tokens: tuple[int, ...]
    length: int  # up to its end
    before: Node | None
    after: dict[bytes, Node] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)  # that end here, or within the next page


@dataclass(eq=False)
class Kept:
    """A cache to go on from."""

    node: Node
    rest: tuple[int, ...]  # its tokens behind the node
    cache: HostCache
    prompt: int  # of its tokens, so many were read as prompts; others were decoded
    used: float = 0.0  # when, by the clock of its owner
    uses: int = 0
    writes: list[Write] = field(default_factory=list)  # to a store, also of those it stands for

    @property
    def length(self) -> int:
        return self.node.length + len(self.rest)

    @property
    def unwritten(self) -> bool:
        """Is some of it yet to be in a store?"""
        return any(write.pieces is not None for write in self.writes)

    @property
    def waiting(self) -> list[Cache]:
        """Others whose pages are held until they are written."""
        pieces = [write.pieces for write in self.writes]
        caches = [one.cache for one in pieces if one is not None]
        return [cache for cache in caches if cache is not self.cache.states]

    def cancel(self) -> None:
        """Let nobody write it any more, who holds its pages for that."""
        for write in self.writes:
            write.cancel()


@dataclass(frozen=True)
class Lost:
    """Where tokens stop being those of the nearest prefix that is kept."""

    at: int
    was: tuple[int, ...]  # tokens that follow there,
    now: tuple[int, ...]  # and those that were asked for


@dataclass(frozen=True)
class Match:
    """What there is of some tokens."""

    kept: Kept | None
    length: int  # that it serves
    shared: int  # whole pages of tokens that something kept has, whether it serves them or not
    lost: Lost | None


class Tree:
    """All that is kept under one root."""

    def __init__(
        self, root: bytes, home: bytes, *, pages_suffice: bool, about: Mapping[str, str]
    ) -> None:
        self.home = home  # the name of the pools
        self.about = about  # whose it is, for people
        self.pages_suffice = pages_suffice  # to go on from the end of any of them
        self.top = Node(root, (), 0, None)

    def __iter__(self) -> Iterator[Kept]:
        nodes = [self.top]
        while nodes:
            node = nodes.pop()
            yield from node.kept
            nodes.extend(node.after.values())

    def match(self, tokens: Sequence[int], most: int, every: int = 1) -> Match:
        """The longest length <= `most` that something serves.

        With `every` above 1 it is a multiple of that, and all of it was read as a prompt.
        """
        path = self._path(tokens)
        best, length = None, 0
        for node in reversed(path):
            if length >= min(node.length + PAGE, most):
                break
            for kept in self._near(node, tokens, last=node is path[-1]):
                serves = served(kept, min(_agreed(node, kept, tokens), most), every)
                if serves > length:
                    best, length = kept, serves
        return Match(best, length, path[-1].length, self._lost(path[-1], tokens))

    def keep(self, tokens: Sequence[int], cache: HostCache, prompt: int) -> Kept | None:
        """Keep a cache of all of these tokens; those that it can stand for are let go.

        None where the key of a page is that of other tokens.
        """
        whole = len(tokens) // PAGE * PAGE
        pages = [tuple(tokens[at : at + PAGE]) for at in range(0, whole, PAGE)]
        names = chain(self.top.key, tokens)
        path = [self.top]
        while len(path) < len(names) and (old := path[-1].after.get(names[len(path)])) is not None:
            if old.tokens != pages[len(path) - 1]:
                return None
            path.append(old)
        new = Kept(path[-1], tuple(tokens[whole:]), cache, prompt)
        gone = [one for node in path for one in node.kept if self._stands_for(new, one, tokens)]
        new.uses = sum(one.uses for one in gone)
        new.writes = [w for one in gone for w in one.writes if w.pieces is not None]
        # New nodes hang on each other, and all on the tree by one assignment: no interrupt leaves
        # a node that nothing is behind.
        last = path[-1]
        for number in range(len(path), len(names)):
            node = Node(names[number], pages[number - 1], number * PAGE, new.node)
            if new.node is not last:
                new.node.after[node.key] = node
            new.node = node
        new.node.kept.append(new)
        if new.node is not last:
            top = new.node
            while top.before is not last and top.before is not None:
                top = top.before
            last.after[top.key] = top
        for one in gone:
            self.drop(one)
        return new

    def find_sharing(self, tokens: Sequence[int]) -> list[Kept]:
        """All caches that begin with the first page of these tokens, or are shorter than a page."""
        nodes, found = self._path(tokens)[1:2], list(self.top.kept)
        while nodes:
            node = nodes.pop()
            found += node.kept
            nodes.extend(node.after.values())
        return found

    def drop(self, kept: Kept) -> None:
        """Let go of one, and of nodes that nothing is behind."""
        node: Node | None = kept.node
        kept.node.kept.remove(kept)
        while node is not None and node.before is not None and not (node.kept or node.after):
            del node.before.after[node.key]
            node = node.before

    # ---- within

    def _path(self, tokens: Sequence[int]) -> list[Node]:
        """The nodes that these tokens begin with, the top first."""
        path = [self.top]
        for begin in range(0, len(tokens) // PAGE * PAGE, PAGE):
            page = tuple(tokens[begin : begin + PAGE])
            node = path[-1].after.get(key(path[-1].key, page))
            if node is None or node.tokens != page:
                break
            path.append(node)
        return path

    def _near(self, node: Node, tokens: Sequence[int], *, last: bool) -> Iterator[Kept]:
        """What ends behind a node; behind the last one also what goes on most like the tokens."""
        yield from node.kept
        if last and node.after:
            rest = tokens[node.length : node.length + PAGE]
            child = max(node.after.values(), key=lambda one: _common(one.tokens, rest))
            while not child.kept and child.after:
                child = next(reversed(child.after.values()))
            yield from child.kept[-1:]

    def _stands_for(self, new: Kept, kept: Kept, tokens: Sequence[int]) -> bool:
        """Does a new one of these tokens serve all that an older one does?"""
        end, count = kept.length, len(tokens)
        begins = kept.rest == tuple(tokens[kept.node.length : end])
        serves = end == count or (self.pages_suffice and new.cache.resumable(end) == end)
        return begins and end <= count and new.prompt >= kept.prompt and serves

    def _lost(self, node: Node, tokens: Sequence[int]) -> Lost | None:
        """The first token behind a node that is another one than in all that is kept."""
        rest = tuple(tokens[node.length : node.length + PAGE])
        ways = [kept.rest for kept in node.kept] + [one.tokens for one in node.after.values()]
        if not ways or any(_common(way, rest) in (len(way), len(rest)) for way in ways):
            return None
        way = max(ways, key=lambda one: _common(one, rest))
        at = _common(way, rest)
        return Lost(node.length + at, way[at : at + 8], rest[at : at + 8])


def _agreed(node: Node, kept: Kept, tokens: Sequence[int]) -> int:
    """How many of these tokens something has that begins with a node of them."""
    if kept.node is node:
        return node.length + _common(kept.rest, tokens[node.length :])
    page = kept.node
    while page.before is not None and page.before is not node:
        page = page.before
    return node.length + _common(page.tokens, tokens[node.length : node.length + PAGE])


def served(kept: Kept | Restored, most: int, every: int) -> int:
    """The longest length that a cache serves."""
    if every == 1:
        return kept.cache.resumable(most)
    asked = min(most, kept.prompt) // every * every
    return asked if kept.cache.resumable(asked) == asked else 0


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
