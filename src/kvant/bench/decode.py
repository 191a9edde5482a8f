"""Measure decoding: of a model that generates text, or of caches alone at a context.

Without `--contexts` a model (default: the built-in one) continues a text with no cache, with
kvant's caches and with peers: time to the first token, tokens per second, and the time of one more
token against the length. With `--contexts` a larger model with random rows decodes a few
tokens at each context (cache_race.py). On a GPU, generation is timed by the wall clock, since each
token is waited for.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache, PreTrainedModel

from kvant import demo
from kvant.bench import harness
from kvant.bench.cache_race import RaceTask, run_race
from kvant.bench.harness import BenchDevice, TimedCall, choose_device, time_in_turn
from kvant.checkpoints import load
from kvant.hf import cache_for, get_cache_argument
from kvant.native import use_own_threads
from kvant.platform.devices import AUTO_DTYPE, parse_dtype
from kvant.spec import parse_words, split_specs

NO_CACHE = "none"  # recompute the whole sequence for every token
TRANSFORMERS, MLX = PEERS = ("transformers", "mlx-lm")
TEXT_MODULE = "argparse"  # a long module of the standard library, whose source is the text


@dataclass(frozen=True)
class Candidate:
    """A sequence, initially empty, that tokens are fed to.

    It has no cache, a cache of any spec, transformers' DynamicCache, or it is one of mlx-lm, if
    that is installed, with the same model.
    """

    feed: Callable[[Sequence[int]], int]  # append tokens; return the most likely next one
    measure_nbytes: Callable[[], int]  # of the cache


MakeCandidate = Callable[[], Candidate]


def open_checkpoint(
    name: str | None, device: BenchDevice, dtype: str, count: int
) -> tuple[PreTrainedModel, list[int], dict[str, Any]]:
    """Load a model; return it, the first `count` tokens of a text, and the model's facts."""
    harness.show_progress("loading the model")
    model, tokenizer = load(name, device=device.name, dtype=dtype)
    facts = {
        "model": name or "the model inside",
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "transformers": version("transformers"),
    }
    return model, read_text_tokens(model, tokenizer, count), facts


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


@torch.no_grad()
def find_likeliest_token(model: PreTrainedModel, tokens: Sequence[int], **options: Any) -> int:
    """Return the most likely next token; compute the logits of the last position only."""
    ids = torch.tensor([list(tokens)], device=model.device)
    return int(model(input_ids=ids, logits_to_keep=1, **options).logits[0, -1].argmax())


def make_candidates(model: PreTrainedModel, names: Sequence[str]) -> dict[str, MakeCandidate]:
    """Return factories by spec, and for "none"; raise if the model does not support one."""
    parameters = inspect.signature(model.forward).parameters
    for name in (get_cache_argument(model), "logits_to_keep"):
        if name not in parameters:
            raise ValueError(f"{type(model).__name__} takes no {name}: it cannot be measured")
    return {name: _make_candidate(model, name) for name in names}


def _make_candidate(model: PreTrainedModel, name: str) -> MakeCandidate:
    if name == NO_CACHE:
        return lambda: make_uncached(model)
    cache_for(model, name)
    return lambda: make_cached(model, cache_for(model, name), lambda c: c.states.nbytes)


def make_uncached(model: PreTrainedModel) -> Candidate:
    """Make a sequence that is recomputed for every token."""
    fed: list[int] = []

    def feed(tokens: Sequence[int]) -> int:
        fed.extend(tokens)
        return find_likeliest_token(model, fed, use_cache=False)

    return Candidate(feed, lambda: 0)


def make_cached(
    model: PreTrainedModel, cache: Any, measure_nbytes: Callable[[Any], int]
) -> Candidate:
    """Make a sequence with a cache that the model's forward updates."""
    feed = partial(find_likeliest_token, model, **{get_cache_argument(model): cache})
    return Candidate(feed, lambda: measure_nbytes(cache))


def make_dynamic(model: PreTrainedModel) -> MakeCandidate:
    """Return a factory of sequences with transformers' DynamicCache."""

    def measure_nbytes(cache: DynamicCache) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    return lambda: make_cached(model, DynamicCache(config=model.config), measure_nbytes)


def make_mlx(model: Any) -> Candidate:
    """Make a sequence in mlx-lm, with its model and cache."""
    cache = import_module("mlx_lm.models.cache").make_prompt_cache(model)
    mx = import_module("mlx.core")

    def feed(tokens: Sequence[int]) -> int:
        if len(tokens) > 1:  # as mlx-lm prefills a prompt: without logits
            model(mx.array([list(tokens[:-1])]), cache=cache)
            mx.eval([layer.state for layer in cache])
        return int(mx.argmax(model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]).item())

    return Candidate(feed, lambda: sum(layer.nbytes for layer in cache))


