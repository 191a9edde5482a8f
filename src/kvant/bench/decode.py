"""What decoding costs: a model that generates for real, or a bare race of caches at a context.

Without `--contexts` a model, the small one inside the package if none is named, continues a text
with no cache, with caches of ours, and with peers: time to the first token, tokens a second, and
what one more token costs against the length (speed.py). With `--contexts` a larger model with
random rows decodes a few tokens at each context (cache_race.py). On a GPU a model that generates is
timed by this machine's clock: each token is waited for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvant import demo
from kvant.bench import cache_race
from kvant.bench.candidates import NO_CACHE, check_peers, find_peers, make_candidates
from kvant.bench.device import BenchDevice, choose_device
from kvant.bench.report import (
    Json,
    check_files,
    check_plot,
    draw_curves,
    parse_numbers,
    print_json,
    print_report,
    print_table,
    run,
    show_progress,
)
from kvant.bench.speed import (
    check_lengths,
    make_latency_curves,
    make_latency_rows,
    measure_generations,
    measure_latencies,
)
from kvant.checkpoints import load
from kvant.devices import AUTO_DTYPE, parse_dtype
from kvant.native import use_own_threads
from kvant.spec import parse, split_specs

LATENCY_LABEL = "milliseconds for one more (median)"
TEXT_MODULE = "argparse"  # a long module of the standard library: its source is a text anybody has


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured of a model; the defaults fit the one inside."""

    formats: str = "none,raw,step=1,raw,step=256,affine8,affine4"
    against: str = "transformers"
    lengths: str = "128,256,512,1024,2048"
    prompt: int = 512
    tokens: int = 512
    runs: int = 3
    repeats: int = 15
    dtype: str = AUTO_DTYPE

    def __post_init__(self) -> None:
        check_peers(self.peers)
        parse_dtype(self.dtype)
        check_lengths(self.points, self.repeats)
        if self.tokens < 2:
            raise ValueError(f"--tokens {self.tokens}: 2 or more have a speed")

    @property
    def peers(self) -> list[str]:
        return [name for name in self.against.split(",") if name]

    @property
    def points(self) -> list[int]:
        return parse_numbers("lengths", self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.prompt + self.tokens, *self.points)


