"""Masks of constrained sequences, and what threads do that compute them while the engine steps the others.

A mask of llguidance takes 10 µs or several ms, and Python runs other threads meanwhile. These threads know neither the
engine nor its requests: they do not keep a model that nobody refers to.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import NamedTuple

from ..runtime.adjusted import check_settings
from ..runtime.sampler_settings import SamplerSettings
from .request import Constraint

IN_PLACE_SECONDS = 100e-6  # a mask that takes less holds nobody up; another thread would take longer to begin with it
_INTERPRETER_SECONDS = 0.02  # for which a thread may wait until Python lets it go on


class Mask(NamedTuple):
    """What became of a mask: settings that have it, None where nothing may follow, or an error."""

    number: int  # of the request
    settings: SamplerSettings | None
    seconds: float = 0.0  # that whoever steps is held up; of another thread, would be as far as is known
    error: BaseException | None = None


class MaskJob(NamedTuple):
    """A mask to be computed. Meanwhile nobody else uses the constraint."""

    number: int  # of the request
    constraint: Constraint
    settings: SamplerSettings
    vocabulary: int


def computed(job: MaskJob, *, in_place: bool) -> Mask:
    """The mask of the next token. Whatever a constraint raises is of its request alone."""
    number, settings = job.number, job.settings
    began, worked = time.perf_counter(), time.thread_time()
    try:
        mask = job.constraint.mask()
        worked, seconds = time.thread_time() - worked, time.perf_counter() - began
        if not in_place:  # while other threads run, unless it is for so long that the mask itself must have waited
            seconds = max(worked, seconds - _INTERPRETER_SECONDS)
        if mask is None:
            return Mask(number, None, seconds)
        settings = settings._replace(mask=mask)
        check_settings(settings, job.vocabulary, has_history=True)
    except Exception as problem:
        return Mask(number, None, error=problem)
    return Mask(number, settings, seconds)


def run_jobs(jobs: SimpleQueue[MaskJob | None], done: SimpleQueue[Mask | None], dropped: set[int]) -> None:
    """What a thread does until it takes None. `dropped`: numbers of requests that are over."""
    while (job := jobs.get()) is not None:
        try:
            mask = Mask(job.number, None) if job.number in dropped else computed(job, in_place=False)
        except BaseException as problem:
            mask = Mask(job.number, None, error=problem)
        done.put(mask)
        del job, mask
