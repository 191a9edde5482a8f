"""`kvant run`: continue a prompt, and show the text as it comes."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvant.cli import options
from kvant.cli.opening import Wanted, check_writable, checked_text, read_text
from kvant.cli.reply import Reading, Reply, show, story

PROMPT = "import os\n\ndef "  # for the model inside, which knows Python


def run(
    source: Annotated[str | None, Argument(metavar="[-]", help="- reads the prompt.")] = None,
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    prompt: Annotated[str | None, Option(help="The text to continue; - reads it.")] = None,
    file: Annotated[Path | None, Option(help="Read the prompt from a file.")] = None,
    kv_cache: options.KVCache = None,
    kv_window_size: options.WindowSize = None,
    kv_window_keep: options.WindowKeep = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    max_context: options.MaxContext = None,
    strategy: options.Strategy = "always",
    threshold: options.Threshold = 512,
    budget: options.Budget = None,
    draft: options.Draft = None,
    guard: options.Guard = True,
    save: Annotated[Path | None, Option(help="Write text and cache to a file, to go on.")] = None,
    load: options.Load = None,
    stats: options.Stats = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt with a model, on a cache of any format."""
    text = _prompt(source, prompt, file, load)
    if save is not None:
        check_writable(save, "--save")
    kept = (kv_cache, kv_window_size, kv_window_keep, max_context, strategy, threshold, budget)
    wanted = Wanted(model, *kept, draft, load, guard=guard, trust_remote_code=trust_remote_code)
    session = wanted.session(template=False)
    reply = Reply()
    with Reading(quiet=json) as reading:
        steps = session.send(
            text,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            progress=reading.show,
        )
        reply.take(steps, reading, before=text, quiet=json)
    if save is not None:
        session.save(save)
    stored = wanted.told(session)
    if json:
        said = {"prompt": text, "text": reply.text, "kv_cache": stored}
        print(json_text.dumps(said | reply.figures() | {"cache": session.stats()}))
    elif stats:
        cache = session.stats()
        for line in [*story(cache), reply.line(stored, cache)]:
            show(line)


def _prompt(source: str | None, prompt: str | None, file: Path | None, load: Path | None) -> str:
    given = [text for text in (source, prompt, file) if text is not None]
    if len(given) > 1:
        raise ValueError("-, --prompt and --file each name a prompt: give one of them")
    if source not in (None, "-"):
        raise ValueError(f"{source!r} is no option: a prompt is given with --prompt")
    if file is not None:
        text = read_text(file, "--file")
    elif "-" in given:
        text = "" if sys.stdin is None else sys.stdin.read()
    elif prompt is None:
        text = PROMPT if load is None else ""
    else:
        text = prompt
    checked_text(text, "the prompt")
    if not text and load is None:
        raise ValueError(
            "the prompt is empty: give --prompt TEXT, --file F, or --prompt - to read it"
        )
    return text
