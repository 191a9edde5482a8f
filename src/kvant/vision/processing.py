"""Process the images of messages with the processor of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers import ProcessorMixin

from kvant.errors import ContextError, PromptError
from kvant.vision.image_file import (
    MAX_IMAGES,
    MAX_PIXELS,
    MAX_PROMPT_PIXELS,
    ImageSource,
    read_image,
)

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_PARTS = {"image": "image", "image_url": "image_url"}  # type of a part -> its field
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
REPLACEMENTS = "text_replacement_offsets"


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as a processor prepared it for a model."""

    placeholder: str  # of an image, in the text that a chat template renders
    text: str  # takes the place of the placeholder
    num_tokens: int  # of its features, in `text`
    digest: bytes  # of its pixels, and of what the processor made of them
    inputs: Mapping[str, Tensor]  # of the model's image encoder

    def __deepcopy__(self, memo: object) -> ProcessedImage:
        """Return a copy without its inputs, which may be large; it can be rendered."""
        return replace(self, inputs={})


class ImageProcessor:
    """The processor of a checkpoint, for the images of prompts."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self._processor: Any = processor
        self._placeholder: str = self._processor.image_token
        self.image_tokens = frozenset(self._processor.image_token_ids)

    def process_messages(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None
    ) -> list[Mapping[str, Any]]:
        """Return the messages with their images processed; the other parts stay as they are.

        Images of more than `max_tokens` tokens, or of too many pixels, are refused early.
        """
        images = [get_image(part) for part in iterate_parts(messages) if is_image_part(part)]
        if len(images) > MAX_IMAGES:
            raise PromptError(
                f"{len(images)} images in a prompt: at most {MAX_IMAGES} are allowed; drop some"
            )
        num_tokens, num_pixels, processed = 0, 0, dict[object, ProcessedImage]()
        for source in images:
            key = _make_key(source)
            if isinstance(source, ProcessedImage) or key in processed:
                continue
            image = read_image(source, min(MAX_PIXELS, MAX_PROMPT_PIXELS - num_pixels))
            num_pixels += image.width * image.height
            processed[key] = self.process(image)
            num_tokens += processed[key].num_tokens
            if max_tokens is not None and num_tokens > max_tokens:
                raise ContextError(
                    f"images of {num_tokens} tokens or more, where {max_tokens} are allowed: scale "
                    "them down, or send fewer"
                )
        return [_replace_images(message, processed) for message in messages]

    def process(self, image: Image) -> ProcessedImage:
        """Process an image in RGB."""
        try:
            outputs = self._processor(
                images=[[image]],
                text=[self._placeholder],
                return_tensors="pt",
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # a processor may raise anything
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            width, height = image.size
            raise PromptError(
                f"an image of {width} x {height} pixels: the model's processor refuses it: {reason}"
            ) from error
        (replacement,) = outputs[REPLACEMENTS][0]
        tokens = outputs["input_ids"][0].tolist()
        inputs = {
            name: value
            for name, value in outputs.items()
            if name not in {*TEXT_INPUTS, REPLACEMENTS}
        }
        return ProcessedImage(
            self._placeholder,
            replacement["replacement"],
            sum(token in self.image_tokens for token in tokens),
            _compute_digest(image, inputs),
            inputs,
        )


def _make_key(source: ImageSource) -> object:
    """Return a key of an image: equal files of one prompt are processed once."""
    return source if isinstance(source, bytes | str) else id(source)


def _replace_images(
    message: Mapping[str, Any], processed: Mapping[object, ProcessedImage]
) -> Mapping[str, Any]:
    """Return a message with its images replaced by processed ones."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple) or not any(map(is_image_part, parts)):
        return message
    content = []
    for part in parts:
        source = get_image(part) if is_image_part(part) else None
        is_new = source is not None and not isinstance(source, ProcessedImage)
        content.append({"type": "image", "image": processed[_make_key(source)]} if is_new else part)
    return {**message, "content": content}


def iterate_parts(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the parts of all messages whose content is a list."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list | tuple) for part in content]


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages have any image."""
    return any(map(is_image_part, iterate_parts(messages)))


def get_image(part: Mapping[str, Any]) -> ImageSource | ProcessedImage:
    """Return the image of a part: {"type": "image", "image": ...}, or OpenAI's image_url."""
    field = IMAGE_PARTS[part["type"]]
    source = part.get(field)
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise PromptError(f"a part of type {part['type']} without the field {field!r}")
    return source


def make_content(text: str, images: Sequence[ImageSource | ProcessedImage]) -> str | list[Any]:
    """Return the content of a message with a text, after images if there are any."""
    if not images:
        return text
    parts = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}]


def list_images(messages: Sequence[Mapping[str, Any]]) -> list[ProcessedImage]:
    """Return the processed images of messages, in order."""
    parts = filter(is_image_part, iterate_parts(messages))
    images = [get_image(part) for part in parts]
    return [image for image in images if isinstance(image, ProcessedImage)]


def expand_placeholders(text: str, images: Sequence[ProcessedImage]) -> str:
    """Replace the placeholder of each image in a rendered prompt by its text."""
    if not images:
        return text
    pieces = text.split(images[0].placeholder)
    if len(pieces) != len(images) + 1:
        raise PromptError(
            f"{len(images)} images, but the prompt has {images[0].placeholder!r} "
            f"{len(pieces) - 1} times: text must not contain it, and the model's chat template "
            "must render each image once"
        )
    expanded = [image.text + piece for image, piece in zip(images, pieces[1:], strict=True)]
    return "".join([pieces[0], *expanded])


def _compute_digest(image: Image, inputs: Mapping[str, Tensor]) -> bytes:
    hasher = blake2b(repr(image.size).encode(), digest_size=32)
    hasher.update(np.asarray(image).tobytes())
    for name, value in sorted(inputs.items()):
        hasher.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        hasher.update(value.contiguous().numpy().tobytes())
    return hasher.digest()
