"""Several rows of a sequence that each give a token: those of decoding one by one, where the rows before were right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shaderlm.engine.sampling import settings_of
from shaderlm.errors import InputError
from shaderlm.graph.batch import PAGE, RUN_ROWS
from shaderlm.runtime.runner import Runner, SequenceChunk
from shaderlm.runtime.sampler_settings import SamplerSettings

from .runners import runner_of
from .test_adjusted import CONTEXT, ROWS, Reported, alone, assert_same
from .test_batches import random_ids
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0, batches")


@pytest.fixture(scope="module", params=["cpu", "software", pytest.param("gpu", marks=pytest.mark.long)])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A tiny model in NumPy and on the adapter. Deterministic: the bits of a row are those that it has alone."""
    path = write_tiny_llama(tmp_path_factory.mktemp("drafted") / "tiny.gguf", kind="q8_0", layers=1, context=CONTEXT)
    fixture = {"software": "device", "gpu": "gpu"}.get(request.param)
    device = None if fixture is None else request.getfixturevalue(fixture)
    made = runner_of(path, device, cache="f32", deterministic=True)
    made.decode_rows = 16
    yield made
    made.close()


def verified(
    runner: Runner, requests: list[tuple[list[int], list[int], SamplerSettings]], known: int
) -> list[list[Reported]]:
    """What rows give of these sequences, after prompts and so many tokens that follow them: one step runs the rest."""
    chunks, sequences = list[SequenceChunk](), [runner.add() for _ in requests]
    for sequence, (ids, following, how) in zip(sequences, requests, strict=True):
        runner.feed(sequence, ids)  # the rows that decoding would run come after it
        for token in following[: known - 1]:
            runner.step([SequenceChunk(sequence, [token], "nothing")])
        drafts, places = following[known:], runner.pool.unused_slots(100)[sum(len(c.places) for c in chunks) :]
        if how.penalizes:
            runner.set_history(sequence, [*ids, *following[:known]])
        later = [how._replace(recent=tuple(drafts[: i + 1])) for i in range(len(drafts))]
        rows = following[known - 1 :]
        chunks.append(SequenceChunk(sequence, rows, "tokens", how, None, later, places[: len(drafts)]))
    tokens = runner.step(chunks).tokens
    assert tokens is not None
    words = tokens.wait()
    found = [[(int(words[slot]), tokens.logprobs(slot)) for slot in chunk.slots] for chunk in chunks]
    for chunk in chunks:
        runner.free(chunk.sequence)
    return found


@pytest.mark.parametrize("rows", [3, RUN_ROWS + 1])
def test_drafted_rows_give_what_decoding_gives(runner: Runner, rows: int) -> None:
    """Penalties count the drafts before a row; log probabilities are each row's own; across the end of a page."""
    rng, requests, expected = np.random.default_rng(rows), list[Any](), list[list[Reported]]()
    hows = [settings_of(each) for each in (ROWS[:5] if rows == 3 else ROWS[3:4])]
    for how in hows:
        ids = random_ids(rng, runner, PAGE - 3)
        found = alone(runner, ids, how, rows + 2)
        requests.append((ids, [token for token, _ in found[:-1]], how))
        expected.append(found[2:])
    for found, wanted, how in zip(verified(runner, requests, 2), expected, hows, strict=True):
        assert_same(found, wanted, str(how))


def test_rows_before_a_wrong_draft_are_right(runner: Runner) -> None:
    ids, how = random_ids(np.random.default_rng(4), runner, 9), settings_of(ROWS[3])
    found = alone(runner, ids, how, 5)
    drafts = [token for token, _ in found]
    drafts[3] = (drafts[3] + 1) % runner.config.vocabulary
    (rows,) = verified(runner, [(ids, drafts, how)], 1)
    assert_same(rows[:3], found[1:4], "up to the wrong draft")


def test_places_and_settings_are_checked(runner: Runner) -> None:
    sequence, how = runner.add(), SamplerSettings()
    for drafted, places, expected in (([], [], "settings and places"), ([how], [sequence.slot], "one place")):
        with pytest.raises(InputError, match=expected):
            runner.step([SequenceChunk(sequence, [1, 2], "tokens", how, None, drafted, places)])
    runner.free(sequence)
