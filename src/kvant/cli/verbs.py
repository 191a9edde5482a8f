"""What can be done to a conversation beside talking: the lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvant.cli.checks import check_readable, check_writable
from kvant.cli.reply import story
from kvant.sizes import format_size

HELP = (
    "/stats  /rewind [TURNS]  /fork (keep this as it is; /fork N goes there)  "
    "/save FILE  /load FILE  /reset  /quit"
)


class Branches:
    """Conversations with a common past: the one that goes on, and those that were kept."""

    def __init__(self, session: Any) -> None:
        self.now = session
        self.kept: list[Any] = []


def told(branches: Branches, line: str) -> str:
    """Do what the line says; what there is to say about it."""
    word, _, rest = line.partition(" ")
    if word not in VERBS:
        raise ValueError(f"{word} is unknown: {HELP}")
    return VERBS[word](branches, rest.strip())


def _help(branches: Branches, rest: str) -> str:
    return HELP


def _stats(branches: Branches, rest: str) -> str:
    stats = branches.now.stats()
    said = (
        f"{stats['tokens']} tokens in {len(branches.now.turns)} turns, {stats['length']} of them "
        f"held in {format_size(stats['nbytes'])}; {stats['tokens_reused']} of "
        f"{stats['tokens_asked']} asked were re-used ({stats['hit_rate']:.0%})"
    )
    return "\n".join([*story(stats["recoded"]), said])


def _rewind(branches: Branches, rest: str) -> str:
    session, count = branches.now, _number(rest, "/rewind")
    turns = session.turns
    if not 0 < count <= len(turns):
        raise ValueError(f"/rewind {count}: there are {len(turns)} turns")
    left = turns[: len(turns) - count]
    session.rewind(left[-1].end if left else 0)
    return f"back after turn {len(left)}, at {len(session.tokens)} tokens"


def _fork(branches: Branches, rest: str) -> str:
    if not rest:
        branches.kept.append(branches.now.fork())
        return f"kept as {len(branches.kept)}: /fork {len(branches.kept)} goes back there"
    number = _number(rest, "/fork")
    if not 0 < number <= len(branches.kept):
        raise ValueError(f"/fork {number}: {len(branches.kept)} are kept")
    branches.now = branches.kept[number - 1].fork()
    return f"at {number}: {len(branches.now.turns)} turns, {len(branches.now.tokens)} tokens"


def _save(branches: Branches, rest: str) -> str:
    path = _path(rest, "/save")
    check_writable(path, "/save")
    branches.now.save(path)
    return f"{len(branches.now.tokens)} tokens in {path}, {format_size(path.stat().st_size)}"


def _load(branches: Branches, rest: str) -> str:
    path = _path(rest, "/load")
    check_readable(path, "/load")
    branches.now.resume(path)
    return f"{len(branches.now.turns)} turns, {len(branches.now.tokens)} tokens from {path}"


def _reset(branches: Branches, rest: str) -> str:
    branches.now.reset()
    return "a new conversation"


def _number(rest: str, verb: str) -> int:
    if rest and not rest.isdecimal():
        raise ValueError(f"{verb} {rest}: a number is needed")
    return int(rest) if rest else 1


def _path(rest: str, verb: str) -> Path:
    if not rest:
        raise ValueError(f"{verb} needs the name of a file")
    return Path(rest).expanduser()


VERBS: dict[str, Callable[[Branches, str], str]] = {
    "/help": _help,
    "/stats": _stats,
    "/rewind": _rewind,
    "/fork": _fork,
    "/save": _save,
    "/load": _load,
    "/reset": _reset,
}
