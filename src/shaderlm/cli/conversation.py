"""A conversation: its messages, which of them the model sees, and answers to the last one on stdout."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .image_options import content_with
from .streaming import tell, tell_cancelled, write_stream

if TYPE_CHECKING:
    from ..engine import Completion, GenerationOptions, LanguageModel

Message = dict[str, Any]

_LEFT_OUT = "the context of {limit:,} tokens is full: the oldest {turns} left out from here on"
_TOO_LONG = "this message is too long: {used:,} tokens{more}, the context holds {limit:,}"
_SYSTEM_TOO_LONG = "the system message is too long: {used:,} tokens, the context holds {limit:,}; it is as it was"
_FULL = "answer cut: the context of {limit:,} tokens is full. The next message leaves out the oldest turns"
_CUT = "answer cut after {count:,} tokens; /set max_tokens (or --max-tokens, -n) allows more"
_NO_ANSWER = "there is no answer yet, and your message is not part of the conversation"
_OLD_ANSWER = "there is no other answer yet; the conversation is as it was"
_STOPPED = "the answer ends here, and is part of the conversation as far as it came"
_SAME = "temperature is 0, so the same text comes again; /set temperature 0.7 changes that"


@dataclass
class ChatSession:
    """The messages so far, and the model that answers.

    `messages` has all of them but the system message. The model sees those from `first` on.
    """

    model: LanguageModel
    options: GenerationOptions
    system: str | None = None
    verbose: bool = False
    messages: list[Message] = field(default_factory=list)
    first: int = 0
    images: list[str] = field(default_factory=list)  # files for the next message
    again: int = 0  # how often the last answer was made again

    @property
    def all_messages(self) -> list[Message]:
        """What is saved."""
        return self._with_system(self.messages)

    @property
    def turns(self) -> int:
        """Messages of the user."""
        return _turns(self.messages)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages, self.images = [], []
        self.first = self.again = 0

    def replace(self, messages: Sequence[Message]) -> None:
        """Continue this conversation from now on. What the chat template refuses is an InputError."""
        if messages:
            self._tokens(list(messages))
        system = [message["content"] for message in messages[:1] if message["role"] == "system"]
        self.system, self.messages = (system[0] if system else None), list(messages[len(system) :])
        self.first = self.again = 0

    def set_system(self, text: str | None) -> None:
        """Another system message, or none, before the same messages."""
        if text is not None:  # templates may refuse one
            used = self._tokens([_message("system", text), _message("user", "Hello")])
            if used > self._limit:
                raise InputError(_SYSTEM_TOO_LONG.format(used=used, limit=self._limit))
        self.system, self.first = text, 0

    def undo(self) -> bool:
        """Forget the last message of the user and what follows it. False: there is none."""
        at = self._last_of_user()
        if at is None:
            return False
        del self.messages[at:]
        self.first = self.again = 0
        return True

    def say(self, text: str) -> None:
        """Answer on stdout. A message without an answer, because it does not fit or was stopped, is forgotten."""
        message = {"role": "user", "content": content_with(self.images, text)}
        self.images = []
        self._answer([*self.messages, message], 0, _NO_ANSWER)

    def attach(self, path: str) -> int:
        """A picture for the next message. How many there are."""
        if self.model.vision is None:
            raise InputError(f"{self.model.report.name} does not read images")
        content_with([path], "")  # what cannot be read is an error now
        self.images.append(path)
        return len(self.images)

    def regenerate(self) -> None:
        """Answer the last message of the user once more. The new answer replaces the old one."""
        at = self._last_of_user()
        if at is None:
            tell("there is no message to answer yet")
            return
        if self.options["temperature"] == 0 and self.messages[at + 1 :]:
            tell(_SAME)
        self._answer(self.messages[: at + 1], self.again + 1, _OLD_ANSWER)

    def _answer(self, messages: list[Message], again: int, nothing: str) -> None:
        first = self._first_that_fits(messages)
        if first is None:
            return
        options = self.options.copy()
        seed = options["seed"]
        if seed is not None and again:  # another answer, and the same one where all is repeated
            options["seed"] = (seed + again) % (1 << 64)
        stream = self.model.stream_chat(self._with_system(messages[first:]), **options)
        answer, interrupted = write_stream(stream)
        completion = stream.completion
        if answer or not interrupted:
            self.messages, self.first, self.again = [*messages, _message("assistant", answer)], first, again
        if interrupted:
            tell_cancelled(_STOPPED if answer else nothing, answer)
        elif completion is not None and completion.finish_reason == "length":
            cut = len(completion.ids) == options["max_tokens"]
            tell((_CUT if cut else _FULL).format(count=len(completion.ids), limit=self._limit))
        if self.verbose and completion is not None and completion.ids:
            tell(self._speed(completion))

    def _speed(self, completion: Completion) -> str:
        timing, used = completion.timing, len(completion.prompt_ids) + len(completion.ids)
        return (
            f"{len(completion.ids):,} tokens, {timing.tokens_per_second:.1f} tok/s, {timing.prompt_seconds:.2f} s to "
            f"the first token; {used:,} of {self._limit:,} tokens of the context are used"
        )

    # What the model sees -------------------------------------------------------------------------------------

    def _first_that_fits(self, messages: list[Message]) -> int | None:
        """The first message that the model sees, so that an answer fits too. None: the last one alone does not fit.

        Where turns must go, twice the tokens of an answer are made free: each time the model reads all others again.
        """
        answer = min(self.options["max_tokens"], self._limit // 4)
        if self._seen(messages, self.first) + answer <= self._limit:
            return self.first
        starts = [at for at in range(self.first + 1, len(messages)) if messages[at]["role"] == "user"]
        starts.insert(0, self.first)
        fits = bisect_left(starts, True, key=lambda at: self._seen(messages, at) + 2 * answer <= self._limit)
        first = starts[min(fits, len(starts) - 1)]  # a message stays, however long it is
        used = self._seen(messages, first)
        if used > self._limit:
            more = "" if self.system is None else " with the system message"
            tell(_TOO_LONG.format(used=used, more=more, limit=self._limit))
            return None
        if first > self.first:
            count = _turns(messages[self.first : first])
            tell(_LEFT_OUT.format(limit=self._limit, turns="turn is" if count == 1 else f"{count} turns are"))
        return first

    @property
    def _limit(self) -> int:
        return self.model.engine.context

    def _seen(self, messages: list[Message], first: int) -> int:
        return self._tokens(self._with_system(messages[first:]))

    def _tokens(self, messages: list[Message]) -> int:
        return len(self.model.chat_ids(messages, parse_special=self.options["parse_special"]))

    def _with_system(self, messages: list[Message]) -> list[Message]:
        return messages if self.system is None else [_message("system", self.system), *messages]

    def _last_of_user(self) -> int | None:
        return max((at for at, message in enumerate(self.messages) if message["role"] == "user"), default=None)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _turns(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "user" for message in messages)
