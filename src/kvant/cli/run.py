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
from kvant.cli.options import check_saved, check_writable, checked_text, read_text
from kvant.cli.session import Named, Reply, Wanted, prefixes_in, show, story
from kvant.progress import Bar

TEXT, MESSAGE = "a text, continued as it is", "a message, by the model's chat template"
HINT = "hint: the model has a chat template: --chat takes the prompt as a message, to be answered"
PROMPT = "import os\n\ndef "  # for the model inside, which knows Python


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
    text = _prompt(source, prompt, file, load)
    _check_files(save, cache_prompt, load, model, chat=chat)
    kept = (kv_cache, kv_window_size, kv_window_keep, max_context, strategy, threshold, budget)
    placed = (guard, trust_remote_code, device, dtype, prefill_chunk, backend, pack)
    wanted = Wanted(model, *kept, draft, load, *placed, store=store, chat=chat)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    drawn |= {"repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty}
    drawn |= {"frequency_penalty": frequency_penalty, "seed": seed}
    asked = drawn | {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ())}
    with prefixes_in(store, quiet=json) as prefixes:
        session = wanted.session(asked, template=chat, prefixes=prefixes)
        named = Named.of(wanted, session)
        if cache_prompt is not None:
            _read(session, text, quiet=json)
            reply = Reply()
        else:
            reply = _continued(session, text, asked, save, quiet=json)
        if (path := cache_prompt or save) is not None:
            session.save(path)
        cache, stored = session.stats(), named.now(session)
        if json:
            output = {
                "prompt": text,
                "chat": session.dialogue.template,
                "text": reply.text,
                "kv_cache": stored,
            }
            print(json_text.dumps(output | reply.figures() | {"cache": cache}), flush=True)
        elif stats:
            show(f"prompt: {MESSAGE if session.dialogue.template else TEXT}")
            for line in [*story(cache["recoded"]), reply.line(stored, session)]:
                show(line)


def watched() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


def _show_hint(session: Any) -> None:
    """Name --chat where a prompt to a model with a chat template is continued."""
    if watched() and session.tokenizer.chat_template and not session.dialogue.template:
        show(HINT)


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
    template = check_saved(load, model).template
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


def _read(session: Any, text: str, *, quiet: bool) -> None:
    with Bar("reading the prompt", quiet=quiet) as reading:
        session.read(text, progress=reading.show)


def _continued(
    session: Any, text: str, asked: dict[str, Any], save: Path | None, *, quiet: bool
) -> Reply:
    reply = Reply()
    if not (quiet or session.turns):
        _show_hint(session)
    with Bar("reading the prompt", quiet=quiet) as reading:
        steps = session.send(text, **asked, progress=reading.show)
        before = "" if session.dialogue.template else text
        try:
            reply.take(steps, reading, before=before, quiet=quiet)
        except KeyboardInterrupt:
            if save is not None and reply.tokens:
                session.save(save)
                show(f"\n--save {save}: written up to here")
            raise
    return reply


def _prompt(source: str | None, prompt: str | None, file: Path | None, load: Path | None) -> str:
    given = [text for text in (source, prompt, file) if text is not None]
    if len(given) > 1:
        raise ValueError("-, --prompt and --file each name a prompt: give one of them")
    if source not in (None, "-"):
        raise ValueError(f"{source!r} is no option: a prompt is given with --prompt")
    if file is not None:
        text = read_text(file, "--file")
    elif "-" in given or prompt is None:
        text = _piped(wait="-" in given)
        if not given and not text and load is None:
            text = PROMPT
    else:
        text = prompt
    checked_text(text, "the prompt")
    if not text and load is None:
        raise ValueError(
            "the prompt is empty: give --prompt TEXT, --file F, or --prompt - to read it"
        )
    return text


def _piped(*, wait: bool) -> str:
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
