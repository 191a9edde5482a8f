"""`kvant eval`: what each format does to a model, and what it takes, in the same run as raw."""

from __future__ import annotations

import csv as csv_text
import json as json_text
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kvant import checkpoints
from kvant.cli import options
from kvant.cli.options import check_writable, read_text
from kvant.errors import name_path
from kvant.progress import Bar
from kvant.sizes import format_size
from kvant.spec import check_words, split
from kvant.tables import blank

FORMATS = "affine8,affine4,turbo4v4,turbo4v2"


def evaluation(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    text: Annotated[
        Path | None, Option(help="Else files of Python's library that the one inside never saw.")
    ] = None,
    formats: Annotated[str, Option(help="With their options, and commas between.")] = FORMATS,
    tokens: Annotated[int, Option(min=2, help="Of text, each predicted.")] = 16384,
    context: Annotated[int, Option(min=2, help="Tokens of a piece, at most the model's.")] = 2048,
    prompts: Annotated[
        int, Option(min=1, help="Pieces to continue, and pieces to hide and find things in.")
    ] = 8,
    device: options.Device = None,
    dtype: Annotated[
        str,
        Option(
            help="auto, bfloat16, ...; float32 is without the rounding of 16 bits, a KL of its own."
        ),
    ] = "auto",
    csv: Annotated[Path | None, Option(help="Also write a table of CSV.")] = None,
    plot: Annotated[Path | None, Option(help="Also draw divergence against bytes: F.png")] = None,
    save: Annotated[
        Path | None, Option(help="Keep each result in a file, and go on from there.")
    ] = None,
    json: options.Json = False,
) -> None:
    """What each format does to a model's predictions, and its bytes."""
    if plot is not None:
        from kvant.bench.report import check_plot

        check_plot(plot)
    _check_files({"--csv": csv, "--plot": plot, "--save": save})
    specs = {spec: spec for spec in split(formats)}
    for spec in specs:
        check_words(spec)
    told = None if text is None else read_text(text, "--text")
    loaded, tokenizer = checkpoints.load(
        model, trust_code=trust_remote_code, device=device, dtype=dtype
    )
    from kvant.eval import Settings, evaluate
    from kvant.eval.result import Point, draw, flat
    from kvant.hf import attach

    attach(loaded)  # some attention reads stored rows only so
    settings = Settings(tokens=tokens, context=context, prompts=prompts)
    with Bar("measuring", quiet=json) as reading:
        results = evaluate(
            loaded, tokenizer, specs, text=told, settings=settings, save=save, progress=reading.show
        )
    facts = {
        "model": model or "the model inside",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "tokens": tokens,
        "context": context,
        "prompts": prompts,
    }
    title = f"{facts['model']}, {facts['dtype']}"
    if csv is not None:
        _write(csv, [flat(one) for one in results])
    if plot is not None:
        draw([Point.of(one) for one in results], title, plot)
    if json:
        print(json_text.dumps(facts | {"formats": [one.as_json() for one in results]}))
    else:
        _show(title, results)


def _check_files(files: Mapping[str, Path | None]) -> None:
    for flag, file in files.items():
        if file is not None:
            check_writable(file, flag)


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with name_path(file), file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv_text.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _show(title: str, results: Sequence[Any]) -> None:
    first = results[0]
    console, _ = blank()
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in first.raw_shares.items())
    console.print(
        f"{title}; raw: perplexity {first.raw_perplexity:.4g} over {first.positions} tokens, "
        f"{shares}",
        soft_wrap=True,
    )
    parts = {
        ("perplexity", "95%", "mean KL", "95%", "p99.9"): _predictions,
        ("top-1", f"same of {first.continued}", *first.shares, "tokens/s", "of raw"): _answers,
        ("bytes a token", "of raw", "at 2k", "of raw", "at 32k", "of raw"): _bytes,
    }
    for heads, cells in parts.items():  # each as wide as a terminal
        console, table = blank()
        table.add_column("format", no_wrap=True)
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for one in results:
            table.add_row(one.format, *cells(one))
        console.print(table)


def _predictions(one: Any) -> list[str]:
    low, high = one.perplexity_change_interval
    least, most = one.mean_kl_interval
    found = [f"{one.perplexity_change:+.2%}", f"{low:+.2%} {high:+.2%}"]
    return [*found, f"{one.mean_kl:.2g}", f"{least:.2g} {most:.2g}", f"{one.p999_kl:.2g}"]


def _answers(one: Any) -> list[str]:
    found = [f"{one.top1:.1%}", f"{one.identical:.1f}"]
    found += [f"{share:.0%}" for share in one.shares.values()]
    return [*found, f"{one.tokens_s:.0f}", f"{one.vs_raw:.2f}"]


def _bytes(one: Any) -> list[str]:
    """Of a sealed row in all layers, and of the whole cache."""
    found = [f"{one.row_nbytes:.0f}", _part(one.row_nbytes, one.raw_row_nbytes)]
    for length, count in one.nbytes.items():
        known = count is not None
        found += [format_size(count), _part(count, one.raw_nbytes[length])] if known else ["", ""]
    return found


def _part(part: float, whole: float) -> str:
    return f"{part / whole if whole else 1:.3g}"
