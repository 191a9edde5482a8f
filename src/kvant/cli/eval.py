"""`kvant eval`: measure the quality and the bytes of each format, compared with raw in one run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Option

from kvant.cli import options, print_line, print_note
from kvant.cli.eval_report import EvaluationReport, OutputFiles
from kvant.cli.options import PackedModelOptions, expand_options, read_text
from kvant.platform.terminal import INTERRUPTED_CODE, ProgressBar
from kvant.spec import split_specs
from kvant.spec.language import check_spec_or_auto, is_auto

DEFAULT_FORMATS = "affine8,affine4,turbo4v4,turbo4v2"


class Sample(NamedTuple):
    """How much is measured: the settings of an evaluation that the command sets."""

    tokens: int
    context: int
    prompts: int
    continued: int


FULL_SAMPLE = Sample(16384, 2048, 8, 64)
QUICK_SAMPLE = Sample(2048, 1024, 2, 32)  # seconds for a small model


@dataclass(frozen=True)
class EvaluatedModel(PackedModelOptions):
    dtype: Annotated[
        str,
        Option(help="auto, bfloat16, ...; float32 avoids 16-bit rounding, which adds to the KL."),
    ] = "auto"


@dataclass(frozen=True)
class SampleOptions:
    """How much is measured; explicit numbers win over --quick."""

    quick: Annotated[
        bool,
        Option(
            "--quick",
            help=f"First look: {QUICK_SAMPLE.tokens} tokens in pieces of {QUICK_SAMPLE.context}, "
            f"{QUICK_SAMPLE.prompts} prompts.",
        ),
    ] = False
    tokens: Annotated[
        int | None,
        Option(min=2, help=f"Number of tokens of text to predict; default: {FULL_SAMPLE.tokens}."),
    ] = None
    context: Annotated[
        int | None,
        Option(
            min=4,
            help="Tokens per piece of text, limited by the model's context; default: "
            f"{FULL_SAMPLE.context}.",
        ),
    ] = None
    prompts: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of pieces to continue, and of recall tests; default: "
            f"{FULL_SAMPLE.prompts}.",
        ),
    ] = None

    @property
    def sample(self) -> Sample:
        default = QUICK_SAMPLE if self.quick else FULL_SAMPLE
        explicit = {"tokens": self.tokens, "context": self.context, "prompts": self.prompts}
        return default._replace(**{name: n for name, n in explicit.items() if n is not None})


@expand_options
def evaluate_formats(
    model_options: EvaluatedModel,
    sample_options: SampleOptions,
    files: OutputFiles,
    text: Annotated[
        Path | None,
        Option(help="Text file to evaluate on; default: files of Python's standard library."),
    ] = None,
    formats: Annotated[str, Option(help="Comma-separated specs.")] = DEFAULT_FORMATS,
    json: options.Json = False,
) -> None:
    """Measure what each format changes, and its bytes."""
    files.check()
    requested = split_specs(formats)
    for spec in requested:
        check_spec_or_auto(spec)
    evaluation_text = None if text is None else read_text(text, "--text")
    loaded, tokenizer = model_options.load()
    from kvant.eval import EvaluationSettings, evaluate
    from kvant.hf import attach

    attach(loaded)  # some attention modules read compressed rows only when attached
    chosen = _resolve_autos(loaded, tokenizer, requested, quiet=json)
    specs = {spec: spec for spec in (chosen.get(spec, spec) for spec in requested)}
    sample = sample_options.sample
    settings = EvaluationSettings(**sample._asdict()).limit_context(loaded)
    settings = replace(settings, continued=min(settings.continued, settings.context // 2))
    report = EvaluationReport(
        loaded,
        {
            "model": model_options.model or "the model inside",
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "tokens": sample.tokens,
            "context": settings.context,
            "prompts": sample.prompts,
            "auto": chosen,
        },
        [*specs],
        files,
        is_quick=sample_options.quick,
        is_json=json,
    )
    try:
        with ProgressBar("measuring", quiet=json) as bar:
            evaluate(
                loaded,
                tokenizer,
                specs,
                text=evaluation_text,
                settings=settings,
                save=files.save,
                progress=bar.update,
                on_format=lambda result: report.add(result, bar),
            )
    except KeyboardInterrupt:
        report.finish()
        print_note(f"interrupted: {report.describe_progress()}")
        raise SystemExit(INTERRUPTED_CODE) from None
    except Exception:
        if report.results:
            report.finish()
            print_note(f"stopped: {report.describe_progress()}")
        raise
    report.finish()


def _resolve_autos(
    model: Any, tokenizer: Any, requested: list[str], *, quiet: bool
) -> dict[str, str]:
    """Return what each `auto` stands for, and print it."""
    autos = [spec for spec in requested if is_auto(spec)]
    if not autos:
        return {}
    from kvant.probing import make_trial, resolve_auto

    trial = make_trial(model, tokenizer)
    with ProgressBar("testing formats", quiet=quiet) as bar:
        chosen = {spec: str(resolve_auto(model, spec, trial, bar.update)) for spec in autos}
    for spec, choice in chosen.items():
        if not quiet:
            print_line(f"{spec}: {choice}")
    return chosen