def read_text_tokens(model: Any, tokenizer: Any, count: int) -> list[int]:
    """The first `count` tokens of a text, which the model has positions for."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens: list[int] = tokenizer.encode(inspect.getsource(import_module(TEXT_MODULE)))
    for limit, whose in ((most, "the context of the model"), (len(tokens), "the text")):
        if limit is not None and count > limit:
            raise ValueError(
                f"{count} tokens, and {whose} has {limit}: shorten --lengths, --prompt"
            )
    return tokens[:count]


def run_generation(
    name: str | None,
    settings: DecodeSettings,
    device: BenchDevice,
    plot: Path | None,
    *,
    quiet: bool,
) -> None:
    """A model that generates: two tables, a picture and a JSON line."""
    show_progress("loading the model")
    model, tokenizer = load(name, device=device.name, dtype=settings.dtype)
    text = read_text_tokens(model, tokenizer, settings.max_length)
    makes = make_candidates(model, split_specs(settings.formats))
    theirs, skipped = find_peers(settings.peers, model, name or str(demo.PATH))
    show_progress("")
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    makes |= theirs
    prompt = text[: settings.prompt]
    generated = measure_generations(makes, prompt, settings.tokens, settings.runs)
    if not quiet:
        print_table(f"{settings.tokens} tokens after {settings.prompt}", generated)
    steps = measure_latencies(makes, text, settings.points, settings.repeats)
    if not quiet:
        print_table("milliseconds for one more token, against the length", make_latency_rows(steps))
    facts = describe_model(name, model, settings)
    facts |= {"peers": {peer: version(peer) for peer in theirs}, "skipped": skipped}
    if plot is not None:
        draw_curves(
            make_latency_curves(steps),
            f"one more token: {facts['model']}, {facts['dtype']}",
            plot,
            LATENCY_LABEL,
        )
    print_json("decode", facts | {"rows": generated, "latency": steps}, device, quiet=quiet)


def describe_model(name: str | None, model: Any, settings: DecodeSettings) -> dict[str, Any]:
    return {
        "model": name or "the model inside",
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt": settings.prompt,
        "tokens": settings.tokens,
        "runs": settings.runs,
        "repeats": settings.repeats,
        "transformers": version("transformers"),
    }


def choose_options(
    options: Mapping[str, Any], excluded: Mapping[str, Any], clause: str
) -> dict[str, Any]:
    """What was given of the options that count; one of the others is a mistake."""
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"--{name} is for a run {clause} --contexts")
    return {name: value for name, value in options.items() if value is not None}


def main(
    contexts: Annotated[
        str | None, typer.Option(help="a model of a known shape, with so many random rows")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a folder or a name on the hub")] = None,
    formats: Annotated[
        str | None, typer.Option(help="of the spec language, and none for no cache")
    ] = None,
    against: Annotated[str | None, typer.Option(help="transformers,llama-cpp,mlx-lm")] = None,
    lengths: Annotated[str | None, typer.Option(help="where one more token is timed")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="its tokens: 512")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="generated: 512")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="generations of each: 3")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="tokens a figure: 15; 9")] = None,
    shape: Annotated[
        str | None, typer.Option(help="with --contexts: 0.6b (Qwen3-0.6B's), 8b")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="with --contexts: those of the shape")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="with --contexts: dynamic; on a GPU static, and compiled"),
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile", help="with --contexts, on a GPU: ours, too")
    ] = None,
    pack: Annotated[
        bool | None, typer.Option("--pack", help="with --contexts, on a CPU: ours, packed, too")
    ] = None,
    peaks: Annotated[
        bool | None, typer.Option("--peaks/--no-peaks", help="with --contexts: a process each")
    ] = None,
    apart: Annotated[
        bool | None,
        typer.Option("--apart", help="with --contexts: kernels on threads of their own"),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="of the model; auto: as it was saved")] = None,
    plot: Annotated[Path | None, typer.Option(help="also draw the latency: F.png")] = None,
    json: Json = False,
) -> None:
    """What decoding costs: a model without a cache, with ours, with peers; or bare caches."""
    where = choose_device(device)
    for spec in split_specs(formats) if formats is not None else ():
        if spec != NO_CACHE:
            parse(spec, 1)
    check_files(plot=plot)
    check_plot(plot)
    if threads is not None:
        torch.set_num_threads(threads)
    both = {"formats": formats, "repeats": repeats}
    generating = {"against": against, "lengths": lengths, "prompt": prompt, "tokens": tokens}
    generating |= {"runs": runs, "dtype": dtype}
    racing = {"shape": shape, "layers": layers, "baseline": baseline}
    racing |= {"compiled": compiled, "pack": pack, "peaks": peaks, "apart": apart}
    if contexts is None:
        given = choose_options(both | generating, racing, "with")
        run_generation(model, DecodeSettings(**given), where, plot, quiet=json)
    else:
        given = choose_options(
            both | racing, generating | {"model": model, "plot": plot}, "without"
        )
        run_bare_race(contexts, where, quiet=json, **given)


def run_bare_race(
    contexts: str,
    device: BenchDevice,
    *,
    quiet: bool,
    formats: str = cache_race.DEFAULT_FORMATS,
    repeats: int = 9,
    shape: str = "0.6b",
    layers: int | None = None,
    baseline: str | None = None,
    compiled: bool = False,
    pack: bool = False,
    peaks: bool = True,
    apart: bool = False,
) -> None:
    """The race: one table and a JSON line."""
    if apart:
        use_own_threads()
    points = parse_numbers("contexts", contexts)
    base = baseline or device.baseline
    task = cache_race.RaceTask(layers, repeats, shape, device, base, compiled, pack)
    rows = cache_race.run_race(points, split_specs(formats), task, peaks=peaks)
    facts = {
        "model": f"{task.shape}, random",
        "layers": task.model_sizes["num_hidden_layers"],
        "sizes": task.model_sizes,
        "baseline": task.baseline,
        "compiled": task.compiled,
        "dtype": "bfloat16",
        "transformers": version("transformers"),
        "apart": apart,
    }
    print_report("decode", rows, facts, quiet=quiet, device=device)


if __name__ == "__main__":
    run(main)