def make_peers(
    names: Sequence[str], model: PreTrainedModel, path: str
) -> tuple[dict[str, MakeCandidate], list[str]]:
    """Return the peers that can run the model at `path`, and a line for each skipped one."""
    makes, skipped = {}, []
    if TRANSFORMERS in names:
        makes[TRANSFORMERS] = make_dynamic(model)
    if MLX in names and find_spec("mlx_lm") is None:
        skipped.append("mlx-lm is not installed")
    elif MLX in names:
        try:
            makes[MLX] = partial(make_mlx, import_module("mlx_lm").load(path)[0])
        except (ImportError, OSError, ValueError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            skipped.append(f"mlx-lm cannot run this model here: {reason}")
    return makes, skipped


BASELINES = (NO_CACHE, TRANSFORMERS)
WARMUP_TOKENS = 2  # per candidate, or per candidate and length, before the timed tokens
LATENCY_LABEL = "milliseconds for one more (median)"


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
        for name in self.peers:
            if name not in PEERS:
                raise ValueError(f"--against {name}: known are {', '.join(PEERS)}")
        parse_dtype(self.dtype)
        check_lengths(self.points, self.repeats)
        if self.tokens < 2:
            raise ValueError(f"--tokens {self.tokens}: a speed needs 2 or more")

    @property
    def peers(self) -> list[str]:
        return [name for name in self.against.split(",") if name]

    @property
    def points(self) -> list[int]:
        return harness.parse_numbers("lengths", self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.prompt + self.tokens, *self.points)


def _continue_prompt(candidate: Candidate, prompt: Sequence[int]) -> TimedCall:
    """Return a call that feeds the prompt, and then each time the token that came last."""
    tokens = [*prompt]

    def step() -> None:
        tokens[:] = [candidate.feed(tokens)]

    return step


def measure_generations(
    makes: Mapping[str, MakeCandidate], prompt: Sequence[int], tokens: int, num_runs: int
) -> list[dict[str, Any]]:
    """Generate `tokens` tokens with each candidate in turn; return a row for each.

    Figures are medians of the runs and count all tokens, also those that grow the cache or seal a
    page. `vs_NAME` is the speed relative to NAME.
    """
    first: dict[str, list[float]] = {name: [] for name in makes}
    others: dict[str, list[float]] = {name: [] for name in makes}
    nbytes: dict[str, int] = {}
    for run in range(num_runs + 1):
        candidates = {name: make() for name, make in makes.items()}
        steps = {name: _continue_prompt(c, prompt) for name, c in candidates.items()}
        label = f"generation {run} of {num_runs}"
        laps = time_in_turn(steps, tokens if run else WARMUP_TOKENS, label, warmup=0)
        for name, candidate in candidates.items() if run else ():
            first[name].append(laps[name].seconds[0])
            others[name].append(sum(laps[name].seconds[1:]))
            nbytes[name] = candidate.measure_nbytes()
    speeds = {name: (tokens - 1) / statistics.median(seconds) for name, seconds in others.items()}
    return [
        {
            "cache": name,
            "first_ms": statistics.median(first[name]) * 1e3,
            "tokens_s": speed,
            "cache_kib": nbytes[name] / 1024,
            **{f"vs_{base}": speed / speeds[base] for base in BASELINES if base in speeds},
        }
        for name, speed in speeds.items()
    ]


def check_lengths(lengths: Sequence[int], repeats: int) -> None:
    """Raise if two lengths are too close for the tokens that are fed one at a time."""
    num_single = WARMUP_TOKENS + repeats
    for previous, length in zip([0, *lengths], lengths, strict=False):
        if length <= previous + num_single:
            raise ValueError(
                f"--lengths: {length} after {previous}, and {num_single} tokens are read one at a "
                "time: give lengths that are further apart, or fewer --repeats"
            )


def measure_latencies(
    makes: Mapping[str, MakeCandidate], text: Sequence[int], lengths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Time one more token of the text at each length; return a row for each length and candidate.

    Each candidate is filled to a length, and the next `repeats` tokens are fed one at a time.
    Nothing is rewound in between: growth of the cache is part of the figure. One token in 64 also
    seals a page, which a median does not show, but tokens per second do.
    """
    candidates = {name: make() for name, make in makes.items()}
    rows: list[dict[str, Any]] = []
    previous = 0
    for length in lengths:
        start = length - WARMUP_TOKENS - repeats
        for candidate in candidates.values():
            candidate.feed(text[previous:start])
        calls = {name: _feed_one_by_one(c, text[start:length]) for name, c in candidates.items()}
        label = f"latency at {length} tokens"
        laps = time_in_turn(calls, repeats, label, warmup=WARMUP_TOKENS)
        rows += [{"length": length, "cache": name} | laps[name].summarize() for name in laps]
        previous = length
    return rows


def _feed_one_by_one(candidate: Candidate, tokens: Sequence[int]) -> TimedCall:
    remaining = iter(tokens)
    return lambda: candidate.feed([next(remaining)])


def make_latency_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the median milliseconds by candidate and length."""
    return harness.group_curves(rows, lambda row: row["cache"], "length")


def make_latency_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a table with a column for each length."""
    return [
        {"cache": name, **{str(length): ms for length, ms in curve.items()}}
        for name, curve in make_latency_curves(rows).items()
    ]


def run_generation(
    name: str | None,
    settings: DecodeSettings,
    device: BenchDevice,
    plot: Path | None,
    *,
    quiet: bool,
) -> None:
    """Measure a model that generates: print two tables and a JSON line, and plot."""
    model, text, facts = open_checkpoint(name, device, settings.dtype, settings.max_length)
    makes = make_candidates(model, split_specs(settings.formats))
    peers, skipped = make_peers(settings.peers, model, name or str(demo.PATH))
    harness.print_skipped(skipped)
    makes |= peers
    prompt = text[: settings.prompt]
    generated = measure_generations(makes, prompt, settings.tokens, settings.runs)
    if not quiet:
        title = (
            f"{settings.tokens} tokens after {settings.prompt}, by calls of the model, not replayed"
        )
        harness.print_table(title, generated)
    steps = measure_latencies(makes, text, settings.points, settings.repeats)
    if not quiet:
        title = "milliseconds for one more token, against the length"
        harness.print_table(title, make_latency_rows(steps))
    if plot is not None:
        title = f"one more token: {facts['model']}, {facts['dtype']}"
        harness.draw_curves(make_latency_curves(steps), title, plot, LATENCY_LABEL)
    facts |= {key: asdict(settings)[key] for key in ("prompt", "tokens", "runs", "repeats")}
    facts |= {"peers": {peer: version(peer) for peer in peers}, "skipped": skipped}
    facts |= {"rows": generated, "latency": steps}
    harness.print_json("decode", facts, quiet=quiet, gpu=device.describe())


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
    model: harness.Model = None,
    formats: Annotated[
        str | None, typer.Option(help="Specs to measure, or none for no cache")
    ] = None,
    against: Annotated[str | None, typer.Option(help="transformers,mlx-lm")] = None,
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
    weights: Annotated[
        str | None,
        typer.Option(help="With --contexts, on a CPU: also packed: raw, affine8, affine4"),
    ] = None,
    peaks: Annotated[
        bool | None,
        typer.Option("--peaks/--no-peaks", help="With --contexts: memory peaks, in new processes"),
    ] = None,
    apart: Annotated[
        bool | None,
        typer.Option("--apart", help="With --contexts: run kernels on kvant's own threads"),
    ] = None,
    threads: harness.Threads = None,
    device: harness.Device = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model; auto: as saved")] = None,
    plot: harness.Plot = None,
    json: harness.Json = False,
) -> None:
    """Measure decoding: no cache, kvant's caches and peers; or caches alone."""
    bench_device = choose_device(device)
    for spec in split_specs(formats) if formats is not None else ():
        if spec != NO_CACHE:
            parse_words(spec)
    harness.check_plot(plot)
    harness.set_threads(threads)
    shared = {"formats": formats, "repeats": repeats}
    generation = {"against": against, "lengths": lengths, "prompt": prompt, "tokens": tokens}
    generation |= {"runs": runs, "dtype": dtype}
    race = {"shape": shape, "layers": layers, "baseline": baseline}
    race |= {"compiled": compiled, "weights": weights, "peaks": peaks, "apart": apart}
    if contexts is None:
        settings = choose_options(shared | generation, race, "with")
        run_generation(model, DecodeSettings(**settings), bench_device, plot, quiet=json)
    else:
        settings = choose_options(
            shared | race, generation | {"model": model, "plot": plot}, "without"
        )
        settings.setdefault("baseline", bench_device.baseline)
        task = RaceTask(device=bench_device, **settings)
        run_contexts(harness.parse_numbers("contexts", contexts, 1), task, quiet=json)


def run_contexts(contexts: list[int], task: RaceTask, *, quiet: bool) -> None:
    """Run the race of caches: print one table and a JSON line."""
    if task.apart:
        use_own_threads()
    rows = run_race(contexts, task)
    facts = task.model_facts | {
        "sizes": task.model_sizes,
        "baseline": task.baseline,
        "compiled": task.compiled,
        "dtype": "bfloat16",
        "apart": task.apart,
    }
    harness.print_report("decode", rows, facts, quiet=quiet, gpu=task.device.describe())


if __name__ == "__main__":
    harness.run(main)
