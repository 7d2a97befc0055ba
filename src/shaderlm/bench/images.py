"""How fast a model reads pictures: from pixels to features, and from a request with a picture to its first token.

Pictures are random pixels, each one different, so that no cache knows them. Nothing is decoded: files differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ..engine.language_model import LanguageModel
from ..engine.request import Request
from ..engine.vision import MAX_IMAGES, MAX_REQUEST_PIXELS, Vision
from ..errors import InputError
from ..vision import MAX_PIXELS, Picture, open_picture
from .speed import warm_up

_QUESTION = "\nWhat is in the picture?"


@dataclass(frozen=True)
class ImageTrial:
    """Pictures of one size, `parallel` of them at once."""

    width: int
    height: int
    parallel: int = 1

    @property
    def name(self) -> str:
        """1024 × 1024; with × 8 for eight pictures at once."""
        return f"{self.width} × {self.height}" + (f" × {self.parallel}" if self.parallel > 1 else "")


@dataclass(frozen=True)
class ImageSample:
    """What a repetition took, in nanoseconds: of each picture, and the mean over requests until the first token."""

    tokens: int  # of a picture
    encode_ns: int
    first_token_ns: int


def check(test: ImageTrial) -> None:
    """The pictures must be what a model may be given, before one is loaded."""
    pixels = test.width * test.height
    if not pixels or pixels > MAX_PIXELS:
        most = f"{MAX_PIXELS // 1_000_000} megapixels"
        raise InputError(f"--image {test.width}x{test.height}: a picture has one pixel at least and {most} at most")
    if not 1 <= test.parallel <= MAX_IMAGES or test.parallel * pixels > MAX_REQUEST_PIXELS:
        most = f"1 to {MAX_IMAGES} pictures at once, of {MAX_REQUEST_PIXELS // 1_000_000} megapixels together"
        raise InputError(f"--image {test.width}x{test.height} --parallel {test.parallel}: there may be {most}")


def run(model: LanguageModel, test: ImageTrial, repetitions: int, warmup: bool = True) -> Iterator[list[ImageSample]]:
    """The repetitions so far: none when the warm-up is over, then after each repetition."""
    vision = model.vision
    if vision is None:
        raise InputError(f"{model.report.name} does not read images, so --image has nothing to measure")
    generator = np.random.default_rng(1)
    if warmup:
        warm_up(model.runner, lambda: _once(model, vision, test, generator).first_token_ns)
        yield []
    samples: list[ImageSample] = []
    for _ in range(repetitions):
        samples.append(_once(model, vision, test, generator))
        yield samples


def _once(model: LanguageModel, vision: Vision, test: ImageTrial, generator: np.random.Generator) -> ImageSample:
    arrays = [generator.integers(0, 256, (test.height, test.width, 3), np.uint8) for _ in range(test.parallel)]
    layout = vision.processor.layout(test.width, test.height)
    began = time.perf_counter()
    for pixels in arrays:
        vision.runner.encode(pixels, layout)
    vision.runner.wait()
    encode = (time.perf_counter() - began) / test.parallel
    began = time.perf_counter()
    handles = model.engine.submit_all([_request(model, vision, open_picture(pixels)) for pixels in arrays])
    for handle in handles:
        handle.result()
    first = fmean(handle.first for handle in handles) - began
    return ImageSample(layout.tokens, round(encode * 1e9), round(first * 1e9))


def _request(model: LanguageModel, vision: Vision, picture: Picture) -> Request:
    """A picture and a short text; one token."""
    text, layouts = vision.expanded(f"{vision.processor.placeholder}{_QUESTION}", [picture])
    ids = model.tokenize(text)
    images = vision.placed(ids, [picture], layouts)
    return Request(ids, max_tokens=1, keep_cache=False, output="tokens", images=images)
