"""Tiny random vision models of five families with their processors, and images to show them."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

PLACEHOLDERS = {"image": "<image>", "start": "<image_start>", "end": "<image_end>"}
SPECIAL = ["<pad>", "</s>", "<image>", "<image_start>", "<image_end>", "<video>", "<edge>", "<all>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NUM_LAYERS = 3
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


class TinyVision(NamedTuple):
    """A model and its processor."""

    model: Any
    processor: Any


def make_tokenizer(image_text: str = "<image>") -> Any:
    """Make a tokenizer of characters, whose chat template renders an image as `image_text`."""
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<image_start>",
            "eoi_token": "<image_end>",
        },
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image_text)
    return tokenizer


def make_image(seed: int, width: int = 48, height: int = 40) -> Any:
    """Make an image of random colors."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encode_image(image: Any, file_format: str = "PNG") -> bytes:
    """Return the file of an image."""
    buffer = BytesIO()
    image.save(buffer, file_format)
    return buffer.getvalue()


def _make_processor(processor_class: Any, *parts: Any, **options: Any) -> Any:
    """Make a processor without video, which needs torchvision."""

    class Processor(processor_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    Processor.__name__ = processor_class.__name__
    return Processor(*parts, **options)


def _seed(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.generation_config.eos_token_id = None
    for parameter in model.parameters():  # so that images change the logits
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.5 / parameter.shape[-1] ** 0.5).mul_(2)
    return model


def _image_tokens(tokenizer: Any) -> dict[str, int]:
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    return {
        "image_token_id": ids["<image>"],
        "video_token_id": ids["<video>"],
        "vision_start_token_id": ids["<image_start>"],
        "vision_end_token_id": ids["<image_end>"],
    }


def _build_qwen(
    model_class: Any, config_class: Any, processor_class: Any, **vision_config: Any
) -> TinyVision:
    """Make a model whose images have positions of three axes."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer("<image_start><image><image_end>")
    config = config_class(
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "hidden_size": 32,
            "out_hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "intermediate_size": 48,
            **vision_config,
        },
        **_image_tokens(tokenizer),
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=16 * 16, max_pixels=96 * 96
    )
    processor = _make_processor(processor_class, images, tokenizer, None)
    return TinyVision(_seed(model_class, config), processor)


def build_qwen2_5_vl() -> TinyVision:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
    )

    classes = Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, Qwen2_5_VLProcessor
    return _build_qwen(*classes, depth=2, window_size=16, fullatt_block_indexes=[1])


def build_qwen3_vl() -> TinyVision:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

    classes = Qwen3VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLProcessor
    return _build_qwen(
        *classes, depth=3, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]
    )


def build_gemma3() -> TinyVision:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = make_tokenizer("<image_start>")
    config = Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 48,
            "patch_size": 4,
        },
        mm_tokens_per_image=36,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    images = Gemma3ImageProcessorPil(size={"height": 48, "width": 48})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=36)
    return TinyVision(_seed(Gemma3ForConditionalGeneration, config), processor)


def build_smolvlm() -> TinyVision:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMProcessor
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer = make_tokenizer()
    config = SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        },
        scale_factor=2,
        image_token_id=tokenizer.image_token_id,
    )
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    tokenizer.fake_image_token, tokenizer.global_image_token = "<edge>", "<all>"
    numbers, processing_smolvlm.num2words = processing_smolvlm.num2words, str  # videos need it
    try:
        processor = _make_processor(SmolVLMProcessor, images, tokenizer, None, image_seq_len=16)
    finally:
        processing_smolvlm.num2words = numbers
    return TinyVision(_seed(SmolVLMForConditionalGeneration, config), processor)


def build_llava() -> TinyVision:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = make_tokenizer()
    config = LlavaConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 24,
            "patch_size": 4,
            "projection_dim": 32,
        },
        image_token_index=tokenizer.image_token_id,
        vision_feature_layer=-1,
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}
    )
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return TinyVision(_seed(LlavaForConditionalGeneration, config), processor)


FAMILIES: dict[str, Callable[[], TinyVision]] = {
    "qwen2_5_vl": build_qwen2_5_vl,
    "qwen3_vl": build_qwen3_vl,
    "gemma3": build_gemma3,
    "smolvlm": build_smolvlm,
    "llava": build_llava,
}
