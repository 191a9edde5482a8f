"""Find the images of a prompt among its tokens.

    tokens     a  b  <start> <image> <image> <image> <end>  c      placeholders have one token id
    features                    0       1       2                  rows of the image's features
    prefix     a  b  <start>  #1f..   #e2..   #77..  <end>  c      hashes of the image

Cached prefixes are found by the last line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import shake_256

import numpy as np
from torch import Tensor

from kvant.errors import PromptError
from kvant.page_table import Ints
from kvant.vision.processing import ProcessedImage

FIRST_IMAGE_HASH = 1 << 62  # hashes of images have 63 bits


@dataclass(frozen=True, eq=False)
class LocatedImage:
    """An image of a prompt, and the indices of the tokens that its features replace."""

    image: ProcessedImage
    indices: Ints

    @property
    def begin(self) -> int:
        return int(self.indices[0])

    @property
    def end(self) -> int:
        return int(self.indices[-1]) + 1

    def find_rows(self, begin: int, end: int) -> range:
        """Return the rows of the features that the tokens from `begin` to `end` need."""
        first, last = np.searchsorted(self.indices, [begin, end])
        return range(int(first), int(last))


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """The images of a prompt, and the positions of its tokens; the default is a prompt of text."""

    images: tuple[LocatedImage, ...] = ()
    positions: Tensor | None = None  # [axes, tokens] if they have several axes, else None
    position_offset: int = 0  # position minus index of every token after the prompt
    is_bidirectional: bool = False  # whether the tokens of an image see each other

    @cached_property
    def num_image_tokens(self) -> int:
        """Tokens of all different images."""
        images = {located.image.digest: located.image for located in self.images}
        return sum(image.num_tokens for image in images.values())

    def make_prefix_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the first tokens with each placeholder replaced by a hash of its image.

        Hashes begin at `FIRST_IMAGE_HASH`, so they equal no token. Those of equal images are equal.
        """
        if not self.images:
            return tokens
        prefix = list(tokens)
        for located in self.images:
            rows = located.find_rows(0, len(prefix))
            digest = shake_256(located.image.digest).digest(8 * len(rows))
            hashes = FIRST_IMAGE_HASH + (np.frombuffer(digest, "<u8") >> 2).astype(np.int64)
            for index, value in zip(located.indices.tolist(), hashes.tolist(), strict=False):
                prefix[index] = value
        return prefix

    def clip_length(self, length: int) -> int:
        """Return the longest length <= `length` at which a chunk or a prefix may end.

        If the tokens of an image see each other, they are computed in one forward.
        """
        return next((i.begin for i in self._indivisible if i.begin < length < i.end), length)

    def find_resumable(self, length: int, find: Callable[[int], int]) -> int:
        """Return the longest length <= `length` that a cache can be cut to, between images.

        `find` returns the longest length of the cache up to its argument, and `length` is one.
        """
        while (end := self.clip_length(length)) < length:
            length = find(end)
        return length

    def fit_chunk_end(self, begin: int, end: int) -> int:
        """Move the end of a chunk so that it splits no image whose tokens see each other."""
        clipped = self.clip_length(end)
        if clipped > begin:
            return clipped
        return next((i.end for i in self._indivisible if i.begin < end < i.end), end)

    @property
    def _indivisible(self) -> tuple[LocatedImage, ...]:
        return self.images if self.is_bidirectional else ()

    def list_images(self, begin: int, end: int) -> list[LocatedImage]:
        """Return the images with tokens from `begin` to `end`."""
        return [image for image in self.images if image.begin < end and begin < image.end]


NO_IMAGES = ImageLayout()


def locate_images(
    tokens: Sequence[int], images: Sequence[ProcessedImage], image_tokens: Collection[int]
) -> tuple[LocatedImage, ...]:
    """Find the placeholders of each image among the tokens of a prompt."""
    if not images:
        return ()
    indices = np.flatnonzero(np.isin(np.asarray(tokens), list(image_tokens)))
    ends = np.cumsum([image.num_tokens for image in images])
    if len(indices) != ends[-1]:
        raise PromptError(
            f"{len(images)} images of {ends[-1]} tokens, but the prompt has {len(indices)} tokens "
            "of images: text must not contain them"
        )
    pieces = np.split(indices, ends[:-1])
    return tuple(LocatedImage(*pair) for pair in zip(images, pieces, strict=True))
