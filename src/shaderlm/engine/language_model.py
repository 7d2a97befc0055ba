"""The object that users hold: a loaded model with its tokenizer. Thread-safe: one lock around the device."""

from __future__ import annotations

import operator
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from ..models.architecture import Config
from ..runtime.session import Runner, Session
from ..text import ChatTemplate, Tokenizer
from .answer import Completion, Stream
from .generate import Answer, Request
from .report import LoadReport
from .sampling import Sampling

Messages = Sequence[Mapping[str, Any]]
DEFAULT_TOKENS = 256


class LanguageModel:
    """Generates text. Use it as a context manager, or call `close()`, to give its memory back.

    Safe to use from several threads: answers that run at the same time have a cache each, and take turns.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, report: LoadReport) -> None:
        self._runner, self.tokenizer, self.report = runner, tokenizer, report
        self._lock = threading.RLock()
        self._closed = False
        self._idle: tuple[Session, list[int]] | None = None  # the last conversation, and the tokens in its cache
        vocabulary = tokenizer.vocabulary
        texts = {key: "" if i is None else vocabulary.tokens[i] for key, i in _special(tokenizer).items()}
        self._template = ChatTemplate(vocabulary.chat_template, **texts) if vocabulary.chat_template else None

    @property
    def config(self) -> Config:
        """The model's numbers."""
        return self._runner.config

    @property
    def runner(self) -> Runner:
        """The model without its text: for benchmarks."""
        return self._runner

    @property
    def has_chat_template(self) -> bool:
        """Was this model made for conversations?"""
        return self._template is not None

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int | None = None, **options: Any) -> Completion:
        """Continue a text (or token ids). Greedy unless told otherwise; the options are those of `stream`."""
        return _finished(self.stream(prompt, max_tokens=max_tokens, **options))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> Stream:
        """The same, piece by piece.

        max_tokens (default 256), stop (strings that end the answer and are left out), ignore_eos (go on past the
        model's end), and how tokens are chosen: temperature (0: greedy), top_k, top_p, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, logit_bias, seed, logprobs.
        """
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else token_ids("prompt", prompt)
        return self._start(ids, max_tokens, stop, ignore_eos, sampling, reuse=False)

    def chat(self, messages: Messages, *, max_tokens: int | None = None, **options: Any) -> Completion:
        """Answer a conversation: messages with "role" (system, user, assistant) and "content"."""
        return _finished(self.stream_chat(messages, max_tokens=max_tokens, **options))

    def stream_chat(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> Stream:
        """The same, piece by piece. What the last conversation has in common with this one is not computed again."""
        return self._start(self.chat_ids(messages), max_tokens, stop, ignore_eos, sampling, reuse=True)

    def chat_ids(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        if self._template is None:
            raise ModelError("this model has no chat template: it continues text; use generate()")
        return self.prompt_ids(self._template.render(messages))

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt: special tokens in it are read as such; BOS goes first where the model wants it."""
        ids = self.tokenizer.encode(text, parse_special=True)
        vocabulary = self.tokenizer.vocabulary
        wanted = [vocabulary.bos] if vocabulary.add_bos and vocabulary.bos is not None else []
        return ids if not wanted or ids[:1] == wanted else [*wanted, *ids]

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each of these tokens, [T, vocabulary]."""
        given = token_ids("ids", ids)
        with self._lock:
            session = self._session()
            try:
                return session.feed_all(given)
            finally:
                session.close()

    def tokenize(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a text, special tokens in it read as plain text."""
        return self.tokenizer.encode(text, add_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(token_ids("ids", ids))

    def _session(self) -> Session:
        self._open()
        return self._runner.session()

    def _start(
        self,
        ids: list[int],
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        ignore_eos: bool,
        sampling: Mapping[str, Any],
        *,
        reuse: bool,
    ) -> Stream:
        self._open()
        limit = DEFAULT_TOKENS if max_tokens is None else max_tokens
        if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)) or limit < 1:
            raise InputError(f"max_tokens must be a whole number of at least 1, got {max_tokens!r}")
        stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(stops, (list, tuple)) or any(not isinstance(text, str) for text in stops):
            raise InputError(f"stop must be a str or a list of them, got {stop!r}")
        if not ids:
            raise InputError("the prompt is empty; give at least one word")
        if len(ids) > self.config.context:
            raise InputError(
                f"the prompt has {len(ids):,} tokens, the context holds {self.config.context:,}. Shorten the "
                "prompt, or use a model with a longer context"
            )
        try:
            chosen = Sampling(**sampling)
        except TypeError as problem:
            known = ", ".join(Sampling.__dataclass_fields__)
            raise InputError(f"{str(problem).split(') ')[-1]}; options are {known}") from None
        stop_ids = frozenset[int]() if ignore_eos else self.tokenizer.stop_ids
        request = Request(ids, int(limit), chosen, stops, stop_ids, self.config.context)
        result: list[Completion] = []
        return Stream(self._pieces(request, result, reuse), result, request.closed)

    def _open(self) -> None:
        if self._closed:
            raise InputError("this model is closed; load it again")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The device to oneself, as long as the model is open."""
        with self._lock:
            self._open()
            yield

    def _pieces(self, request: Request, result: list[Completion], reuse: bool) -> Generator[str, None, None]:
        with self._turn():
            session, known = self._take(request.prompt_ids) if reuse else (self._session(), 0)
        try:
            yield from Answer(session, self.tokenizer, request, known).pieces(self._turn, result)
        finally:
            with self._lock:
                # After an error nobody knows what is in the cache.
                if reuse and result and not self._closed:
                    self._keep(session, [*request.prompt_ids, *result[0].ids])
                else:
                    session.close()

    def _take(self, ids: Sequence[int]) -> tuple[Session, int]:
        """The idle conversation if it begins like this one, rewound to where they part; else a new one."""
        if self._idle is None:
            return self._session(), 0
        session, known = self._idle
        self._idle = None
        # The last token is always fed: its logits are wanted.
        limit = min(len(ids) - 1, session.length, len(known))
        common = next((i for i in range(limit) if ids[i] != known[i]), limit)
        session.rewind(common)
        return session, common

    def _keep(self, session: Session, ids: list[int]) -> None:
        if self._idle is not None:
            self._idle[0].close()
        self._idle = (session, ids)

    def close(self) -> None:
        """Give all memory back. Answers that are still being written end with an error."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._idle is not None:
                    self._idle[0].close()
                    self._idle = None
                self._runner.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LanguageModel {self.report.name} on {self.report.device}>"


def token_ids(name: str, given: Any) -> list[int]:
    """Whole numbers from a list, a tuple or an array."""
    try:
        if isinstance(given, (str, bytes, bytearray)):
            raise TypeError
        return [operator.index(i) for i in given]
    except TypeError:
        raise InputError(f"{name} must be a text or token ids, whole numbers; got {str(given)[:60]!r}") from None


def _special(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {"bos": tokenizer.vocabulary.bos, "eos": tokenizer.vocabulary.eos}


def _finished(stream: Stream) -> Completion:
    for _ in stream:
        pass
    assert stream.completion is not None
    return stream.completion
