"""`kvant batch`: generate replies to a file of prompts, many at a time, written in order.

Both files have one JSON object per line. An interrupted run resumes after the last complete reply,
if the prompts and options are the same.
"""

from __future__ import annotations

import json as json_text
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from kvant.cli import options, print_json, print_note
from kvant.cli.options import (
    EngineOptions,
    ReplyOptions,
    check_readable,
    check_send_options,
    expand_options,
    read_text,
)
from kvant.cli.session import attach_model, open_prefixes
from kvant.errors import name_path
from kvant.platform import c_libraries
from kvant.platform.paths import check_writable
from kvant.platform.sizes import format_count
from kvant.platform.terminal import ProgressBar

if TYPE_CHECKING:
    from kvant.engine import Engine, Stream

# Engine statistics of a run that had nothing left to generate.
NO_STATS = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
PROMPT_KEYS = ("prompt", "messages")  # a line has exactly one of them
OPTION_TYPES: Mapping[str, tuple[type, ...]] = {  # options of a line, over those of the command
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "seed": (int,),
    "stop": (str, list),
    "ignore_end": (bool,),
}


@expand_options
def batch(
    prompts: Annotated[Path, Argument(help='JSON lines: {"prompt": ...} or {"messages": ...}.')],
    out: Annotated[Path, Option(help="Output file; a run resumes after the replies in it.")],
    engine_options: EngineOptions,
    sampling: ReplyOptions,
    json: options.Json = False,
) -> None:
    """Generate replies to a file of prompts, many at a time."""
    spec, store, defaults = engine_options.spec, engine_options.store, asdict(sampling)
    check_readable(prompts, "PROMPTS")
    check_writable(out, "--out")
    engine_options.check()
    if store:
        from kvant.stores import open_tiers

        open_tiers(store)
    common = {name: getattr(engine_options, name) for name in ("model", "dtype", "max_context")}
    common["kv_cache"] = spec
    if engine_options.weights is not None:  # files of earlier versions have no such entry
        common["weights"] = engine_options.weights
    requests = [
        _parse_request(line, number, defaults)
        for number, line in enumerate(read_text(prompts, "PROMPTS").split("\n"), 1)
        if line.strip()
    ]
    digests = [_digest_request(common | request) for request in requests]
    num_done, failed = _read_progress(out, digests)
    num_missing, seconds, stats = len(requests) - num_done, 0.0, NO_STATS
    if num_missing:
        loaded, tokenizer = engine_options.load()
        attached_spec = attach_model(loaded, spec, tokenizer, engine_options.guard)
        from kvant.engine import Engine

        c_libraries.keep_freed_memory()
        max_bytes = engine_options.max_bytes
        max_prefix_bytes = "1GiB" if max_bytes is None else None
        with (
            open_prefixes(store, quiet=json, max_bytes=max_prefix_bytes) as prefixes,
            Engine(
                loaded,
                engine_options.load_processor(loaded, tokenizer),
                attached_spec,
                prefixes=prefixes,
                max_bytes=max_bytes,
                max_sequences=engine_options.max_sequences,
                max_context=engine_options.max_context,
                backend=engine_options.backend,
                pack=engine_options.pack,
                draft=engine_options.load_draft(),
            ) as engine,
        ):
            begin = time.perf_counter()
            num_errors = _write_replies(engine, requests, digests, num_done, out, quiet=json)
            failed += num_errors
            seconds, stats = time.perf_counter() - begin, engine.stats()
    tokens = stats["completion_tokens"]
    speed = tokens / seconds if seconds else None
    if json:
        counts = {"prompts": len(requests), "done_before": num_done, "failed": failed}
        summary = {"out": str(out), "seconds": seconds, "tokens": tokens, "tokens_a_second": speed}
        print_json(counts | summary | {"engine": stats})
    elif num_done:
        print_note(f"{num_done} of {len(requests)} were done before")
    if num_missing and not json:
        rate = "" if speed is None else f", {speed:.1f} a second"
        print_note(
            f"{format_count(num_missing, 'prompt')}, {num_errors} failed: "
            f"{format_count(tokens, 'token')} in {seconds:.1f} s{rate}; "
            f"{stats['cached_tokens']} of {stats['prompt_tokens']} prompt tokens were cached"
        )
    if failed:
        print_note(f"{failed} of {len(requests)} prompts failed: see `error` in {out}")
        raise Exit(1)


