"""Measure decoding: of a model that generates text, or of caches alone at a context.

Without `--contexts` a model (default: the built-in one) continues a text with no cache, with
kvant's caches and with peers: time to the first token, tokens per second, and the time of one more
token against the length (speed.py). With `--contexts` a larger model with random rows decodes a few
tokens at each context (cache_race.py). On a GPU, generation is timed by the wall clock, since each
token is waited for.
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
TEXT_MODULE = "argparse"  # a long module of the standard library, whose source is the text


@dataclass(frozen=True)
class DecodeSettings:
    """What to measure; the defaults fit the built-in model."""

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
            raise ValueError(f"--tokens {self.tokens}: a speed needs 2 or more")

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
    """Return the first `count` tokens of a text; raise if it or the context is shorter."""
    max_positions = getattr(
        model.config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    tokens: list[int] = tokenizer.encode(inspect.getsource(import_module(TEXT_MODULE)))
    for limit, source in ((max_positions, "the context of the model"), (len(tokens), "the text")):
        if limit is not None and count > limit:
            raise ValueError(
                f"{count} tokens, and {source} has {limit}: shorten --lengths, --prompt"
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
    """Measure a model that generates: print two tables and a JSON line, and plot."""
    show_progress("loading the model")
    model, tokenizer = load(name, device=device.name, dtype=settings.dtype)
    text = read_text_tokens(model, tokenizer, settings.max_length)
    makes = make_candidates(model, split_specs(settings.formats))
    peers, skipped = find_peers(settings.peers, model, name or str(demo.PATH))
    show_progress("")
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    makes |= peers
    prompt = text[: settings.prompt]
    generated = measure_generations(makes, prompt, settings.tokens, settings.runs)
    if not quiet:
        print_table(f"{settings.tokens} tokens after {settings.prompt}", generated)
    steps = measure_latencies(makes, text, settings.points, settings.repeats)
    if not quiet:
        print_table("milliseconds for one more token, against the length", make_latency_rows(steps))
    facts = describe_model(name, model, settings)
    facts |= {"peers": {peer: version(peer) for peer in peers}, "skipped": skipped}
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
    """Return the options that were set; raise for one that needs another kind of run."""
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"--{name} is for a run {clause} --contexts")
    return {name: value for name, value in options.items() if value is not None}


def main(
    contexts: Annotated[
        str | None, typer.Option(help="Rows in the caches of a model of a known shape")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder, or name on the hub")] = None,
    formats: Annotated[
        str | None, typer.Option(help="Specs to measure, or none for no cache")
    ] = None,
    against: Annotated[str | None, typer.Option(help="transformers,llama-cpp,mlx-lm")] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths to time one more token at")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of the prompt: 512")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens to generate: 512")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Generations per candidate: 3")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Tokens per figure: 15; with --contexts 9")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="With --contexts: 0.6b (Qwen3-0.6B's), 8b")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="With --contexts: layers of the model")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="With --contexts: dynamic; default on a GPU: static, compiled"),
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile", help="With --contexts, on a GPU: compile kvant, too")
    ] = None,
    pack: Annotated[
        bool | None, typer.Option("--pack", help="With --contexts, on a CPU: also packed weights")
    ] = None,
    peaks: Annotated[
        bool | None,
        typer.Option("--peaks/--no-peaks", help="With --contexts: memory peaks, in new processes"),
    ] = None,
    apart: Annotated[
        bool | None,
        typer.Option("--apart", help="With --contexts: run kernels on kvant's own threads"),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model; auto: as saved")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the latency to F.png")] = None,
    json: Json = False,
) -> None:
    """Measure decoding: no cache, kvant's caches and peers; or caches alone."""
    bench_device = choose_device(device)
    for spec in split_specs(formats) if formats is not None else ():
        if spec != NO_CACHE:
            parse(spec, 1)
    check_files(plot=plot)
    check_plot(plot)
    if threads is not None:
        torch.set_num_threads(threads)
    shared = {"formats": formats, "repeats": repeats}
    generation = {"against": against, "lengths": lengths, "prompt": prompt, "tokens": tokens}
    generation |= {"runs": runs, "dtype": dtype}
    race = {"shape": shape, "layers": layers, "baseline": baseline}
    race |= {"compiled": compiled, "pack": pack, "peaks": peaks, "apart": apart}
    if contexts is None:
        settings = choose_options(shared | generation, race, "with")
        run_generation(model, DecodeSettings(**settings), bench_device, plot, quiet=json)
    else:
        settings = choose_options(
            shared | race, generation | {"model": model, "plot": plot}, "without"
        )
        run_bare_race(contexts, bench_device, quiet=json, **settings)


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
    """Run the race of caches; print one table and a JSON line."""
    if apart:
        use_own_threads()
    context_lengths = parse_numbers("contexts", contexts)
    baseline_name = baseline or device.baseline
    task = cache_race.RaceTask(layers, repeats, shape, device, baseline_name, compiled, pack)
    rows = cache_race.run_race(context_lengths, split_specs(formats), task, peaks=peaks)
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
