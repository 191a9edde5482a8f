"""The images of a prompt: read from its messages, and encoded before the chunks that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kvant.errors import PromptError
from kvant.generation.conversation import Prompt, parse_messages
from kvant.generation.decoder import TransformersDecoder
from kvant.generation.second_pass import SecondPass
from kvant.hf import TransformersCache
from kvant.vision import (
    ImageFeatures,
    ImageLayout,
    ProcessedImage,
    VisionModel,
    describe_missing_images,
    split_processor,
)
from kvant.vision.processing import has_images, list_images


@dataclass(eq=False)
class PromptImages:
    """The images of a prompt and, once they are encoded, their features."""

    layout: ImageLayout
    vision_model: VisionModel
    features: dict[bytes, ImageFeatures] = field(default_factory=dict)  # by digest of the image

    def check_cache(self, second_pass: SecondPass | None, chunk_alignment: int | None) -> None:
        """Refuse images for a cache that cannot hold them rightly.

        `chunk_alignment` is that of exact prefixes: chunks end at its multiples.
        """
        if second_pass is not None:
            raise PromptError(
                "images with prune=kvzip: its score repeats the prompt as text; use prune=snapkv "
                "or prune=keydiff"
            )
        if chunk_alignment is not None and self.layout.is_bidirectional:
            raise PromptError(
                "images whose tokens see each other, with exact prefixes: chunks cannot end at "
                f"multiples of {chunk_alignment} within an image; use exact=False"
            )

    def find_unencoded(self, begin: int, end: int) -> ProcessedImage | None:
        """Return the first image with tokens from `begin` to `end` that is not encoded yet."""
        images = (located.image for located in self.layout.list_images(begin, end))
        return next((image for image in images if image.digest not in self.features), None)

    def encode(self, begin: int, end: int) -> None:
        """Encode the images with tokens from `begin` to `end`."""
        while (image := self.find_unencoded(begin, end)) is not None:
            self.features[image.digest] = self.vision_model.compute_features(image)

    def run_chunk(
        self, decoder: TransformersDecoder, ids: list[int], cache: TransformersCache
    ) -> Tensor:
        """Run a chunk of the prompt, whose images are encoded; return the logits after it."""
        begin = cache.length
        inputs = self.vision_model.make_chunk(self.layout, self.features, begin, begin + len(ids))
        return decoder.compute_image_logits(ids, cache, inputs)[-1]


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of prompts for a model."""

    model: Any
    vision_model: VisionModel | None  # None: the model reads text alone

    @classmethod
    def from_processor(cls, tokenizer: Any, model: Any) -> tuple[Any, ImageReader]:
        """Return the tokenizer of a processor, and a reader; a tokenizer alone reads no image."""
        tokenizer, vision_model = split_processor(tokenizer, model)
        return tokenizer, cls(model, vision_model)

    def process_images(self, prompt: Prompt, max_tokens: int | None = None) -> Prompt:
        """Return a prompt with the images of its messages processed for the model.

        Images of more than `max_tokens` tokens are refused.
        """
        messages = parse_messages(prompt)
        if messages is None or not has_images(messages.messages):
            return prompt
        if self.vision_model is None:
            raise PromptError(describe_missing_images(self.model))
        processor = self.vision_model.processor
        processed = processor.process_messages(messages.messages, max_tokens)
        return replace(messages, messages=processed)

    def locate_images(self, prompt: Prompt, tokens: Sequence[int]) -> PromptImages | None:
        """Return the images of a processed prompt that was encoded as `tokens`, if it has any."""
        messages = parse_messages(prompt)
        if self.vision_model is None or messages is None:
            return None
        located = self.vision_model.locate_images(tokens, list_images(messages.messages))
        return None if located is None else PromptImages(located, self.vision_model)