@contextmanager
def name_way_to_resume(out: Path) -> Iterator[None]:
    """Say after an interrupt how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        print_note(f"the same command continues after the replies in {out}")
        raise


def _write_replies(
    engine: Engine,
    requests: list[dict[str, Any]],
    digests: list[str],
    num_done: int,
    out: Path,
    *,
    quiet: bool,
) -> int:
    """Generate and append the replies after the first `num_done`; return the number of errors."""
    from kvant.engine import iterate_results

    failed = 0
    with name_path(out):
        out.touch()
    with name_way_to_resume(out), ProgressBar("prompts", quiet=quiet) as bar:
        bar.update(num_done, len(requests))
        submits = [partial(_submit, engine, request) for request in requests[num_done:]]
        for index, result in enumerate(iterate_results(submits, engine.max_sequences), num_done):
            failed += isinstance(result, Exception)
            line = {"index": index, "of": digests[index]} | _format_reply(result)
            with name_path(out), out.open("ab") as file:
                file.write(json_text.dumps(line).encode() + b"\n")
            bar.update(index + 1, len(requests))
    return failed


def _parse_request(line: str, number: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a line into a request, or raise an error that names the line.

    `defaults` are the command's options; each line derives its own seed from the default one.
    """
    from kvant.generation.settings import Sampling, derive_seed

    try:
        entry = json_text.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON: {error}") from None
    if not isinstance(entry, dict) or len([name for name in PROMPT_KEYS if name in entry]) != 1:
        raise ValueError(f'line {number}: an object with either "prompt" or "messages" is needed')
    if unknown := sorted(entry.keys() - OPTION_TYPES.keys() - set(PROMPT_KEYS)):
        allowed = ", ".join((*PROMPT_KEYS, *OPTION_TYPES))
        raise ValueError(f"line {number}: unknown key {unknown[0]!r}; allowed are {allowed}")
    if not isinstance(entry.get("prompt", ""), str):
        raise ValueError(f"line {number}: the prompt is not a string")
    if not isinstance(entry.get("messages", []), list):
        raise ValueError(f"line {number}: messages is not a list")
    entry = {name: value for name, value in entry.items() if value is not None}
    for name, types in OPTION_TYPES.items():
        value = entry.get(name)
        is_stray_bool = isinstance(value, bool) and bool not in types  # a bool is also an int
        if value is not None and (is_stray_bool or not isinstance(value, types)):
            expected = " or ".join(expected_type.__name__ for expected_type in types)
            raise ValueError(
                f"line {number}: {name} is {json_text.dumps(value)}: {expected} is needed"
            )
    request = dict(defaults) | {"seed": derive_seed(defaults["seed"], number - 1)} | entry
    stop = request.get("stop", [])
    if not all(isinstance(text, str) for text in stop):
        raise ValueError(f"line {number}: stop is {json_text.dumps(stop)}: strings are needed")
    try:
        names = {"max_new_tokens", *(option.name for option in fields(Sampling))}
        send_options = {name: value for name, value in request.items() if name in names}
        send_options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        check_send_options(send_options, None)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    return request


def _digest_request(request: Mapping[str, Any]) -> str:
    """Return a digest of a request; its reply has it too, so a resumed run can compare them."""
    text = json_text.dumps(request, sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _read_progress(out: Path, digests: list[str]) -> tuple[int, int]:
    """Count the replies in the output file, and the errors among them.

    Truncates an incomplete last line, which a killed run leaves.
    """
    if not out.exists():
        return 0, 0
    data = out.read_bytes()
    *lines, partial_line = data.split(b"\n")
    failed = 0
    for index, line in enumerate(lines):
        try:
            reply = json_text.loads(line)
            digest = reply["of"]
        except (ValueError, KeyError, TypeError):
            raise _make_foreign_error(out, index) from None
        if index >= len(digests) or digest != digests[index]:
            raise ValueError(
                f"--out {out}: line {index + 1} is the reply to another prompt, or with other "
                "options: choose another file"
            )
        failed += "error" in reply
    if partial_line:
        if len(lines) == len(digests):
            raise _make_foreign_error(out, len(lines))
        reply_start = {"index": len(lines), "of": digests[len(lines)]}
        line_start = json_text.dumps(reply_start)[:-1].encode()
        if partial_line[: len(line_start)] != line_start[: len(partial_line)]:
            raise _make_foreign_error(out, len(lines))
        os.truncate(out, len(data) - len(partial_line))
    return len(lines), failed


def _make_foreign_error(out: Path, index: int) -> ValueError:
    return ValueError(
        f"--out {out}: line {index + 1} is not a reply of kvant batch: choose another file"
    )


def _submit(engine: Engine, request: Mapping[str, Any]) -> Stream:
    options = {name: value for name, value in request.items() if value is not None}
    prompt = options.pop("prompt", None)
    return engine.submit(options.pop("messages") if prompt is None else prompt, **options)


def _format_reply(result: Any) -> dict[str, Any]:
    """Return the output fields of a result: a text, or the error of a failed request."""
    if isinstance(result, Exception):
        return {"error": str(result) or type(result).__name__}
    names = ("prompt_tokens", "completion_tokens")
    usage = {name: getattr(result.usage, name) for name in names}
    return {"text": result.text, "finish_reason": result.finish_reason, "usage": usage}
