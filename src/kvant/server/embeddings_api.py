"""Embeddings: OpenAI's /v1/embeddings and Ollama's /api/embed.

Both pool as the model's checkpoint declares. /api/embed always normalizes; /v1/embeddings does if
the checkpoint has a Normalize module. Clients add the checkpoint's prompts themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor
from torch.nn.functional import normalize

from kvant.checkpoints.pooling import Pooling
from kvant.server.content import RequestBody
from kvant.server.errors import BadRequest
from kvant.server.ollama_api import OllamaOptions, to_ns
from kvant.server.protocol import Prompts, TokenIds, list_prompts
from kvant.server.service import Embeddings

MAX_INPUTS = 2048
INPUT_LIST = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Text = Annotated[str, Field(min_length=1)]
Dimensions = Annotated[int | None, Field(ge=1)]


def check_inputs(value: Any) -> Any:
    """Limit a list of inputs and refuse empty ones, before their types are validated."""
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return value
    if len(value) > MAX_INPUTS:
        raise ValueError(
            f"input: {len(value)} inputs, at most {MAX_INPUTS} are allowed: split the request"
        )
    if (empty := next((i for i, item in enumerate(value) if item in ("", [])), None)) is not None:
        raise ValueError(f"input[{empty}] is empty: leave it out")
    return value


def check_any_input(value: Any) -> Any:
    """Refuse an empty input."""
    if value in ("", []):
        raise ValueError("input: it is empty: give a text, token ids, or a list of either")
    return check_inputs(value)


class EmbeddingBody(RequestBody):
    """Common fields of embedding requests."""

    dimensions: Dimensions = None

    @property
    @abstractmethod
    def inputs(self) -> Prompts:
        """The inputs as a list, also if there is only one."""

    @property
    def truncates(self) -> bool:
        """Whether a text beyond the context is cut, not refused."""
        return False

    @abstractmethod
    def make_response(self, model: str, embeddings: Embeddings) -> dict[str, Any]:
        """Return the body of the response."""

    def _shorten(self, vectors: Sequence[Tensor], pooling: Pooling) -> list[Tensor]:
        """Cut vectors to the first `dimensions`, and normalize them again where they were."""
        first = [vector[: self.dimensions] for vector in vectors]
        return [normalize(vector, dim=0) for vector in first] if pooling.normalize else first

    def check_width(self, width: int) -> None:
        """Raise for more dimensions than the model has."""
        if self.dimensions is not None and self.dimensions > width:
            message = f"dimensions={self.dimensions}: at most {width}, this model's width"
            raise BadRequest(message, "dimensions")


class OpenAIEmbeddingRequest(EmbeddingBody):
    """Body of POST /v1/embeddings."""

    model: str | None = None
    input: Annotated[
        Text | TokenIds | Annotated[list[Text], INPUT_LIST] | Annotated[list[TokenIds], INPUT_LIST],
        BeforeValidator(check_any_input),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None  # ignored

    @property
    def inputs(self) -> Prompts:
        return list_prompts(self.input)

    def make_response(self, model: str, embeddings: Embeddings) -> dict[str, Any]:
        vectors = self._shorten(embeddings.vectors, embeddings.pooling)
        encode = _encode_base64 if self.encoding_format == "base64" else Tensor.tolist
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": embeddings.num_tokens, "total_tokens": embeddings.num_tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}


def _encode_base64(vector: Tensor) -> str:
    return b64encode(vector.numpy().astype("<f4").tobytes()).decode()


class OllamaEmbedRequest(EmbeddingBody):
    """Body of POST /api/embed; clients send an empty input to load the model."""

    model: str
    input: Annotated[
        str | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True)],
        BeforeValidator(check_inputs),
    ] = ""
    truncate: bool | None = None  # default: true
    options: OllamaOptions | None = None  # ignored
    keep_alive: float | str | None = None  # ignored

    @property
    def inputs(self) -> Prompts:
        texts = [self.input] if isinstance(self.input, str) else self.input
        return [text for text in texts if text]

    @property
    def truncates(self) -> bool:
        return self.truncate is not False

    def make_response(self, model: str, embeddings: Embeddings) -> dict[str, Any]:
        pooling = Pooling(embeddings.pooling.method, normalize=True)
        return {
            "model": model,
            "embeddings": [v.tolist() for v in self._shorten(embeddings.vectors, pooling)],
            "total_duration": to_ns(embeddings.seconds),
            "load_duration": 0,
            "prompt_eval_count": embeddings.num_tokens,
        }
