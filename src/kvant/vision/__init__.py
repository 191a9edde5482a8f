"""Images in prompts: read image files, process them, and feed their features to a model."""

from kvant.vision.image_file import ImageSource, read_data_url, read_image
from kvant.vision.model import (
    NO_FEATURES,
    VISION_FAMILIES,
    ChunkInputs,
    ImageFeatures,
    VisionModel,
    describe_missing_images,
    split_processor,
)
from kvant.vision.processing import ImageProcessor, ProcessedImage
from kvant.vision.prompt import NO_IMAGES, ImageLayout, LocatedImage

__all__ = [
    "NO_FEATURES",
    "NO_IMAGES",
    "VISION_FAMILIES",
    "ChunkInputs",
    "ImageFeatures",
    "ImageLayout",
    "ImageProcessor",
    "ImageSource",
    "LocatedImage",
    "ProcessedImage",
    "VisionModel",
    "describe_missing_images",
    "read_data_url",
    "read_image",
    "split_processor",
]
