"""Options shared by several commands, and checks of their values before a model is loaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from kvant import checkpoints
from kvant.errors import CacheError, CacheFileError
from kvant.generation.settings import check_draft, load_draft
from kvant.platform.devices import check_device, check_dtype
from kvant.platform.sizes import parse_size
from kvant.recipes import RAW_WEIGHTS
from kvant.spec.language import check_spec_or_auto

if TYPE_CHECKING:  # help and mistakes are shown without torch, which takes seconds to import
    from kvant.cache.files import CacheFileHeader
    from kvant.generation.transcript import Transcript


Model = Annotated[
    str | None,
    Option(help="Folder, name on the hub, GGUF file or smollm2; default: a bundled one."),
]
Json = Annotated[bool, Option(help="Print only one JSON object.")]
Draft = Annotated[
    str | None, Option(help="Speculative decoding: ngram, or the name of a smaller model.")
]
Stats = Annotated[bool, Option(help="Print speed and memory.")]
BACKENDS = ["native", "triton", "reference", "dequantize", "interpreted"]  # of kvant.attention


@dataclass(frozen=True)
class ModelOptions:
    """Options of every command that loads a model."""

    model: Model = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False
    device: Annotated[
        str | None, Option(help="cpu, cuda, cuda:1, mps; default: a CUDA GPU if any.")
    ] = None
    dtype: Annotated[
        str, Option(help="float32, bfloat16, float16; auto: as in the checkpoint.")
    ] = "auto"
    weights: Annotated[
        str | None,
        Option(help="Round weights: affine8, affine4, or by layer: lm_head=affine8,*=affine4."),
    ] = None

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer."""
        return checkpoints.load(self.model, **self.load_options)

    def load_processor(self, model: Any, tokenizer: Any) -> Any:
        """Return the processor of the loaded model if it reads images, else its tokenizer."""
        return checkpoints.load_processor(
            self.model, model, tokenizer, trust_code=self.trust_remote_code
        )

    @property
    def load_options(self) -> dict[str, Any]:
        """Options of `checkpoints.load`, except the model."""
        return {
            "trust_code": self.trust_remote_code,
            "device": self.device,
            "dtype": self.dtype,
            "weights": self.weights,
        }


@dataclass(frozen=True)
class PackedModelOptions(ModelOptions):
    """Options of the commands that compare formats, with weights as `kvant run` has them."""

    @property
    def load_options(self) -> dict[str, Any]:
        """Options of `checkpoints.load`; weights of 16 bits are packed."""
        return super().load_options | {"weights": self.weights or RAW_WEIGHTS}


@dataclass(frozen=True)
class CacheOptions(ModelOptions):
    """Options of every command that generates text: the model, its cache and its kernels."""

    kv_cache: Annotated[
        str | None, Option(help="Cache format: affine4, raw, auto; kvant formats lists all.")
    ] = None
    max_context: Annotated[
        int | None, Option(min=2, help="Limit on the tokens of prompt and reply together.")
    ] = None
    store: Annotated[
        list[str] | None,
        Option(help="Folder or URL of a prefix store; may be repeated, nearest first."),
    ] = None
    backend: Annotated[
        str | None,
        Option(help="Attention backend: native, triton, reference; default: the fastest."),
    ] = None
    pack: Annotated[bool, Option(help="Pack 16-bit weights for faster computation on a CPU.")] = (
        True
    )
    guard: Annotated[
        bool,
        Option(help="Test the format on the model, for at most 2 s, and warn if it does harm."),
    ] = True
    draft: Draft = None

    @property
    def load_options(self) -> dict[str, Any]:
        """Options of `checkpoints.load`; weights of 16 bits are packed unless --no-pack."""
        weights = self.weights or (RAW_WEIGHTS if self.pack else None)
        return super().load_options | {"weights": weights}

    @property
    def spec(self) -> str:
        """The spec of the cache, with the default of the command."""
        return "raw" if self.kv_cache is None else self.kv_cache

    def check(self) -> None:
        """Raise an error for invalid options and missing files, without importing torch."""
        check_spec_or_auto(self.spec)
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r} is not one of {BACKENDS}")
        if self.store:
            from kvant.stores.open import check_name

            for name in self.store:
                check_name(name)
        if self.weights is not None and not self.pack:
            raise ValueError(f"--no-pack with --weights {self.weights}: drop one of them")
        check_device(self.device)
        check_dtype(self.dtype)
        checkpoints.check_checkpoint(self.model)
        check_draft(self.draft)

    def load_draft(self) -> Any:
        """Return the method of drafts, or load the draft model."""
        return load_draft(self.draft, pack=self.pack, **self.load_options)


@dataclass(frozen=True)
class EngineOptions(CacheOptions):
    """Options of the commands that run an engine: `batch` and `serve`."""

    max_bytes: Annotated[str | None, Option(help="Limit on all caches together: 8GiB.")] = None
    max_sequences: Annotated[int, Option(min=1, help="Limit on concurrent sequences.")] = 16

    @property
    def spec(self) -> str:
        return "affine8" if self.kv_cache is None else self.kv_cache

    def check(self) -> None:
        if self.max_bytes is not None:
            parse_size(self.max_bytes)
        super().check()


