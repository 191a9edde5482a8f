"""`kvant batch`: a file of prompts to a file of replies, many at a time, in order.

Each line of either is one JSON object. A run that was ended goes on where it stopped: lines that
are whole stay, and must be of the same prompts and options.
"""

from __future__ import annotations

import json as json_text
import os
import time
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from kvant import checkpoints, malloc
from kvant.cli import options
from kvant.cli.options import (
    check_backend,
    check_readable,
    check_send_options,
    check_writable,
    read_text,
)
from kvant.cli.session import attach_model, open_prefixes, print_note
from kvant.devices import check_device, check_dtype
from kvant.errors import name_path
from kvant.progress import ProgressBar
from kvant.sizes import format_count, parse_size
from kvant.spec.auto import check_spec_or_auto

# Counts of an engine that was not needed.
NO_STATS = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
PROMPT_KEYS = ("prompt", "messages")  # a line has one of them,
OPTION_TYPES: Mapping[str, tuple[type, ...]] = {  # and any of these, in place of the command's own
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


def batch(
    prompts: Annotated[Path, Argument(help='Lines of JSON: {"prompt": ...} or {"messages": ...}.')],
    out: Annotated[Path, Option(help="Where the replies go; what is there is not done again.")],
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_cache: options.KVCache = None,
    max_bytes: Annotated[str | None, Option(help="Bytes of all caches together: 2GiB.")] = None,
    max_sequences: Annotated[int, Option(min=1, help="So many prompts at a time.")] = 16,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    max_context: options.MaxContext = None,
    store: options.Store = None,
    backend: options.Backend = None,
    pack: options.Pack = True,
    guard: options.Guard = True,
    device: options.Device = None,
    dtype: options.DType = "auto",
    json: options.Json = False,
) -> None:
    """Continue many prompts of a file, on one model at once."""
    spec = "affine8" if kv_cache is None else kv_cache
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    asked = drawn | {"seed": seed, "max_new_tokens": max_new_tokens}
    limit = None if max_bytes is None else parse_size(max_bytes)
    check_readable(prompts, "PROMPTS")
    check_writable(out, "--out")
    check_spec_or_auto(spec)
    _check_served(model, store, backend, device, dtype)
    told = {"model": model, "kv_cache": spec, "dtype": dtype, "max_context": max_context}
    lines = [
        _parse_request(line, number, asked)
        for number, line in enumerate(read_text(prompts, "PROMPTS").split("\n"), 1)
        if line.strip()
    ]
    marks = [_digest_request(told | line) for line in lines]
    done, failed = _read_progress(out, marks)
    figures = _figures(0.0, NO_STATS)
    if done < len(lines):
        served, tokenizer = checkpoints.load(
            model, trust_code=trust_remote_code, device=device, dtype=dtype
        )
        stored = attach_model(served, spec, tokenizer, guard)
        from kvant.engine import Engine

        malloc.keep_freed_memory()
        options: dict[str, Any] = {
            "max_bytes": limit,
            "max_sequences": max_sequences,
            "max_context": max_context,
            "backend": backend,
            "pack": pack,
        }
        most = "1GiB" if limit is None else None
        with (
            open_prefixes(store, quiet=json, max_bytes=most) as prefixes,
            Engine(served, tokenizer, stored, prefixes=prefixes, **options) as engine,
        ):
            begin = time.perf_counter()
            wrong = _write_replies(engine, lines, marks, done, out, max_sequences, quiet=json)
            failed += wrong
            figures = _figures(time.perf_counter() - begin, engine.stats())
    if json:
        summary = {"prompts": len(lines), "done_before": done, "failed": failed, "out": str(out)}
        print(json_text.dumps(summary | figures))
    elif done:
        print_note(f"{done} of {len(lines)} were there already")
    if done < len(lines) and not json:
        print_note(_summary(len(lines) - done, wrong, figures))
    if failed:
        print_note(f"{failed} of {len(lines)} prompts failed: see `error` in {out}")
        raise Exit(1)


def _check_served(
    model: str | None, store: list[str] | None, backend: str | None, device: str | None, dtype: str
) -> None:
    """Refuse what no engine can be made with, before a model is loaded."""
    check_backend(backend)
    check_device(device)
    check_dtype(dtype)
    checkpoints.check_checkpoint(model)
    if store:
        from kvant.stores import open_tiers

        open_tiers(store)


def _figures(seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
    """Count generated tokens and seconds, beside the statistics of the engine."""
    tokens = stats["completion_tokens"]
    speed = tokens / seconds if seconds else None
    return {"seconds": seconds, "tokens": tokens, "tokens_a_second": speed, "engine": stats}


def _summary(prompts: int, failed: int, figures: dict[str, Any]) -> str:
    """Describe the figures of a run in a line."""
    speed, stats = figures["tokens_a_second"], figures["engine"]
    rate = "" if speed is None else f", {speed:.1f} a second"
    return (
        f"{format_count(prompts, 'prompt')}, {failed} failed: "
        f"{format_count(figures['tokens'], 'token')} in "
        f"{figures['seconds']:.1f} s{rate}; {stats['cached_tokens']} of {stats['prompt_tokens']} "
        "tokens of prompts were cached"
    )


def _write_replies(
    engine: Any,
    lines: list[dict[str, Any]],
    digests: list[str],
    num_done: int,
    out: Path,
    max_concurrent: int,
    *,
    quiet: bool,
) -> int:
    """Write the replies that are not there yet, in order; how many of them are errors."""
    from kvant.engine import iterate_results

    failed = 0
    with name_path(out):
        out.touch()
    with ProgressBar("prompts", quiet=quiet) as bar:
        bar.update(num_done, len(lines))
        asks = [partial(_submit, engine, line) for line in lines[num_done:]]
        for number, result in enumerate(iterate_results(asks, max_concurrent), num_done):
            failed += isinstance(result, Exception)
            line = {"index": number, "of": digests[number]} | _format_reply(result)
            with name_path(out), out.open("ab") as file:
                file.write(json_text.dumps(line).encode() + b"\n")
            bar.update(number + 1, len(lines))
    return failed


def _parse_request(line: str, number: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a line asks for, or an error that names the line; a seed counts up with the lines."""
    from kvant.generation.settings import Sampling, derive_seed

    try:
        found = json_text.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from None
    if not isinstance(found, dict) or len([name for name in PROMPT_KEYS if name in found]) != 1:
        raise ValueError(f'line {number}: an object with "prompt" or "messages" is needed')
    if unknown := sorted(found.keys() - OPTION_TYPES.keys() - set(PROMPT_KEYS)):
        known = ", ".join((*PROMPT_KEYS, *OPTION_TYPES))
        raise ValueError(f"line {number}: {unknown[0]!r} is not known; known are {known}")
    if not isinstance(found.get("prompt", ""), str):
        raise ValueError(f"line {number}: the prompt is no text")
    if not isinstance(found.get("messages", []), list):
        raise ValueError(f"line {number}: messages is no list")
    found = {name: value for name, value in found.items() if value is not None}
    for name, kinds in OPTION_TYPES.items():
        value = found.get(name)
        wrong = isinstance(value, bool) and bool not in kinds
        if value is not None and (wrong or not isinstance(value, kinds)):
            raise ValueError(f"line {number}: {name} is {json_text.dumps(value)}")
    whole = dict(defaults) | {"seed": derive_seed(defaults["seed"], number - 1)} | found
    stop = whole.get("stop", [])
    if not all(isinstance(text, str) for text in stop):
        raise ValueError(f"line {number}: stop is {json_text.dumps(stop)}: texts are needed")
    try:
        drawn = {one.name: whole[one.name] for one in fields(Sampling) if one.name in whole}
        ends = {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        check_send_options(drawn | ends | {"max_new_tokens": whole["max_new_tokens"]}, None)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    return whole


def _digest_request(request: Mapping[str, Any]) -> str:
    """Tells one request from another."""
    text = json_text.dumps(request, sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _read_progress(out: Path, digests: list[str]) -> tuple[int, int]:
    """How many replies are there, and how many of them are errors.

    Half a line at the end, of a run that was killed, is cut off.
    """
    if not out.exists():
        return 0, 0
    text = out.read_bytes()
    *lines, rest = text.split(b"\n")
    failed = 0
    for number, line in enumerate(lines):
        try:
            reply = json_text.loads(line)
            mark = reply["of"]
        except (ValueError, KeyError, TypeError):
            raise _make_foreign_error(out, number) from None
        if number >= len(digests) or mark != digests[number]:
            raise ValueError(
                f"--out {out}: line {number + 1} is the reply to another prompt, or with other "
                "options: name another file"
            )
        failed += "error" in reply
    if rest:
        if len(lines) == len(digests):
            raise _make_foreign_error(out, len(lines))
        begin = _format_line_start(len(lines), digests[len(lines)])
        if rest[: len(begin)] != begin[: len(rest)]:
            raise _make_foreign_error(out, len(lines))
        os.truncate(out, len(text) - len(rest))
    return len(lines), failed


def _make_foreign_error(out: Path, number: int) -> ValueError:
    return ValueError(f"--out {out}: line {number + 1} is no reply of kvant batch")


def _format_line_start(number: int, digest: str) -> bytes:
    """How every line begins."""
    return json_text.dumps({"index": number, "of": digest})[:-1].encode()


def _submit(engine: Any, request: Mapping[str, Any]) -> Any:
    given = {name: value for name, value in request.items() if value is not None}
    prompt = given.pop("prompt", None)
    return engine.submit(given.pop("messages") if prompt is None else prompt, **given)


def _format_reply(result: Any) -> dict[str, Any]:
    """A request that fails has an error in place of a text."""
    if isinstance(result, Exception):
        return {"error": str(result) or type(result).__name__}
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }
    return {"text": result.text, "finish_reason": result.finish_reason, "usage": usage}
