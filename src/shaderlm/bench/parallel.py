"""Decoding of several sequences at once: what a server with as many users does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator

import numpy as np

from ..runtime.runner import DecodeBatch, Runner, SequenceChunk, Tokens
from ..runtime.sampler_settings import GREEDY


def decode_parallel(runner: Runner, sequences: int, tokens: int, depth: int) -> Generator[int, None, None]:
    """Nanoseconds that `tokens` tokens of each of `sequences` sequences take together, again and again.

    Every sequence begins after `depth` random tokens of its own, which are not timed; without any, after one. Close the
    generator to give the caches back.
    """
    generator = np.random.default_rng(1)

    def random(count: int) -> list[int]:
        found: list[int] = generator.integers(0, runner.config.vocabulary, count).tolist()
        return found

    users = [runner.add() for _ in range(sequences)]
    batch: DecodeBatch | None = None
    try:
        for user in users:
            ids = random(max(1, depth))
            for first in range(0, len(ids), runner.max_tokens):
                runner.step([SequenceChunk(user, ids[first : first + runner.max_tokens], "nothing")])
        while True:
            for user in users:
                # The last token of the depth is run again: its logits give the first token of this repetition.
                runner.truncate(user, max(0, depth - 1))
                runner.step([SequenceChunk(user, random(1))]).token(user).wait()
            # Kept for all repetitions, with the steps that it has recorded ahead.
            batch = batch or runner.decode_batch(users, [GREEDY] * sequences)
            start = time.perf_counter_ns()
            pending = deque[Tokens]()
            for _ in range(tokens):
                pending.append(batch.step())
                if len(pending) > runner.steps_ahead:
                    pending.popleft().wait()
            while pending:
                pending.popleft().wait()
            yield time.perf_counter_ns() - start
    finally:
        if batch is not None:
            batch.close()
        for user in users:
            runner.free(user)
