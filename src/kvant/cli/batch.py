"""`kvant batch`: generate replies to a file of prompts, many at a time, written in order.

Both files have one JSON object per line. An interrupted run resumes after the last complete reply,
if the prompts and options are the same.
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
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from kvant import checkpoints
from kvant.cli import options
from kvant.cli.options import (
    check_backend,
    check_readable,
    check_send_options,
    check_writable,
    read_text,
)
from kvant.cli.session import attach_model, open_prefixes, print_note
from kvant.errors import name_path
from kvant.platform import malloc
from kvant.platform.devices import check_device, check_dtype
from kvant.platform.progress import ProgressBar
from kvant.platform.sizes import format_count, parse_size
from kvant.spec.auto import check_spec_or_auto

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


def batch(
    prompts: Annotated[Path, Argument(help='JSON lines: {"prompt": ...} or {"messages": ...}.')],
    out: Annotated[Path, Option(help="Output file; a run resumes after the replies in it.")],
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_cache: options.KVCache = None,
    max_bytes: Annotated[str | None, Option(help="Limit on all caches together: 2GiB.")] = None,
    max_sequences: Annotated[int, Option(min=1, help="Limit on concurrent prompts.")] = 16,
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
    """Generate replies to a file of prompts, many at a time."""
    spec = "affine8" if kv_cache is None else kv_cache
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    defaults = sampling | {"seed": seed, "max_new_tokens": max_new_tokens}
    limit = None if max_bytes is None else parse_size(max_bytes)
    check_readable(prompts, "PROMPTS")
    check_writable(out, "--out")
    check_spec_or_auto(spec)
    _check_engine_options(model, store, backend, device, dtype)
    common = {"model": model, "kv_cache": spec, "dtype": dtype, "max_context": max_context}
    requests = [
        _parse_request(line, number, defaults)
        for number, line in enumerate(read_text(prompts, "PROMPTS").split("\n"), 1)
        if line.strip()
    ]
    digests = [_digest_request(common | request) for request in requests]
    num_done, failed = _read_progress(out, digests)
    summary = _summarize(0.0, NO_STATS)
    if num_done < len(requests):
        loaded, tokenizer = checkpoints.load(
            model, trust_code=trust_remote_code, device=device, dtype=dtype
        )
        attached_spec = attach_model(loaded, spec, tokenizer, guard)
        from kvant.engine import Engine

        malloc.keep_freed_memory()
        engine_options: dict[str, Any] = {
            "max_bytes": limit,
            "max_sequences": max_sequences,
            "max_context": max_context,
            "backend": backend,
            "pack": pack,
        }
        max_prefix_bytes = "1GiB" if limit is None else None
        with (
            open_prefixes(store, quiet=json, max_bytes=max_prefix_bytes) as prefixes,
            Engine(loaded, tokenizer, attached_spec, prefixes=prefixes, **engine_options) as engine,
        ):
            begin = time.perf_counter()
            num_errors = _write_replies(
                engine, requests, digests, num_done, out, max_sequences, quiet=json
            )
            failed += num_errors
            summary = _summarize(time.perf_counter() - begin, engine.stats())
    if json:
        counts = {"prompts": len(requests), "done_before": num_done, "failed": failed}
        print(json_text.dumps(counts | {"out": str(out)} | summary))
    elif num_done:
        print_note(f"{num_done} of {len(requests)} were done before")
    if num_done < len(requests) and not json:
        print_note(_format_summary(len(requests) - num_done, num_errors, summary))
    if failed:
        print_note(f"{failed} of {len(requests)} prompts failed: see `error` in {out}")
        raise Exit(1)


def _check_engine_options(
    model: str | None, store: list[str] | None, backend: str | None, device: str | None, dtype: str
) -> None:
    """Raise an error for invalid options, before a model is loaded."""
    check_backend(backend)
    check_device(device)
    check_dtype(dtype)
    checkpoints.check_checkpoint(model)
    if store:
        from kvant.stores import open_tiers

        open_tiers(store)


def _summarize(seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
    """Return the speed of a run and the statistics of its engine."""
    tokens = stats["completion_tokens"]
    speed = tokens / seconds if seconds else None
    return {"seconds": seconds, "tokens": tokens, "tokens_a_second": speed, "engine": stats}


def _format_summary(num_prompts: int, failed: int, summary: dict[str, Any]) -> str:
    """Format the summary of a run as one line."""
    speed, stats = summary["tokens_a_second"], summary["engine"]
    rate = "" if speed is None else f", {speed:.1f} a second"
    return (
        f"{format_count(num_prompts, 'prompt')}, {failed} failed: "
        f"{format_count(summary['tokens'], 'token')} in "
        f"{summary['seconds']:.1f} s{rate}; {stats['cached_tokens']} of {stats['prompt_tokens']} "
        "prompt tokens were cached"
    )


def _write_replies(
    engine: Engine,
    requests: list[dict[str, Any]],
    digests: list[str],
    num_done: int,
    out: Path,
    max_concurrent: int,
    *,
    quiet: bool,
) -> int:
    """Generate and append the replies after the first `num_done`; return the number of errors."""
    from kvant.engine import iterate_results

    failed = 0
    with name_path(out):
        out.touch()
    with ProgressBar("prompts", quiet=quiet) as bar:
        bar.update(num_done, len(requests))
        submits = [partial(_submit, engine, request) for request in requests[num_done:]]
        for index, result in enumerate(iterate_results(submits, max_concurrent), num_done):
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
    except ValueError as error:
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
        sampling = {
            option.name: request[option.name]
            for option in fields(Sampling)
            if option.name in request
        }
        stop_options = {
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
            "max_new_tokens": request["max_new_tokens"],
        }
        check_send_options(sampling | stop_options, None)
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
        line_start = _format_line_start(len(lines), digests[len(lines)])
        if partial_line[: len(line_start)] != line_start[: len(partial_line)]:
            raise _make_foreign_error(out, len(lines))
        os.truncate(out, len(data) - len(partial_line))
    return len(lines), failed


def _make_foreign_error(out: Path, index: int) -> ValueError:
    return ValueError(
        f"--out {out}: line {index + 1} is not a reply of kvant batch: choose another file"
    )


def _format_line_start(index: int, digest: str) -> bytes:
    """Return the bytes that a reply's line starts with."""
    return json_text.dumps({"index": index, "of": digest})[:-1].encode()


def _submit(engine: Engine, request: Mapping[str, Any]) -> Stream:
    options = {name: value for name, value in request.items() if value is not None}
    prompt = options.pop("prompt", None)
    return engine.submit(options.pop("messages") if prompt is None else prompt, **options)


def _format_reply(result: Any) -> dict[str, Any]:
    """Return the output fields of a result: a text, or the error of a failed request."""
    if isinstance(result, Exception):
        return {"error": str(result) or type(result).__name__}
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }
    return {"text": result.text, "finish_reason": result.finish_reason, "usage": usage}