@dataclass(frozen=True)
class ReplyOptions:
    """How many tokens a reply has, and how they are sampled."""

    max_new_tokens: Annotated[int, Option(min=1, help="Limit on generated tokens.")] = 256
    temperature: Annotated[
        float, Option(min=0.0, help="Sampling temperature; 0: always the likeliest token.")
    ] = 0.0
    top_p: Annotated[
        float | None,
        Option(help="Sample from the likeliest tokens whose probabilities sum to this."),
    ] = None
    top_k: Annotated[int | None, Option(min=1, help="Sample from the K likeliest tokens.")] = None
    min_p: Annotated[
        float | None,
        Option(help="Minimum probability, as a fraction of the likeliest token's."),
    ] = None
    seed: Annotated[int | None, Option(help="Seed of sampling; the same seed repeats a reply.")] = (
        None
    )


@dataclass(frozen=True)
class SendOptions(ReplyOptions):
    """The options of `Session.send`."""

    repetition_penalty: Annotated[
        float, Option(help="Above 1: make tokens of the prompt and the reply less likely.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Option(help="Subtracted once from the logit of each token in the reply.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="Subtracted from a token's logit for each occurrence in the reply.")
    ] = 0.0
    stop: Annotated[list[str] | None, Option(help="Text to stop before; may be repeated.")] = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Session.send`."""
        return asdict(self) | {"stop": tuple(self.stop or ())}


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is a class of options by an option per field.

    Typer reads the options of a command from its signature.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += _list_parameters(groups[name])
        else:
            annotated = parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
            parameters.append(annotated)

    @wraps(command)
    def run(**values: Any) -> None:
        arguments = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**arguments, **values)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _list_parameters(group: Any) -> list[Parameter]:
    """Return a parameter per field of a class of options."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


RowShape = tuple[int, int]  # number of key heads, head dimension


def check_readable(path: Path, flag: str) -> None:
    if not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file")


def read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} cannot be read: it is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def check_text(text: str, source: str) -> str:
    """Return text, or raise an error if it has lone surrogates, which tokenizers reject.

    Python decodes invalid UTF-8 of arguments and standard input to lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{source} is not UTF-8 text") from None
    return text


def check_send_options(send_options: Mapping[str, Any], max_context: int | None) -> None:
    """Raise an error for invalid sampling options or stop conditions."""
    from kvant.generation.settings import Sampling, StopConditions

    sampling = dict(send_options)
    stop = {"max_new_tokens": sampling.pop("max_new_tokens"), "stop": sampling.pop("stop")}
    Sampling(**sampling)
    StopConditions(**stop, max_context=max_context)


def check_transcript(path: Path, model: str | None) -> Transcript:
    """Read the transcript of a saved conversation, and compare its row shapes with the model's.

    Shapes are compared only if the model's configuration is a local file. Whether the weights are
    the same is checked after loading them.
    """
    check_readable(path, "--load")
    from kvant.cache.files import read_header
    from kvant.generation.transcript import Transcript

    head = read_header(path)
    transcript = Transcript.from_header(path, head.about)
    file_shapes, model_shapes = _read_row_shapes(head), _read_model_row_shapes(model)
    # The cache of a text of one token has no rows yet.
    if model_shapes is not None and file_shapes and file_shapes != model_shapes:
        raise CacheFileError(
            f"--load {path}: a conversation with another model: the file has "
            f"{_format_row_shapes(file_shapes)}, --model has {_format_row_shapes(model_shapes)}"
        )
    return transcript


def _read_row_shapes(head: CacheFileHeader) -> list[RowShape]:
    """Return the row shapes of the layers that store rows, from the header of a file."""
    return [
        (head.count_key_heads(name), tensor.shape[2])
        for index in range(len(head.spec.layers))
        for name, tensor in head.tensors.items()
        if name.startswith(f"{index}/") and name.endswith("keys.open")
    ]


def _read_model_row_shapes(model: str | None) -> list[RowShape] | None:
    """Return the row shapes of a model from its local config.json, None if that is not enough."""
    from kvant.checkpoints import find_config_file
    from kvant.models import layer_shapes

    file = find_config_file(model)
    try:
        config = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        layers = None if config is None else layer_shapes(config)
    # Loading the model reports these errors, or succeeds.
    except (CacheError, OSError, ValueError, RecursionError):
        return None
    if layers is None:
        return None
    return [(layer.num_heads, layer.key_dim) for layer in layers if layer.attends]


def _format_row_shapes(shapes: Iterable[RowShape]) -> str:
    """Format row shapes by count: 28 layers of 8 heads of 128."""
    counts = Counter(shapes)
    parts = [f"{count} layers of {heads} heads of {dim}" for (heads, dim), count in counts.items()]
    return " and ".join(parts) or "no rows"
