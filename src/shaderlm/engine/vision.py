"""Images of requests: from parts of messages to tokens of a prompt, and the features of these tokens.

The thread that makes a request decodes its pictures, so that one that is damaged is an error there. The thread that
steps the engine runs the tower, a picture at a time between steps. Features are kept for those who ask again.
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from ..models.vision import FAMILIES
from ..runtime.image_rows import Features, PlacedImage
from ..runtime.tower import TowerRunner
from ..text import Tokenizer
from ..vision import Layout, Picture, open_picture

FEATURE_BYTES = 256 << 20  # of features that are kept for pictures that are asked about again
MAX_IMAGES = 64  # of a request
MAX_REQUEST_PIXELS = 200_000_000  # of all of its pictures
_PART = '{"type": "image", "image": …} or {"type": "image_url", "image_url": {"url": "data:…"}}'
# Tokens that stand for images in any family: without an image they mean nothing.
PLACEHOLDERS = frozenset(family.token for family in FAMILIES.values()) | {"<|video_pad|>", "[IMG]", "<|image|>"}


@dataclass(frozen=True)
class RequestImage:
    """A picture in a prompt, and the positions of its tokens, which rise."""

    picture: Picture
    layout: Layout
    positions: NDArray[np.int64]

    @property
    def placed(self) -> PlacedImage:
        """For the runner."""
        return PlacedImage(self.picture.key, self.positions, self.layout.grid)


class Vision:
    """The tower of a model, and what its prompts have in place of pictures."""

    def __init__(self, runner: TowerRunner, tokenizer: Tokenizer) -> None:
        self.runner, self._tokenizer = runner, tokenizer
        self.processor = runner.tower.processor
        special = tokenizer.special_tokens
        if self.processor.token not in special:
            raise ModelError(f"the vocabulary has no token {self.processor.token!r}, which stands for images")
        self.token: int = special[self.processor.token]
        self._features: OrderedDict[tuple[Hashable, bytes], Features] = OrderedDict()  # the longest unused first
        self._bytes = 0
        self._lock = Lock()

    # Prompts ---------------------------------------------------------------------------------------------

    def expanded(self, text: str, pictures: Sequence[Picture]) -> tuple[str, list[Layout]]:
        """The text of a prompt with the tokens of pictures where the chat template has their places."""
        layouts = [self.processor.layout(picture.width, picture.height) for picture in pictures]
        parts = text.split(self.processor.placeholder)
        if len(parts) != 1 + len(pictures):
            places = f"{len(parts) - 1} place{'' if len(parts) == 2 else 's'} for images ({self.processor.placeholder})"
            raise InputError(f"the prompt has {places}, and there are {len(pictures)} pictures")
        texts = [self.processor.text(layout) for layout in layouts]
        return parts[0] + "".join(map("".join, zip(texts, parts[1:], strict=True))), layouts

    def placed(
        self, ids: Sequence[int], pictures: Sequence[Picture], layouts: Sequence[Layout]
    ) -> tuple[RequestImage, ...]:
        """Which tokens of a prompt are whose."""
        positions = np.flatnonzero(np.asarray(ids) == self.token)
        wanted = sum(layout.tokens for layout in layouts)
        if len(positions) != wanted:
            raise InputError(f"the prompt has {len(positions)} tokens of images, its pictures have {wanted}")
        images, first = [], 0
        for picture, layout in zip(pictures, layouts, strict=True):
            images.append(RequestImage(picture, layout, positions[first : first + layout.tokens]))
            first += layout.tokens
        return tuple(images)

    def decode(self, pictures: Sequence[Picture], client: Hashable) -> None:
        """Pixels of pictures whose features are not known. One that cannot be decoded is an InputError."""
        if len(pictures) > MAX_IMAGES:
            raise InputError(f"a request may have {MAX_IMAGES} images, got {len(pictures)}")
        new = [picture for picture in pictures if not self.knows(picture, client)]
        pixels = sum(picture.width * picture.height for picture in new)
        if pixels > MAX_REQUEST_PIXELS:
            most = f"{MAX_REQUEST_PIXELS // 1_000_000} megapixels"
            raise InputError(f"the pictures of a request may have {most} together, got {pixels / 1e6:,.0f}")
        for picture in new:
            _ = picture.pixels

    # Features --------------------------------------------------------------------------------------------

    def knows(self, picture: Picture, client: Hashable) -> bool:
        """Are the features of a picture kept for a client?"""
        return (client, picture.key) in self._features

    def features(self, image: RequestImage, client: Hashable) -> Features:
        """Of a picture. Computed once for each client, as long as they are kept."""
        key = (client, image.picture.key)
        with self._lock:
            if (known := self._features.get(key)) is not None:
                self._features.move_to_end(key)
                return known
        made = self.runner.encode(image.picture.pixels, image.layout)
        image.picture.forget_pixels()
        with self._lock:
            if key not in self._features and made.nbytes <= FEATURE_BYTES:
                self._features[key] = made
                self._bytes += made.nbytes
            while self._bytes > FEATURE_BYTES:
                _, old = self._features.popitem(last=False)
                self._bytes -= old.nbytes
        return made

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            self._features.clear()
            self._bytes = 0
        self.runner.close()


def placeholder_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens of a vocabulary that stand for images."""
    special = tokenizer.special_tokens
    return frozenset(special[text] for text in PLACEHOLDERS if text in special)


def check_placeholders(ids: Sequence[int], images: Sequence[RequestImage], placeholders: frozenset[int]) -> None:
    """A prompt with tokens of images that there are not is an InputError."""
    if placeholders.isdisjoint(ids):
        return
    covered = {int(position) for image in images for position in image.positions}
    missing = [i for i, token in enumerate(ids) if token in placeholders and i not in covered]
    if missing:
        raise InputError(
            f"the prompt has {len(missing)} tokens that stand for images (the first is token {ids[missing[0]]} at "
            f"position {missing[0]}), and no image for them. Give images in messages: chat, a part {_PART}"
        )


# Messages ------------------------------------------------------------------------------------------------


def pictures_of(messages: Any) -> tuple[Any, list[Picture]]:
    """Messages with {"type": "image"} in place of every image, and the pictures in order.

    Whatever else is no message is left to the chat template, which says so.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return messages, []
    pictures: list[Picture] = []
    changed = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)) and any(map(_is_image, content)):
            parts = []
            for part in content:
                if _is_image(part):
                    pictures.append(open_picture(_source(part)))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        changed.append(message)
    return (changed, pictures) if pictures else (messages, [])


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def _source(part: Mapping[str, Any]) -> Any:
    """What a part of a message gives as an image."""
    kind = part["type"]
    source = part.get("image") if kind == "image" else part.get("image_url")
    if isinstance(source, Mapping):
        source = source.get("url")
    if kind != "image" and not (isinstance(source, str) and source[:5].lower() == "data:"):
        raise InputError(f"an image_url must be a data URL, got {reprlib.repr(source)}")
    if source is None:
        raise InputError(f"a part of a message with an image must be {_PART}, got {reprlib.repr(dict(part))}")
    return source
