"""`kvant run`: continue a prompt, and show the text as it comes.

A prompt is what an option names; else what is piped in, if anything is; else one of our own.
"""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvant.cli import options
from kvant.cli.options import check_text, check_transcript, check_writable, read_text
from kvant.cli.session import (
    CacheName,
    PrintedReply,
    SessionOptions,
    describe_recodes,
    open_prefixes,
    print_note,
)
from kvant.progress import ProgressBar

TEXT, MESSAGE = "a text, continued as it is", "a message, by the model's chat template"
HINT = "hint: the model has a chat template: --chat takes the prompt as a message, to be answered"
DEFAULT_PROMPT = "import os\n\ndef "  # for the model inside, which knows Python


def run(
    source: Annotated[str | None, Argument(metavar="[-]", help="- reads the prompt.")] = None,
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    prompt: Annotated[
        str | None, Option(help="The text to continue; - reads it. Else what is piped in, if any.")
    ] = None,
    file: Annotated[Path | None, Option(help="Read the prompt from a file.")] = None,
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
    chat: Annotated[
        bool, Option("--chat", help="Take the prompt as a message, by the model's chat template.")
    ] = False,
    save: Annotated[Path | None, Option(help="Write text and cache to a file, to go on.")] = None,
    cache_prompt: Annotated[
        Path | None, Option(help="Read the prompt, write it to a file for --load, and end.")
    ] = None,
    load: options.Load = None,
    store: options.Store = None,
    device: options.Device = None,
    dtype: options.DType = "auto",
    stats: options.Stats = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt with a model, on a cache of any format."""
    text = _find_prompt(source, prompt, file, load)
    _check_files(save, cache_prompt, load, model, chat=chat)
    kept = (kv_cache, kv_window_size, kv_window_keep, max_context, strategy, threshold, budget)
    placed = (guard, trust_remote_code, device, dtype, prefill_chunk, backend, pack)
    wanted = SessionOptions(model, *kept, draft, load, *placed, store=store, chat=chat)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    drawn |= {"repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty}
    drawn |= {"frequency_penalty": frequency_penalty, "seed": seed}
    asked = drawn | {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ())}
    with open_prefixes(store, quiet=json) as prefixes:
        session = wanted.open_session(asked, template=chat, prefixes=prefixes)
        named = CacheName.from_session(wanted, session)
        if cache_prompt is not None:
            _prefill_prompt(session, text, quiet=json)
            reply = PrintedReply()
        else:
            reply = _generate_reply(session, text, asked, save, quiet=json)
        if (path := cache_prompt or save) is not None:
            session.save(path)
        cache, stored = session.stats(), named.find_current(session)
        if json:
            output = {
                "prompt": text,
                "chat": session.prompt_format.uses_template,
                "text": reply.text,
                "kv_cache": stored,
            }
            print(json_text.dumps(output | reply.summarize() | {"cache": cache}), flush=True)
        elif stats:
            print_note(f"prompt: {MESSAGE if session.prompt_format.uses_template else TEXT}")
            for line in [*describe_recodes(cache["recoded"]), reply.format_line(stored, session)]:
                print_note(line)


def is_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


def _show_hint(session: Any) -> None:
    """Name --chat where a prompt to a model with a chat template is continued."""
    if (
        is_terminal()
        and session.tokenizer.chat_template
        and not session.prompt_format.uses_template
    ):
        print_note(HINT)


def _check_files(
    save: Path | None,
    cache_prompt: Path | None,
    load: Path | None,
    model: str | None,
    *,
    chat: bool,
) -> None:
    """Refuse files that cannot be written, read, or gone on from."""
    if save is not None and cache_prompt is not None:
        raise ValueError("--save beside --cache-prompt: give one of them")
    for flag, path in (("--save", save), ("--cache-prompt", cache_prompt)):
        if path is not None:
            check_writable(path, flag)
    if cache_prompt is not None and chat:
        raise ValueError(
            "--chat beside --cache-prompt: a message is read with its reply; --save writes both"
        )
    if load is not None and (chat or cache_prompt is not None):
        _check_saved(load, model, chat)


def _check_saved(load: Path, model: str | None, chat: bool) -> None:
    """Refuse what a saved conversation cannot go on with."""
    template = check_transcript(load, model).template
    if chat and not template:
        raise ValueError(
            f"--chat beside --load {load}: the file holds a text, which goes on as it is: leave "
            "--chat out"
        )
    if template and not chat:
        raise ValueError(
            f"--cache-prompt beside --load {load}: a template lays out its turns, so no message "
            "of it can be read without a reply; --save writes the reply as well"
        )


def _prefill_prompt(session: Any, text: str, *, quiet: bool) -> None:
    with ProgressBar("reading the prompt", quiet=quiet) as reading:
        session.read(text, progress=reading.update)


def _generate_reply(
    session: Any, text: str, send_options: dict[str, Any], save: Path | None, *, quiet: bool
) -> PrintedReply:
    reply = PrintedReply()
    if not (quiet or session.turns):
        _show_hint(session)
    with ProgressBar("reading the prompt", quiet=quiet) as reading:
        steps = session.send(text, **send_options, progress=reading.update)
        before = "" if session.prompt_format.uses_template else text
        try:
            reply.print_steps(steps, reading, prefix=before, quiet=quiet)
        except KeyboardInterrupt:
            if save is not None and reply.num_tokens:
                session.save(save)
                print_note(f"\n--save {save}: written up to here")
            raise
    return reply


def _find_prompt(
    source: str | None, prompt: str | None, file: Path | None, load: Path | None
) -> str:
    given = [text for text in (source, prompt, file) if text is not None]
    if len(given) > 1:
        raise ValueError("-, --prompt and --file each name a prompt: give one of them")
    if source not in (None, "-"):
        raise ValueError(f"{source!r} is no option: a prompt is given with --prompt")
    if file is not None:
        text = read_text(file, "--file")
    elif "-" in given or prompt is None:
        text = _read_stdin(wait="-" in given)
        if not given and not text and load is None:
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
    """All of standard input; of a terminal only where it is waited for."""
    if sys.stdin is None or (sys.stdin.isatty() and not wait):
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("the prompt is no text in UTF-8") from None
    except OSError:  # nohup leaves a standard input that cannot be read
        if wait:
            raise
        return ""
