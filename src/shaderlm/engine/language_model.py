"""`LanguageModel`, the object that users hold: a loaded model with its tokenizer. Safe to use from several threads.

Which lock covers what:

- `Generation._lock` covers one generation: one thread at a time reads it, and waits for its tokens under this lock.
- `LanguageModel._turn` covers the sessions: opening, keeping and closing them, submitting their steps, reading their
  logits. It is not held while a token that the device samples is awaited, nor while the caller has text.
- `Runner.lock` covers the pool of pages and what is submitted to the device, by anyone who has the runner.

They are taken in this order. `close` marks the model as closed under the second, lets go of it, and then ends the
generations one by one under the first.
"""

from __future__ import annotations

import operator
import reprlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from ..models.architecture import Config
from ..runtime.runner import Runner
from ..runtime.session import Session
from ..text import ChatTemplate, Tokenizer
from .completion import Completion, Stream
from .generate import Generation, Request
from .options import GenerationOptions, GenerationParams, generation_params, show_options
from .report import LoadReport

Messages = Sequence[Mapping[str, Any]]


class LanguageModel:
    """Generates text. Use it as a context manager, or call `close()`, to free its memory.

    Safe to use from several threads: generations that run at the same time have a cache each, and take turns.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, report: LoadReport) -> None:
        self._runner, self.tokenizer, self.report = runner, tokenizer, report
        self._turn = _Turn()
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._idle: tuple[Session, list[int]] | None = None  # the last conversation, and the tokens in its cache
        vocabulary = tokenizer.vocabulary
        texts = {key: "" if i is None else vocabulary.tokens[i] for key, i in _special(tokenizer).items()}
        self._template = ChatTemplate(vocabulary.chat_template, **texts) if vocabulary.chat_template else None

    @property
    def config(self) -> Config:
        """The model's sizes."""
        return self._runner.config

    @property
    def runner(self) -> Runner:
        """The model without its text: for benchmarks."""
        return self._runner

    @property
    def has_chat_template(self) -> bool:
        """Can this model chat?"""
        return self._template is not None

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Completion:
        """Continue a text, or token ids.

        max_tokens: tokens to generate at most. stop: strings that end the generation; they are left out.
        ignore_eos: go on after the model's end-of-turn token. parse_special: read the text of a special token, such
        as <|im_end|>, as that token; False reads it as plain text.

        How tokens are sampled: temperature (0: greedy), top_k (0: off), top_p (1: off), min_p (0: off),
        repetition_penalty (1: off), presence_penalty, frequency_penalty, logit_bias (token id → number that is added
        to its logit), seed (the same seed gives the same text). logprobs: report the log probability of each token and
        of this many alternatives.
        """
        return _finished(self.stream(prompt, **options))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Stream:
        """The same as `generate`, as a stream of text."""
        params = generation_params(options)
        if isinstance(prompt, str):
            ids = self.tokenize(prompt, parse_special=params.parse_special)
        else:
            ids = token_ids("prompt", prompt, "a str or a list of token ids (whole numbers)")
        return self._start(ids, params, reuse=False)

    def chat(self, messages: Messages, **options: Unpack[GenerationOptions]) -> Completion:
        """Answer a conversation: messages with "role" (system, user, assistant) and "content". Options as `generate`.

        With parse_special=False special tokens in the contents are plain text; those of the template stay tokens.
        """
        return _finished(self.stream_chat(messages, **options))

    def stream_chat(self, messages: Messages, **options: Unpack[GenerationOptions]) -> Stream:
        """The same as `chat`, as a stream of text. Only what the last conversation does not have is computed."""
        params = generation_params(options)
        return self._start(self.chat_ids(messages, parse_special=params.parse_special), params, reuse=True)

    def chat_ids(self, messages: Messages, *, parse_special: bool = True) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        if self._template is None:
            raise ModelError("this model has no chat template; use generate() to continue a text")
        if parse_special:
            return self.tokenize(self._template.render(messages))
        text, mark = self._template.render_marked(messages, self.tokenizer.special_tokens)
        return self._with_bos(self.tokenizer.encode_marked(text, mark))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, the same that `generate` makes of it.

        add_special: BOS goes first where the model wants it. parse_special: the text of a special token is that token.
        """
        ids = self.tokenizer.encode(text, parse_special=parse_special)
        return self._with_bos(ids) if add_special else ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(token_ids("ids", ids))

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each of these tokens, [T, vocabulary]."""
        given = token_ids("ids", ids)
        self._check_length(given)
        with self._turn:
            session = self._runner.session()
            try:
                return session.all_logits(given)
            finally:
                session.close()

    def close(self) -> None:
        """Free all memory. Generations that are not finished end with an error."""
        with self._turn.lock:
            if self._turn.closed:
                return
            self._turn.closed = True
            unfinished = list(self._generations)
        for generation in unfinished:
            generation.abort(_closed())  # waits for the token that its thread is waiting for
        with self._turn.lock:
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

    # Generations ---------------------------------------------------------------------------------------------

    def _start(self, ids: list[int], params: GenerationParams, *, reuse: bool) -> Stream:
        if not ids:
            raise InputError("the prompt is empty; give at least one word")
        self._check_length(ids)
        params.sampling.check_vocabulary(self.config.vocabulary)
        request = Request(
            prompt_ids=ids,
            sampling=params.sampling,
            max_tokens=params.max_tokens,
            context=self.config.context,
            stop=params.stop,
            stop_ids=frozenset() if params.ignore_eos else self.tokenizer.stop_ids,
        )
        opened = partial(self._cached_session, ids) if reuse else lambda: (self._runner.session(), 0)
        generation = Generation(request, self.tokenizer, opened, partial(self._release, reuse), self._turn)
        with self._turn:
            self._generations.add(generation)
        return Stream(generation)

    def _cached_session(self, ids: Sequence[int]) -> tuple[Session, int]:
        """The idle session, cut to the prefix that it has in common with this prompt; else a new one."""
        if self._idle is None:
            return self._runner.session(), 0
        session, cached = self._idle
        self._idle = None
        # The last token is always fed: its logits are needed.
        limit = min(len(ids) - 1, session.length, len(cached))
        common = next((i for i in range(limit) if ids[i] != cached[i]), limit)
        session.rewind(common)
        return session, common

    def _release(self, reuse: bool, session: Session, completion: Completion | None) -> None:
        """Keep the session of a conversation, without the steps that were submitted after its last token."""
        with self._turn.lock:
            # After an error nobody knows what is in the cache.
            if not reuse or completion is None or self._turn.closed:
                session.close()
                return
            ids = [*completion.prompt_ids, *completion.ids]
            session.rewind(min(session.length, len(ids)))
            if self._idle is not None:
                self._idle[0].close()
            self._idle = (session, ids)

    def _check_length(self, ids: Sequence[int]) -> None:
        context, limit = self.config.context, self.report.max_context
        if len(ids) > context:
            longer = f"raise context= (up to {limit:,})" if context < limit else "use a model with a longer context"
            raise InputError(
                f"the prompt has {len(ids):,} tokens, the context holds {context:,}. Shorten the prompt, or {longer}"
            )

    def _with_bos(self, ids: list[int]) -> list[int]:
        vocabulary = self.tokenizer.vocabulary
        wanted = [vocabulary.bos] if vocabulary.add_bos and vocabulary.bos is not None else []
        return ids if not wanted or ids[:1] == wanted else [*wanted, *ids]


class _Turn:
    """`with turn:` gives the device to one thread; an InputError once the model is closed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed = False

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.closed:
            self.lock.release()
            raise _closed()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def _closed() -> InputError:
    return InputError("this model is closed; load it again")


def token_ids(name: str, given: Any, expected: str = "a list of token ids (whole numbers)") -> list[int]:
    """Whole numbers from a list, a tuple or an array."""
    if isinstance(given, (str, bytes, bytearray)):
        hint = "; tokenize() makes token ids of a text" if isinstance(given, str) else ""
        raise InputError(f"{name} must be {expected}, got {reprlib.repr(given)}{hint}")
    try:
        return [operator.index(i) for i in given]
    except TypeError:
        raise InputError(f"{name} must be {expected}, got {reprlib.repr(given)}") from None


def _special(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {"bos": tokenizer.vocabulary.bos, "eos": tokenizer.vocabulary.eos}


def _finished(stream: Stream) -> Completion:
    for _ in stream:
        pass
    assert stream.completion is not None
    return stream.completion


for _method in (LanguageModel.generate, LanguageModel.stream, LanguageModel.chat, LanguageModel.stream_chat):
    show_options(_method)
