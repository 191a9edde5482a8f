"""The image side of a vision model: features, positions, and the inputs of a forward.

transformers' models read features that were computed before, as `mm_encoder_outputs`. So an image
is encoded once, and its tokens may be prefilled in several chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from kvant.errors import PromptError
from kvant.vision.processing import ImageProcessor, ProcessedImage
from kvant.vision.prompt import ImageLayout, locate_images


@dataclass(frozen=True)
class VisionFamily:
    """What differs between models of one type."""

    num_axes: int = 1  # of positions: time, height and width, or one
    is_bidirectional: bool = False  # whether the tokens of an image see each other
    batches_features: bool = False  # features are [images, tokens, width], not a list
    adds_to_layers: bool = False  # features are also added after the first layers (DeepStack)


VISION_FAMILIES: Mapping[str, VisionFamily] = {  # by model type
    "gemma3": VisionFamily(is_bidirectional=True, batches_features=True),
    "llava": VisionFamily(),
    "qwen2_5_vl": VisionFamily(num_axes=3),
    "qwen3_vl": VisionFamily(num_axes=3, adds_to_layers=True),
    "smolvlm": VisionFamily(),
}


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """The features of an image: what the text model reads in place of token embeddings."""

    tensor: Tensor  # [1 + layers, tokens, width]: embeddings, then what is added after layers

    @property
    def num_tokens(self) -> int:
        return self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


NO_FEATURES: Mapping[bytes, ImageFeatures] = MappingProxyType({})


@dataclass
class EncoderOutput(BaseModelOutputWithPooling):  # type: ignore[misc]
    """The output of an image encoder, in the form that forwards accept."""

    deepstack_features: list[list[Tensor]] | None = None


@dataclass(frozen=True, eq=False)
class ChunkInputs:
    """Inputs of a forward besides the tokens and the cache."""

    positions: Tensor  # [1, tokens] or [axes, 1, tokens]
    arguments: Mapping[str, Any]


class VisionModel:
    """The image side of a model; `ImageProcessor` prepares its images."""

    def __init__(
        self, model: PreTrainedModel, processor: ImageProcessor, family: VisionFamily
    ) -> None:
        self.processor = processor
        self.family = family
        self._model: Any = model

    def locate_images(
        self, tokens: Sequence[int], images: Sequence[ProcessedImage]
    ) -> ImageLayout | None:
        """Return the images of a prompt and its positions; None without images."""
        located = locate_images(tokens, images, self.processor.image_tokens)
        if not located:
            return None
        if self.family.num_axes == 1:
            return ImageLayout(located, is_bidirectional=self.family.is_bidirectional)
        ids = torch.tensor([list(tokens)])
        token_types = torch.isin(ids, torch.tensor(sorted(self.processor.image_tokens))).int()
        grids = torch.cat([image.inputs["image_grid_thw"] for image in images])
        positions, deltas = self._model.model.get_rope_index(
            ids, mm_token_type_ids=token_types, image_grid_thw=grids
        )
        return ImageLayout(
            located, positions[:, 0], int(deltas), is_bidirectional=self.family.is_bidirectional
        )

    @property
    def token_nbytes(self) -> int:
        """Bytes of the features of an image token."""
        config = self._model.config.get_text_config(decoder=True)
        size = self._model.dtype.itemsize
        nbytes: int = (1 + self._num_added_layers) * config.hidden_size * size
        return nbytes

    @cached_property
    def _num_added_layers(self) -> int:
        if not self.family.adds_to_layers:
            return 0
        return len(self._model.config.vision_config.deepstack_visual_indexes)

    @torch.no_grad()
    def compute_features(self, image: ProcessedImage) -> ImageFeatures:
        """Run the image encoder."""
        device = self._model.device
        inputs = {name: value.to(device) for name, value in image.inputs.items()}
        output = self._model.get_image_features(**inputs, return_dict=True)
        pooled = output.pooler_output
        embeddings = pooled.flatten(0, 1) if self.family.batches_features else torch.cat([*pooled])
        layers = output.deepstack_features if self.family.adds_to_layers else ()
        added = [torch.cat([*layer]) for layer in layers]
        tensor = torch.stack([embeddings, *added]).to(self._model.dtype)
        if tensor.shape[1] != image.num_tokens:
            raise PromptError(
                f"the model encodes an image as {tensor.shape[1]} tokens, its processor as "
                f"{image.num_tokens}: the checkpoint's processor does not fit the model"
            )
        return ImageFeatures(tensor)

    def make_chunk(
        self,
        layout: ImageLayout,
        features: Mapping[bytes, ImageFeatures],
        begin: int,
        end: int,
    ) -> ChunkInputs:
        """Return the inputs of the tokens from `begin` to `end`; `features` are by digest."""
        device = self._model.device
        positions = torch.arange(begin, end)[None] + layout.position_offset
        if layout.positions is not None:  # tokens after the prompt have one position on all axes
            num_prompt_tokens = layout.positions.shape[1]
            later = positions[:, max(0, num_prompt_tokens - begin) :]
            own = layout.positions[:, None, begin:end]
            positions = torch.cat([own, later.expand(len(own), 1, -1)], 2)
        slices = [
            features[located.image.digest].tensor[:, rows.start : rows.stop]
            for located in layout.list_images(begin, end)
            if (rows := located.find_rows(begin, end))
        ]
        arguments: dict[str, Any] = {}
        if slices:
            embeddings, *added = torch.cat(slices, 1)
            output = EncoderOutput(
                pooler_output=embeddings[None] if self.family.batches_features else [embeddings],
                deepstack_features=[[layer] for layer in added],
            )
            arguments["mm_encoder_outputs"] = {"image": output}
            if self.family.is_bidirectional:
                # By column of the cache: the mask reads them at the columns of this chunk.
                token_types = torch.zeros(1, end, dtype=torch.int64)
                for located in layout.list_images(begin, end):
                    token_types[0, located.indices] = 1
                arguments["token_type_ids"] = token_types.to(device)
        return ChunkInputs(positions.to(device), arguments)


def split_processor(tokenizer: Any, model: Any) -> tuple[Any, VisionModel | None]:
    """Return the tokenizer of a processor, and the image side of its model.

    There is none for a tokenizer alone, or a model of a type that `VISION_FAMILIES` lacks. The
    tokenizer of a checkpoint may lack the chat template, which its processor has.
    """
    if tokenizer is None:
        raise TypeError("tokenizer=None: the model's own is needed, to encode and decode text")
    if not isinstance(tokenizer, ProcessorMixin):
        return tokenizer, None
    processor: Any = tokenizer
    tokenizer = processor.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = processor.chat_template
    config = getattr(model, "config", None)  # a plain callable has none
    family = VISION_FAMILIES.get(getattr(config, "model_type", ""))
    if family is None or getattr(processor, "image_processor", None) is None:
        return tokenizer, None
    return tokenizer, VisionModel(model, ImageProcessor(processor), family)


def describe_missing_images(model: Any) -> str:
    """Return why images in a prompt of a model are refused."""
    name = type(model).__name__
    model_type = getattr(getattr(model, "config", None), "model_type", "none")
    if model_type in VISION_FAMILIES:
        return (
            f"an image for {name} without its processor: pass the checkpoint's processor in place "
            "of the tokenizer, AutoProcessor.from_pretrained(name)"
        )
    return (
        f"an image for {name}, which is of type {model_type}: images are supported for models of "
        f"type {', '.join(VISION_FAMILIES)}"
    )
