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
from kvant.cli.options import check_readable, check_text, check_writable
from kvant.cli.session import (
    CacheName,
    PrintedReply,
    SessionOptions,
    describe_memory,
    describe_recodes,
    open_prefixes,
    print_note,
    read_spec,
)
from kvant.errors import CacheError
from kvant.exit_codes import print_error
from kvant.progress import ProgressBar
from kvant.sizes import format_count, format_size


def chat(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    system: Annotated[str | None, Option(help="What the model is told first.")] = None,
    kv_cache: options.KVCache = None,
    kv_window_size: options.WindowSize = None,
    kv_window_keep: options.WindowKeep = None,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
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
    wanted = SessionOptions(model, *kept, draft, load, *placed, store=store)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    drawn |= {"repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty}
    drawn |= {"frequency_penalty": frequency_penalty, "seed": seed}
    asked = drawn | {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ())}
    if system is not None and load is not None:
        raise ValueError("--system beside --load: the file says what the model was told first")
    with open_prefixes(store, quiet=json) as prefixes:
        session = wanted.open_session(asked, template=True, system=system, prefixes=prefixes)
        talk = ChatLoop(
            ChatBranches(session),
            asked,
            CacheName.from_session(wanted, session),
            stats=stats,
            quiet=json,
        )
        talk.run()
        if json:
            turns = [{"message": turn.message, "reply": turn.reply} for turn in talk.session.turns]
            print(json_text.dumps({"turns": turns, "cache": talk.session.stats()}), flush=True)


@dataclass
class ChatLoop:
    """The loop of a conversation."""

    branches: ChatBranches
    send_options: dict[str, Any]
    cache_name: CacheName
    stats: bool
    quiet: bool

    @property
    def session(self) -> Any:
        return self.branches.current

    def run(self) -> None:
        asking = sys.stdin is not None and sys.stdin.isatty()
        if asking:
            print_note(COMMANDS_HELP)
        while (line := _read_line(asking)) is not None:
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    return
                self._run_command(line)
            elif line.strip():
                self._send(line)

    def _run_command(self, line: str) -> None:
        """A mistake is said, and the conversation goes on."""
        try:
            print_note(run_chat_command(self.branches, line))
        except (CacheError, ValueError, OSError) as error:
            print_error(str(error))

    def _send(self, line: str) -> None:
        reply, before = PrintedReply(), len(self.session.stats()["recoded"])
        with ProgressBar("reading the prompt", quiet=self.quiet) as reading:
            try:
                steps = self.session.send(line, **self.send_options, progress=reading.update)
                reply.print_steps(steps, reading, prefix="", quiet=self.quiet)
            except KeyboardInterrupt:
                print()
            except CacheError as error:  # the context is full, or the template refuses it
                print_error(str(error))
                return
        self.branches.tokens_per_second = reply.summarize()["tokens_a_second"]
        if self.stats:
            cache = self.session.stats()
            named = self.cache_name.find_current(self.session)
            for line in [
                *describe_recodes(cache["recoded"][before:]),
                reply.format_line(named, self.session),
            ]:
                print_note(line)


def _read_line(interactive: bool) -> str | None:
    """The next message; None at the end. Standard output is for replies alone."""
    if interactive:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return check_text(input(), "what was typed")
    except (EOFError, KeyboardInterrupt, RuntimeError):  # the last: there is no standard input
        return None


COMMANDS_HELP = (
    "/stats  /rewind [TURNS]  /fork (keep this as it is; /fork N goes there)  "
    "/save FILE  /load FILE  /reset  /quit"
)


class ChatBranches:
    """Conversations with a common past: the one that goes on, and those that were kept."""

    def __init__(self, session: Any) -> None:
        self.current = session
        self.forks: list[Any] = []
        self.tokens_per_second: float | None = None  # of the last reply, tokens a second


def run_chat_command(branches: ChatBranches, line: str) -> str:
    """Do what the line says; what there is to say about it."""
    word, _, rest = line.partition(" ")
    if word not in COMMANDS:
        raise ValueError(f"{word} is unknown: {COMMANDS_HELP}")
    return COMMANDS[word](branches, rest.strip())


def _show_help(branches: ChatBranches, argument: str) -> str:
    return COMMANDS_HELP


def _show_stats(branches: ChatBranches, argument: str) -> str:
    stats = branches.current.stats()
    session = branches.current
    speed = (
        ""
        if branches.tokens_per_second is None
        else f"; {branches.tokens_per_second:.1f} tokens a second"
    )
    turns, tokens = format_count(len(session.turns), "turn"), format_count(stats["tokens"], "token")
    said = (
        f"{read_spec(session)}: {tokens} in {turns}, {stats['length']} of them held in "
        f"{describe_memory(session)}; {stats['tokens_reused']} of {stats['tokens_asked']} asked "
        "were re-used "
        f"({stats['hit_rate']:.0%}){speed}"
    )
    return "\n".join([*describe_recodes(stats["recoded"]), said])


def _rewind(branches: ChatBranches, argument: str) -> str:
    session, count = branches.current, _parse_number(argument, "/rewind")
    turns = session.turns
    if not 0 < count <= len(turns):
        verb = "is" if len(turns) == 1 else "are"
        raise ValueError(f"/rewind {count}: there {verb} {format_count(len(turns), 'turn')}")
    left = turns[: len(turns) - count]
    session.rewind(left[-1].end if left else 0)
    return f"back after turn {len(left)}, at {len(session.tokens)} tokens"


def _fork(branches: ChatBranches, argument: str) -> str:
    if not argument:
        branches.forks.append(branches.current.fork())
        return f"kept as {len(branches.forks)}: /fork {len(branches.forks)} goes back there"
    number = _parse_number(argument, "/fork")
    if not 0 < number <= len(branches.forks):
        raise ValueError(f"/fork {number}: {len(branches.forks)} are kept")
    branches.current = branches.forks[number - 1].fork()
    return f"at {number}: {_describe_length(branches.current)}"


def _describe_length(session: Any) -> str:
    return (
        f"{format_count(len(session.turns), 'turn')}, {format_count(len(session.tokens), 'token')}"
    )


def _save(branches: ChatBranches, argument: str) -> str:
    path = _parse_path(argument, "/save")
    check_writable(path, "/save")
    branches.current.save(path)
    return f"{len(branches.current.tokens)} tokens in {path}, {format_size(path.stat().st_size)}"


def _load(branches: ChatBranches, argument: str) -> str:
    path = _parse_path(argument, "/load")
    check_readable(path, "/load")
    branches.current.resume(path)
    said = [f"> {turn.message}\n{turn.reply}" for turn in branches.current.turns]
    return "\n".join([*said, f"{_describe_length(branches.current)} from {path}"])


def _reset(branches: ChatBranches, argument: str) -> str:
    branches.current.reset()
    return "a new conversation"


def _parse_number(argument: str, command: str) -> int:
    if argument and not argument.isdecimal():
        raise ValueError(f"{command} {argument}: a number is needed")
    return int(argument) if argument else 1


def _parse_path(argument: str, command: str) -> Path:
    if not argument:
        raise ValueError(f"{command} needs the name of a file")
    return Path(argument).expanduser()


COMMANDS: dict[str, Callable[[ChatBranches, str], str]] = {
    "/help": _show_help,
    "/stats": _show_stats,
    "/rewind": _rewind,
    "/fork": _fork,
    "/save": _save,
    "/load": _load,
    "/reset": _reset,
}
