"""`kvant chat`: a conversation with a model, one line per message.

Each turn reuses the cache of the turns before it. A line that begins with a slash is a command: it
rewinds, forks, saves, loads or resets the conversation.
"""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from kvant.platform.exit_codes import print_error
from kvant.platform.progress import ProgressBar
from kvant.platform.sizes import format_count, format_size

if TYPE_CHECKING:
    from kvant.generation import Session


def chat(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    system: Annotated[str | None, Option(help="System message.")] = None,
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
    """Chat with a model; /help lists the commands."""
    windows = (kv_window_size, kv_window_keep)
    cache_options = (kv_cache, *windows, max_context, strategy, threshold, budget)
    model_options = (guard, trust_remote_code, device, dtype, prefill_chunk, backend, pack)
    session_options = SessionOptions(
        model, *cache_options, draft, load, *model_options, store=store
    )
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    sampling |= {"repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty}
    sampling |= {"frequency_penalty": frequency_penalty, "seed": seed}
    send_options = sampling | {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ())}
    if system is not None and load is not None:
        raise ValueError("--system with --load: the file has its own system message; drop one")
    with open_prefixes(store, quiet=json) as prefixes:
        session = session_options.open_session(
            send_options, template=True, system=system, prefixes=prefixes
        )
        loop = ChatLoop(
            ChatBranches(session),
            send_options,
            CacheName.from_session(session_options, session),
            stats=stats,
            quiet=json,
        )
        loop.run()
        if json:
            turns = [{"message": turn.message, "reply": turn.reply} for turn in loop.session.turns]
            print(json_text.dumps({"turns": turns, "cache": loop.session.stats()}), flush=True)


@dataclass
class ChatLoop:
    """Reads lines until the end of input; sends messages and runs commands."""

    branches: ChatBranches
    send_options: dict[str, Any]
    cache_name: CacheName
    stats: bool
    quiet: bool

    @property
    def session(self) -> Session:
        return self.branches.current

    def run(self) -> None:
        interactive = sys.stdin is not None and sys.stdin.isatty()
        if interactive:
            print_note(COMMANDS_HELP)
        while (line := _read_line(interactive)) is not None:
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    return
                self._run_command(line)
            elif line.strip():
                self._send(line)

    def _run_command(self, line: str) -> None:
        """Run a command and print its result or its error; an error does not end the chat."""
        try:
            print_note(run_chat_command(self.branches, line))
        except (CacheError, ValueError, OSError) as error:
            print_error(str(error))

    def _send(self, line: str) -> None:
        reply, num_recodes = PrintedReply(), len(self.session.stats()["recoded"])
        with ProgressBar("reading the prompt", quiet=self.quiet) as reading:
            try:
                steps = self.session.send(line, **self.send_options, progress=reading.update)
                reply.print_steps(steps, reading, prefix="", quiet=self.quiet)
            except KeyboardInterrupt:
                print()
            except CacheError as error:  # the context is full, or the template rejects the message
                print_error(str(error))
                return
        self.branches.tokens_per_second = reply.summarize()["tokens_a_second"]
        if self.stats:
            cache = self.session.stats()
            spec = self.cache_name.find_current(self.session)
            for note in [
                *describe_recodes(cache["recoded"][num_recodes:]),
                reply.format_line(spec, self.session),
            ]:
                print_note(note)


def _read_line(interactive: bool) -> str | None:
    """Read a line, None at the end of input. The prompt goes to stderr: stdout has replies only."""
    if interactive:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return check_text(input(), "the message")
    except (EOFError, KeyboardInterrupt, RuntimeError):  # RuntimeError: no standard input
        return None


COMMANDS_HELP = (
    "/stats  /rewind [TURNS]  /fork (save this branch; /fork N switches to branch N)  "
    "/save FILE  /load FILE  /reset  /quit"
)


class ChatBranches:
    """The current conversation, and the forks saved from it."""

    def __init__(self, session: Session) -> None:
        self.current = session
        self.forks: list[Session] = []
        self.tokens_per_second: float | None = None  # of the last reply


def run_chat_command(branches: ChatBranches, line: str) -> str:
    """Run a slash command and return its message."""
    command, _, argument = line.partition(" ")
    if command not in COMMANDS:
        raise ValueError(f"{command} is unknown: {COMMANDS_HELP}")
    return COMMANDS[command](branches, argument.strip())


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
    summary = (
        f"{read_spec(session)}: {tokens} in {turns}, {stats['length']} of them cached in "
        f"{describe_memory(session)}; {stats['tokens_reused']} of {stats['tokens_asked']} prompt "
        f"tokens reused ({stats['hit_rate']:.0%}){speed}"
    )
    return "\n".join([*describe_recodes(stats["recoded"]), summary])


def _rewind(branches: ChatBranches, argument: str) -> str:
    session, count = branches.current, _parse_number(argument, "/rewind")
    turns = session.turns
    if not 0 < count <= len(turns):
        verb = "is" if len(turns) == 1 else "are"
        raise ValueError(f"/rewind {count}: there {verb} {format_count(len(turns), 'turn')}")
    remaining = turns[: len(turns) - count]
    session.rewind(remaining[-1].end if remaining else 0)
    return f"rewound to turn {len(remaining)}, {len(session.tokens)} tokens"


def _fork(branches: ChatBranches, argument: str) -> str:
    if not argument:
        branches.forks.append(branches.current.fork())
        number = len(branches.forks)
        return f"saved as branch {number}: /fork {number} switches back to it"
    number = _parse_number(argument, "/fork")
    if not 0 < number <= len(branches.forks):
        raise ValueError(f"/fork {number}: {len(branches.forks)} branches are saved")
    branches.current = branches.forks[number - 1].fork()
    return f"on branch {number}: {_describe_length(branches.current)}"


def _describe_length(session: Session) -> str:
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
    turns = [f"> {turn.message}\n{turn.reply}" for turn in branches.current.turns]
    return "\n".join([*turns, f"{_describe_length(branches.current)} from {path}"])


def _reset(branches: ChatBranches, argument: str) -> str:
    branches.current.reset()
    return "a new conversation"


def _parse_number(argument: str, command: str) -> int:
    if argument and not argument.isdecimal():
        raise ValueError(f"{command} {argument}: a number is needed")
    return int(argument) if argument else 1


def _parse_path(argument: str, command: str) -> Path:
    if not argument:
        raise ValueError(f"{command}: the name of a file is needed")
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
