"""`kvant run`: generate a continuation of a prompt, printed as it is generated.

The prompt comes from an option, else from a pipe on standard input, else it is DEFAULT_PROMPT.
"""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from kvant.platform.progress import ProgressBar

if TYPE_CHECKING:
    from kvant.generation import Session

TEXT, MESSAGE = "a text to continue, without a template", "a message in the model's chat template"
HINT = "hint: the model has a chat template: use --chat to get an answer to the prompt"
DEFAULT_PROMPT = "import os\n\ndef "  # suits the model inside the package, trained on Python


def run(
    source: Annotated[str | None, Argument(metavar="[-]", help="- reads the prompt.")] = None,
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    prompt: Annotated[
        str | None, Option(help="Text to continue; - reads standard input, also the default.")
    ] = None,
    file: Annotated[Path | None, Option(help="File with the prompt.")] = None,
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
        bool, Option("--chat", help="Put the prompt into the model's chat template as a message.")
    ] = False,
    save: Annotated[Path | None, Option(help="File for text and cache, for --load.")] = None,
    cache_prompt: Annotated[
        Path | None, Option(help="File for the cache of the prompt, for --load; generates nothing.")
    ] = None,
    load: options.Load = None,
    store: options.Store = None,
    device: options.Device = None,
    dtype: options.DType = "auto",
    stats: options.Stats = False,
    json: options.Json = False,
) -> None:
    """Generate a continuation of a prompt, on a cache of any format."""
    text = _find_prompt(source, prompt, file, load)
    _check_files(save, cache_prompt, load, model, chat=chat)
    window_options = kv_cache, kv_window_size, kv_window_keep
    cache_options = (*window_options, max_context, strategy, threshold, budget)
    model_options = (guard, trust_remote_code, device, dtype, prefill_chunk, backend, pack)
    session_options = SessionOptions(
        model, *cache_options, draft, load, *model_options, store=store, chat=chat
    )
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    sampling |= {"repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty}
    sampling |= {"frequency_penalty": frequency_penalty, "seed": seed}
    send_options = sampling | {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ())}
    with open_prefixes(store, quiet=json) as prefixes:
        session = session_options.open_session(send_options, template=chat, prefixes=prefixes)
        cache_name = CacheName.from_session(session_options, session)
        if cache_prompt is not None:
            _prefill_prompt(session, text, quiet=json)
            reply = PrintedReply()
        else:
            reply = _generate_reply(session, text, send_options, save, quiet=json)
        if (path := cache_prompt or save) is not None:
            session.save(path)
        cache, spec = session.stats(), cache_name.find_current(session)
        if json:
            uses_template = session.prompt_format.uses_template
            output = {"prompt": text, "chat": uses_template, "text": reply.text, "kv_cache": spec}
            print(json_text.dumps(output | reply.summarize() | {"cache": cache}), flush=True)
        elif stats:
            print_note(f"prompt: {MESSAGE if session.prompt_format.uses_template else TEXT}")
            for line in [*describe_recodes(cache["recoded"]), reply.format_line(spec, session)]:
                print_note(line)


def is_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


def _show_hint(session: Session) -> None:
    """Suggest --chat if the model has a chat template and the prompt does not use it."""
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
    """Raise an error for files that cannot be written, read or continued with these options."""
    if save is not None and cache_prompt is not None:
        raise ValueError("--save with --cache-prompt: give one of them")
    for flag, path in (("--save", save), ("--cache-prompt", cache_prompt)):
        if path is not None:
            check_writable(path, flag)
    if cache_prompt is not None and chat:
        raise ValueError(
            "--chat with --cache-prompt: a message is cached with its reply; use --save for both"
        )
    if load is not None and (chat or cache_prompt is not None):
        _check_saved(load, model, chat)


def _check_saved(load: Path, model: str | None, chat: bool) -> None:
    """Raise an error for options that do not fit a saved conversation."""
    template = check_transcript(load, model).template
    if chat and not template:
        raise ValueError(
            f"--chat with --load {load}: the file has a text without a chat template: drop --chat"
        )
    if template and not chat:
        raise ValueError(
            f"--cache-prompt with --load {load}: its chat template needs a reply to each message; "
            "use --save, which writes the reply too"
        )


def _prefill_prompt(session: Session, text: str, *, quiet: bool) -> None:
    with ProgressBar("reading the prompt", quiet=quiet) as bar:
        session.read(text, progress=bar.update)


def _generate_reply(
    session: Session, text: str, send_options: dict[str, Any], save: Path | None, *, quiet: bool
) -> PrintedReply:
    reply = PrintedReply()
    if not (quiet or session.turns):
        _show_hint(session)
    with ProgressBar("reading the prompt", quiet=quiet) as bar:
        steps = session.send(text, **send_options, progress=bar.update)
        prefix = "" if session.prompt_format.uses_template else text
        try:
            reply.print_steps(steps, bar, prefix=prefix, quiet=quiet)
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
