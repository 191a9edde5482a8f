"""`kvant run`: generate a continuation of a prompt, printed as it is generated.

The prompt comes from an option, else from a pipe on standard input, else it is DEFAULT_PROMPT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from kvant.cli import options, print_json, print_note
from kvant.cli.options import (
    SendOptions,
    check_text,
    check_transcript,
    expand_options,
    read_text,
)
from kvant.cli.session import (
    CacheName,
    PrintedReply,
    SessionOptions,
    open_prefixes,
)
from kvant.platform.paths import check_writable
from kvant.platform.terminal import ProgressBar

if TYPE_CHECKING:
    from kvant.generation import Session

TEXT, MESSAGE = "a text to continue, without a template", "a message in the model's chat template"
HINT = "hint: the model has a chat template: use --chat to get an answer to the prompt"
DEFAULT_PROMPT = "import os\n\ndef "  # suits the model inside the package, trained on Python


@expand_options
def run(
    session_options: SessionOptions,
    sampling: SendOptions,
    source: Annotated[str | None, Argument(metavar="[-]", help="- reads the prompt.")] = None,
    prompt: Annotated[
        str | None, Option(help="Text to continue; - reads standard input, also the default.")
    ] = None,
    file: Annotated[Path | None, Option(help="File with the prompt.")] = None,
    chat: Annotated[
        bool, Option("--chat", help="Put the prompt into the model's chat template as a message.")
    ] = False,
    save: Annotated[Path | None, Option(help="File for text and cache, for --load.")] = None,
    cache_prompt: Annotated[
        Path | None, Option(help="File for the cache of the prompt, for --load; generates nothing.")
    ] = None,
    stats: options.Stats = False,
    json: options.Json = False,
) -> None:
    """Generate a continuation of a prompt, on a cache of any format."""
    text = _find_prompt(source, prompt, file, session_options.load_path)
    _check_files(save, cache_prompt, session_options, chat=chat)
    send_options = sampling.arguments
    with open_prefixes(session_options.store, quiet=json) as prefixes:
        session = session_options.open_session(
            send_options, template=chat, needs_template=chat, prefixes=prefixes
        )
        cache_name = CacheName.from_session(session_options, session)
        if cache_prompt is not None:
            reply = PrintedReply()
            with ProgressBar("reading the prompt", quiet=json) as bar:
                session.read(text, progress=bar.update)
        else:
            reply = _generate_reply(session, text, send_options, save, quiet=json)
        uses_template = session.transcript.template
        try:  # a full disk does not lose the reply, a closed pipe not the file
            if json:
                spec = cache_name.find_current(session)
                output = {"prompt": text, "chat": uses_template, "text": reply.text}
                output |= {"kv_cache": spec} | reply.summarize() | {"cache": session.stats()}
                print_json(output)
            elif stats:
                print_note(f"prompt: {MESSAGE if uses_template else TEXT}")
                reply.print_stats(cache_name, session)
        finally:
            if (path := cache_prompt or save) is not None:
                session.save(path)


def is_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


def _check_files(
    save: Path | None, cache_prompt: Path | None, session_options: SessionOptions, *, chat: bool
) -> None:
    """Raise an error for files that cannot be written, read or continued with these options."""
    if save is not None and cache_prompt is not None:
        raise ValueError("--save with --cache-prompt: give one of them")
    check_writable(save, "--save", is_replaced=True)
    check_writable(cache_prompt, "--cache-prompt", is_replaced=True)
    if cache_prompt is not None and chat:
        raise ValueError(
            "--chat with --cache-prompt: a message is cached with its reply; use --save for both"
        )
    if cache_prompt is not None and session_options.strategy in ("disabled", "long"):
        raise ValueError(
            f"--cache-prompt with --strategy {session_options.strategy}: it does not cache every "
            "prompt; drop --strategy"
        )
    load = session_options.load_path
    if load is None or not (chat or cache_prompt is not None):
        return
    template = check_transcript(load, session_options.model).template
    if chat and not template:
        raise ValueError(
            f"--chat with --load {load}: the file has a text without a chat template: drop --chat"
        )
    if template and not chat:
        raise ValueError(
            f"--cache-prompt with --load {load}: its chat template needs a reply to each message; "
            "use --save, which writes the reply too"
        )


def _generate_reply(
    session: Session, text: str, send_options: dict[str, Any], save: Path | None, *, quiet: bool
) -> PrintedReply:
    reply = PrintedReply()
    uses_template = session.transcript.template
    is_new = not (quiet or session.turns)
    if is_new and is_terminal() and session.tokenizer.chat_template and not uses_template:
        print_note(HINT)
    with ProgressBar("reading the prompt", quiet=quiet) as bar:
        steps = session.send(text, **send_options, progress=bar.update)
        try:
            reply.print_steps(steps, bar, prefix="" if uses_template else text, quiet=quiet)
        except KeyboardInterrupt:
            if save is not None and reply.num_tokens:
                session.save(save)
                print_note(f"\n--save {save}: saved the text generated so far")
            raise
    return reply


def _find_prompt(
    source: str | None, prompt: str | None, file: Path | None, load: Path | None
) -> str:
    sources = [text for text in (source, prompt, file) if text is not None]
    if len(sources) > 1:
        raise ValueError("-, --prompt and --file each name a prompt: give one of them")
    if source not in (None, "-"):
        raise ValueError(f"{source!r} is not an option: a prompt needs --prompt before it")
    if file is not None:
        text = read_text(file, "--file")
    elif "-" in sources or prompt is None:
        text = _read_stdin(wait="-" in sources)
        if not sources and not text and load is None:
            text = DEFAULT_PROMPT
    else:
        text = prompt
    check_text(text, "the prompt")
    if not text and load is None:
        raise ValueError(
            "the prompt is empty: give --prompt TEXT, --file F, or --prompt - to read it"
        )
    return text


def _read_stdin(*, wait: bool) -> str:
    """Read all of standard input; a terminal only if `wait`."""
    if sys.stdin is None or (sys.stdin.isatty() and not wait):
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("the prompt is not UTF-8 text") from None
    except OSError:  # nohup leaves a standard input that cannot be read
        if wait:
            raise
        return ""
