"""A runner without a model. What is in its cache are token ids, and the next token is a function of those before it.

Pages, tables and records are those of real runners, so that a token is right only if every row was where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from shaderlm.engine import LanguageModel
from shaderlm.engine.report import LoadReport
from shaderlm.graph.batch import LAST, PAGE, RUN
from shaderlm.runtime.adjusted import Logprobs
from shaderlm.runtime.pages import MAX_SEQUENCES, KvSequence, Reserved
from shaderlm.runtime.runner import U32, DecodeBatch, Runner, SequenceChunk, StepResult, Tokens
from shaderlm.runtime.sampler_settings import SamplerSettings
from shaderlm.text import Tokenizer, Vocabulary

from .tiny_models import tiny_metadata

NextToken = Callable[[Sequence[int]], int]


def hashed(vocabulary: int) -> NextToken:
    """A next token that depends on every token before it, and on their order."""

    def token(ids: Sequence[int]) -> int:
        found = 17
        for i in ids:
            found = (found * 31 + i + 1) % 1_000_003
        return found % vocabulary

    return token


def continued(ids: Sequence[int], token: NextToken, count: int) -> list[int]:
    """What a prompt is followed by."""
    found = list(ids)
    for _ in range(count):
        found.append(token(found))
    return found[len(ids) :]


class FakeTokens(Tokens):
    """The tokens of a step, under way; what became of them is kept."""

    def __init__(self, runner: FakeRunner, tokens: U32) -> None:
        self._runner, self._tokens, self.fates = runner, tokens, runner.fates
        self.number = len(self.fates)
        self.fates.append("pending")

    def wait(self) -> U32:
        if self.fates[self.number] == "pending":
            self._runner.awaited(self)
            self.fates[self.number] = "read"
        return self._tokens

    def logprobs(self, slot: int) -> Logprobs | None:
        return -1.0, [(int(self._tokens[slot]), -1.0)]

    def __del__(self) -> None:
        if self.fates[self.number] == "pending":
            self.fates[self.number] = "discarded"


class _Prefix(Sequence[int]):
    """The tokens of a sequence as attention would find them, by the page table."""

    def __init__(self, runner: FakeRunner, pages: int, length: int) -> None:
        self._memory, self._tables, self._pages, self._length = runner.memory, runner.tables, pages, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        position = range(self._length)[index]
        return self._memory[self._tables[self._pages + position // PAGE] * PAGE + position % PAGE]

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self._length, PAGE):
            page = self._tables[self._pages + first // PAGE] * PAGE
            yield from self._memory[page : page + min(PAGE, self._length - first)]


class FakeRunner(Runner):
    """Stands for a model on a device."""

    max_outputs = 16
    max_pages = 1 << 20

    def __init__(
        self, token: NextToken, vocabulary: int, *, ahead: int = 2, context: int = 1 << 20, max_tokens: int = 64
    ) -> None:
        config: Any = SimpleNamespace(context=context, vocabulary=vocabulary, hidden=0, recurrent=False)
        super().__init__(None, config, None, None)  # type: ignore[arg-type]
        self.token, self.max_tokens = token, max_tokens
        self.steps_ahead = self.steps_ahead_alone = ahead
        self.decode_rows = 1
        self.memory: list[int] = []  # [rows of the pool]: the ids
        self.tables: dict[int, int] = {}
        self.last = np.zeros(MAX_SEQUENCES, np.uint32)
        self.fates: list[str] = []
        self.steps: list[list[int]] = []  # rows of each part of each step

    def awaited(self, tokens: FakeTokens) -> object:
        """Called when somebody waits for tokens; a test may replace it."""

    @property
    def page_bytes(self) -> int:
        return PAGE

    @property
    def page_tensors(self) -> tuple[tuple[str, int], ...]:
        return (("ids", 8 * PAGE),)

    @property
    def state_tensors(self) -> tuple[tuple[str, int], ...]:
        return ()

    def read_state(self, row: int, tensors: Any) -> Any:
        raise NotImplementedError

    def write_state(self, row: int, tensors: Any, contents: Any) -> Any:
        raise NotImplementedError

    def read_pages(self, pages: Sequence[int]) -> Any:
        with self.lock:
            ids = [self.memory[page * PAGE : (page + 1) * PAGE] for page in pages]
        return lambda: [np.array(ids, np.int64).view(np.uint8)]

    def write_pages(self, pages: Sequence[int], contents: Sequence[Any]) -> Any:
        with self.lock:
            for page, ids in zip(pages, contents[0].view(np.int64).tolist(), strict=True):
                self.memory[page * PAGE : (page + 1) * PAGE] = ids
        return lambda: None

    def _write_counts(self, slot: int, counts: U32) -> None:
        pass

    def _grow(self, pages: int) -> None:
        self.memory += [-1] * (pages * PAGE - len(self.memory))
        self.pool.grow(pages)

    def _apply(self, changed: Sequence[Reserved]) -> None:
        for reserved in changed:
            for source, target in reserved.copies:
                self.memory[target * PAGE : (target + 1) * PAGE] = self.memory[source * PAGE : (source + 1) * PAGE]
            self.tables.update(reserved.entries)

    def _grow_states(self, rows: int) -> None:
        raise AssertionError("this model keeps no states")

    def _copy_state(self, source: int, target: int) -> None:
        raise AssertionError("this model keeps no states")

    def _write_table(self, index: int, word: int) -> None:
        raise AssertionError("this model keeps no states")

    def _reserve_positions(self, positions: int) -> None:
        pass

    def _run(self, records: U32, outputs: Any, keys: int, parts: Sequence[SequenceChunk]) -> StepResult:
        self.steps.append([part.rows for part in parts])
        for token, _, slot, _ in records.tolist():
            self.memory[slot] = int(self.last[token - LAST]) if token >= LAST else token
        self.last = self.last.copy()
        states, likely = [], np.zeros((len(outputs), self.config.vocabulary), np.float32)
        for row, output in enumerate(outputs):
            _, position, _, pages = records[output["row"]].tolist()
            ids = _Prefix(self, pages & ~RUN, position + 1)
            self.last[output["slot"]] = token = self.token(ids)
            likely[row, token] = 1
            states.append([float(len(ids)), float(ids[-1])])
        given = {part.gives for part in parts}
        hidden = (lambda: np.array(states, np.float32)) if "hidden" in given else None
        logits = (lambda: likely) if given & {"logits", "all logits"} else None
        return StepResult(FakeTokens(self, self.last) if given & {"token", "tokens"} else None, logits, hidden)

    def decode(self, sequences: Sequence[KvSequence]) -> FakeTokens:
        """The same for the last tokens of sequences, in few lines: what a generation costs beside it is measured."""
        with self.lock:
            self._check_open()
            if ending := [(each, 2) for each in sequences if each.length + 2 > len(each.pages) * PAGE]:
                self._reserve(ending)
            self.steps.append([1] * len(sequences))
            last = self.last.copy()
            for each in sequences:
                self._check_not_freed(each)
                page, place = divmod(each.length, PAGE)
                self.memory[each.pages[page] * PAGE + place] = int(self.last[each.slot])
                each.length += 1
                last[each.slot] = self.token(_Prefix(self, self.pool.table_index(each), each.length))
            self.last = last
            return FakeTokens(self, last)

    def decode_batch(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> DecodeBatch:
        return _Decode(self, sequences, settings)

    def close(self) -> None:
        self.closed = True

    def report(self) -> Mapping[str, Any]:
        return {}


class _Decode(DecodeBatch):
    def __init__(self, runner: FakeRunner, *given: Any) -> None:
        self._runner = runner
        self.replace(*given)

    def replace(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> None:
        assert all(how.penalizes <= each.has_history for each, how in zip(sequences, settings, strict=True))
        self._sequences = list(sequences)

    def step(self) -> FakeTokens:
        return self._runner.decode(self._sequences)

    def close(self) -> None:
        pass


def model_of(runner: FakeRunner, tokenizer: Tokenizer) -> LanguageModel:
    """A model with this runner."""
    sizes: Any = dict.fromkeys(("file_bytes", "parameters", "weight_bytes", "seconds"), 0)
    words: Any = dict.fromkeys(("name", "architecture", "device", "cache", "precision"), "fake")
    report = LoadReport(path=Path("fake"), context=runner.config.context, types={}, **sizes, **words)
    return LanguageModel(runner, tokenizer, report)


def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of the tiny models."""
    return Tokenizer(Vocabulary.from_metadata(tiny_metadata()))


def fake_model(text: str, *, ahead: int = 2, tokenizer: Tokenizer | None = None) -> tuple[LanguageModel, FakeRunner]:
    """A model that generates this text again and again, after prompts of one token."""
    tokenizer = tokenizer or tiny_tokenizer()
    ids = tokenizer.encode(text)
    runner = FakeRunner(lambda known: ids[(len(known) - 1) % len(ids)], len(tokenizer.vocabulary.tokens), ahead=ahead)
    return model_of(runner, tokenizer), runner
