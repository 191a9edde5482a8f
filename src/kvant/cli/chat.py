"""`kvant chat`: a conversation, a line at a time; each turn re-uses all that was computed before.

Lines that begin with a slash do something to the conversation beside talking.
"""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kvant.cli import options
from kvant.cli.options import check_readable, check_writable, checked_text
from kvant.cli.session import (
    Named,
    Reply,
    Wanted,
    held,
    prefixes_in,
    present,
    show,
    story,
)
from kvant.errors import CacheError
from kvant.exit_codes import complain
from kvant.progress import Bar
from kvant.sizes import counted, format_size


def chat(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    system: Annotated[str | None, Option(help="What the model is told first.")] = None,
    kv_cache: options.KVCache = None,
    kv_window_size: options.WindowSize = None,
    kv_window_keep: options.WindowKeep = None,
    max_new_tokens: options.MaxNewTokens = options.NEW_TOKENS,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    stop: options.Stop = None,
    seed: options.Seed = None,
    max_context: options.MaxContext = None,
    strategy: options.Strategy = "always",
    threshold: options.Threshold = 512,
    budget: options.Budget = None,
    prefill_chunk: options.PrefillChunk = 512,
    draft: options.Draft = None,
    backend: options.Backend = None,
    pack: options.Pack = True,
    guard: options.Guard = True,
    load: options.Load = None,
    store: options.Store = None,
    device: options.Device = None,
    dtype: options.DType = "auto",
    stats: options.Stats = False,
    json: options.Json = False,
) -> None:
    """Talk with a model; /help says what else there is."""
    kept = (kv_cache, kv_window_size, kv_window_keep, max_context, strategy, threshold, budget)
    placed = (guard, trust_remote_code, device, dtype, prefill_chunk, backend, pack)
    wanted = Wanted(model, *kept, draft, load, *placed, store=store)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    drawn |= {"repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty}
    drawn |= {"frequency_penalty": frequency_penalty, "seed": seed}
    asked = drawn | {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ())}
    if system is not None and load is not None:
        raise ValueError("--system beside --load: the file says what the model was told first")
    with prefixes_in(store, quiet=json) as prefixes:
        session = wanted.session(asked, template=True, system=system, prefixes=prefixes)
        talk = Talk(Branches(session), asked, Named.of(wanted, session), stats=stats, quiet=json)
        talk.until_end()
        if json:
            turns = [{"message": turn.message, "reply": turn.reply} for turn in talk.session.turns]
            print(json_text.dumps({"turns": turns, "cache": talk.session.stats()}), flush=True)


@dataclass
class Talk:
    """The loop of a conversation."""

    branches: Branches
    asked: dict[str, Any]
    named: Named
    stats: bool
    quiet: bool

    @property
    def session(self) -> Any:
        return self.branches.now

    def until_end(self) -> None:
        asking = sys.stdin is not None and sys.stdin.isatty()
        if asking:
            show(HELP)
        while (line := _line(asking)) is not None:
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    return
                self._verb(line)
            elif line.strip():
                self._say(line)

    def _verb(self, line: str) -> None:
        """A mistake is said, and the conversation goes on."""
        try:
            show(told(self.branches, line))
        except (CacheError, ValueError, OSError) as error:
            complain(str(error))

    def _say(self, line: str) -> None:
        reply, before = Reply(), len(self.session.stats()["recoded"])
        with Bar("reading the prompt", quiet=self.quiet) as reading:
            try:
                steps = self.session.send(line, **self.asked, progress=reading.show)
                reply.take(steps, reading, before="", quiet=self.quiet)
            except KeyboardInterrupt:
                print()
            except CacheError as error:  # the context is full, or the template refuses it
                complain(str(error))
                return
        self.branches.speed = reply.figures()["tokens_a_second"]
        if self.stats:
            cache = self.session.stats()
            named = self.named.now(self.session)
            for line in [*story(cache["recoded"][before:]), reply.line(named, self.session)]:
                show(line)


def _line(asking: bool) -> str | None:
    """The next message; None at the end. Standard output is for replies alone."""
    if asking:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return checked_text(input(), "what was typed")
    except (EOFError, KeyboardInterrupt, RuntimeError):  # the last: there is no standard input
        return None


HELP = (
    "/stats  /rewind [TURNS]  /fork (keep this as it is; /fork N goes there)  "
    "/save FILE  /load FILE  /reset  /quit"
)


class Branches:
    """Conversations with a common past: the one that goes on, and those that were kept."""

    def __init__(self, session: Any) -> None:
        self.now = session
        self.kept: list[Any] = []
        self.speed: float | None = None  # of the last reply, tokens a second


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
    session = branches.now
    speed = "" if branches.speed is None else f"; {branches.speed:.1f} tokens a second"
    turns, tokens = counted(len(session.turns), "turn"), counted(stats["tokens"], "token")
    said = (
        f"{present(session)}: {tokens} in {turns}, {stats['length']} of them held in "
        f"{held(session)}; {stats['tokens_reused']} of {stats['tokens_asked']} asked were re-used "
        f"({stats['hit_rate']:.0%}){speed}"
    )
    return "\n".join([*story(stats["recoded"]), said])


def _rewind(branches: Branches, rest: str) -> str:
    session, count = branches.now, _number(rest, "/rewind")
    turns = session.turns
    if not 0 < count <= len(turns):
        verb = "is" if len(turns) == 1 else "are"
        raise ValueError(f"/rewind {count}: there {verb} {counted(len(turns), 'turn')}")
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
    return f"at {number}: {_told(branches.now)}"


def _told(session: Any) -> str:
    return f"{counted(len(session.turns), 'turn')}, {counted(len(session.tokens), 'token')}"


def _save(branches: Branches, rest: str) -> str:
    path = _path(rest, "/save")
    check_writable(path, "/save")
    branches.now.save(path)
    return f"{len(branches.now.tokens)} tokens in {path}, {format_size(path.stat().st_size)}"


def _load(branches: Branches, rest: str) -> str:
    path = _path(rest, "/load")
    check_readable(path, "/load")
    branches.now.resume(path)
    said = [f"> {turn.message}\n{turn.reply}" for turn in branches.now.turns]
    return "\n".join([*said, f"{_told(branches.now)} from {path}"])


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
