"""The base of request bodies, and the parts of a message: text and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_FIELDS = 64


def check_num_fields(limit: int, value: Any) -> Any:
    """Limit the fields of a mapping, before its values are validated."""
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"{len(value)} fields: at most {limit} are allowed")
    return value


class RequestBody(BaseModel):
    """Base of all request bodies: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        return check_num_fields(MAX_FIELDS, value)


class TextPart(RequestBody):
    type: Literal["text"]
    text: str

    @property
    def template_dict(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImageUrl(RequestBody):
    url: str  # a data URL; no other URL is fetched
    detail: Literal["auto", "high"] | None = None  # the model's processor chooses the resolution


class ImagePart(RequestBody):
    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def template_dict(self) -> dict[str, Any]:
        return {"type": "image", "image": self.image_url.url}


MessagePart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def make_image_part(media_type: str, data: str) -> dict[str, Any]:
    """Return the part of a chat message for an image file in base64."""
    url = f"data:{media_type};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def make_parts(text: str, images: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: a text, after images if there are any."""
    return [*images, {"type": "text", "text": text}] if images else text


def join_text(content: str | list[Any] | None) -> str:
    """Return the text of a content, which is a text, a list of parts with text, or null."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
