"""`kvant chat`: a conversation with a model, one line per message.

Each turn reuses the cache of the turns before it. A line that begins with a slash is a command: it
rewinds, forks, saves, loads or resets the conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvant.cli import options, print_json, print_note
from kvant.cli.options import (
    SendOptions,
    check_readable,
    check_text,
    expand_options,
)
from kvant.cli.session import (
    CacheName,
    PrintedReply,
    SessionOptions,
    describe_memory,
    describe_recodes,
    open_prefixes,
    read_spec,
)
from kvant.errors import CacheError
from kvant.platform.paths import check_writable, expand_path
from kvant.platform.sizes import format_count, format_size
from kvant.platform.terminal import ProgressBar, make_printable, print_error

if TYPE_CHECKING:
    from kvant.generation import Session
    from kvant.vision import ProcessedImage


@expand_options
def chat(
    session_options: SessionOptions,
    sampling: SendOptions,
    system: Annotated[str | None, Option(help="System message.")] = None,
    stats: options.Stats = False,
    json: options.Json = False,
) -> None:
    """Chat with a model; /help lists the commands."""
    send_options = sampling.arguments
    if system is not None and session_options.load_path is not None:
        raise ValueError("--system with --load: the file has its own system message; drop one")
    with open_prefixes(session_options.store, quiet=json) as prefixes:
        session = session_options.open_session(
            send_options, template=True, system=system, prefixes=prefixes
        )
        cache_name = CacheName.from_session(session_options, session)
        chat_loop = ChatLoop(session, send_options, cache_name, stats=stats, quiet=json)
        chat_loop.run()
        if json:
            session = chat_loop.session
            turns = [{"message": turn.message, "reply": turn.reply} for turn in session.turns]
            print_json({"turns": turns, "cache": session.stats()})


NO_MEMORY = "not enough memory"


@dataclass
class ChatLoop:
    """Reads lines until the end of input; sends messages and runs commands."""

    session: Session  # the current branch of the conversation
    send_options: dict[str, Any]
    cache_name: CacheName
    stats: bool
    quiet: bool
    forks: list[Session] = field(default_factory=list)  # saved branches
    images: list[ProcessedImage] = field(default_factory=list)  # of the next message
    tokens_per_second: float | None = None  # of the last reply

    def run(self) -> None:
        interactive = sys.stdin is not None and sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):  # a bad byte is an error of its line alone
            sys.stdin.reconfigure(errors="surrogateescape")
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
        command, _, argument = line.partition(" ")
        try:
            if command not in COMMANDS:
                raise ValueError(f"{command} is unknown: {COMMANDS_HELP}")
            print_note(COMMANDS[command](self, argument.strip()))
        except (CacheError, ValueError, OSError, MemoryError) as error:
            print_error(str(error) or NO_MEMORY)

    def _send(self, line: str) -> None:
        session, reply = self.session, PrintedReply()
        num_recodes = len(session.stats()["recoded"])
        with ProgressBar("reading the prompt", quiet=self.quiet) as reading:
            try:
                steps = session.send(
                    line, images=self.images, **self.send_options, progress=reading.update
                )
                reply.print_steps(steps, reading, prefix="", quiet=self.quiet)
            except KeyboardInterrupt:
                print()
            except (CacheError, MemoryError) as error:  # such as a full context
                print_error(
                    (str(error) or NO_MEMORY) + "; its images are dropped" * bool(self.images)
                )
                self.images = []
                return
        self.images = []
        self.tokens_per_second = reply.tokens_per_second
        if self.stats:
            reply.print_stats(self.cache_name, session, num_recodes)


def _read_line(interactive: bool) -> str | None:
    """Read a line, None at the end of input. The prompt goes to stderr: stdout has replies only.

    A line that is not UTF-8, such as half a character left by a backspace, is read as an empty one.
    """
    if interactive:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        line = input()
    except (EOFError, KeyboardInterrupt, RuntimeError, ValueError):  # no or closed standard input
        return None
    try:
        return check_text(line, "the message")
    except ValueError as error:
        print_error(str(error))
        return ""


COMMANDS_HELP = (
    "/stats  /rewind [TURNS]  /fork (save this branch; /fork N switches to branch N)  "
    "/image FILE (with the next message)  /save FILE  /load FILE  /reset  /quit"
)


def _show_help(chat_loop: ChatLoop, argument: str) -> str:
    return COMMANDS_HELP


def _show_stats(chat_loop: ChatLoop, argument: str) -> str:
    session, speed = chat_loop.session, ""
    if chat_loop.tokens_per_second is not None:
        speed = f"; {chat_loop.tokens_per_second:.1f} tokens a second"
    stats = session.stats()
    turns, tokens = format_count(len(session.turns), "turn"), format_count(stats["tokens"], "token")
    summary = (
        f"{read_spec(session)}: {tokens} in {turns}, {stats['length']} of them cached in "
        f"{describe_memory(session)}; {stats['tokens_reused']} of {stats['tokens_asked']} prompt "
        f"tokens reused ({stats['hit_rate']:.0%}){speed}"
    )
    return "\n".join([*describe_recodes(stats["recoded"]), summary])


def _rewind(chat_loop: ChatLoop, argument: str) -> str:
    session, count = chat_loop.session, _parse_number(argument, "/rewind")
    turns = session.turns
    if not 0 < count <= len(turns):
        verb = "is" if len(turns) == 1 else "are"
        raise ValueError(f"/rewind {count}: there {verb} {format_count(len(turns), 'turn')}")
    session.rewind_turns(count)
    return f"rewound to turn {len(session.turns)}, {len(session.tokens)} tokens"


def _fork(chat_loop: ChatLoop, argument: str) -> str:
    if not argument:
        chat_loop.forks.append(chat_loop.session.fork())
        number = len(chat_loop.forks)
        return f"saved as branch {number}: /fork {number} switches back to it"
    number = _parse_number(argument, "/fork")
    if not 0 < number <= len(chat_loop.forks):
        raise ValueError(f"/fork {number}: saved so far: {len(chat_loop.forks)}")
    chat_loop.session = chat_loop.forks[number - 1].fork()
    return f"on branch {number}: {_describe_length(chat_loop.session)}"


def _describe_length(session: Session) -> str:
    return (
        f"{format_count(len(session.turns), 'turn')}, {format_count(len(session.tokens), 'token')}"
    )


def _add_image(chat_loop: ChatLoop, argument: str) -> str:
    path = _parse_path(argument, "/image")
    check_readable(path, "/image")
    chat_loop.images += chat_loop.session.process_images([path.read_bytes()])
    count = format_count(sum(image.num_tokens for image in chat_loop.images), "token")
    return f"{format_count(len(chat_loop.images), 'image')} of {count} with the next message"


def _save(chat_loop: ChatLoop, argument: str) -> str:
    path = _parse_path(argument, "/save")
    check_writable(path, "/save", is_replaced=True)
    chat_loop.session.save(path)
    return f"{len(chat_loop.session.tokens)} tokens in {path}, {format_size(path.stat().st_size)}"


def _load(chat_loop: ChatLoop, argument: str) -> str:
    path = _parse_path(argument, "/load")
    check_readable(path, "/load")
    chat_loop.session.resume(path)
    chat_loop.images = []
    texts = [f"> {turn.message}\n{turn.reply}" for turn in chat_loop.session.turns]
    turns = ["\n".join(map(make_printable, text.split("\n"))) for text in texts]
    return "\n".join([*turns, f"{_describe_length(chat_loop.session)} from {path}"])


def _reset(chat_loop: ChatLoop, argument: str) -> str:
    chat_loop.session.reset()
    chat_loop.images = []
    return "a new conversation"


def _parse_number(argument: str, command: str) -> int:
    if argument and not argument.isdecimal():
        raise ValueError(f"{command} {argument}: a number is needed")
    return int(argument) if argument else 1


def _parse_path(argument: str, command: str) -> Path:
    if not argument:
        raise ValueError(f"{command}: the name of a file is needed")
    return expand_path(argument)


COMMANDS: dict[str, Callable[[ChatLoop, str], str]] = {
    "/help": _show_help,
    "/stats": _show_stats,
    "/rewind": _rewind,
    "/fork": _fork,
    "/image": _add_image,
    "/save": _save,
    "/load": _load,
    "/reset": _reset,
}
