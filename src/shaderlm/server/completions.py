"""`/v1/completions`: from the request to the engine, and from handles to the response or its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from ..engine import Delta, Handle
from .chat import error_event, progress_of
from .errors import ApiError, unsupported
from .generation import OPENAI_DEFAULTS, max_tokens, options_of, repeated, response_format_option, timings_of, usage_of
from .logprobs import CompletionLogprobsWriter
from .output import finish_of, new_id
from .served import FINGERPRINT, ServedModel
from .types.common import MAX_PROMPTS
from .types.openai import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse

DEFAULT_TOKENS = 16  # OpenAI's
_encode = msgspec.json.Encoder().encode


class Completions:
    """A completion that is checked and tokenised."""

    def __init__(self, served: ServedModel, body: CompletionRequest) -> None:
        served.check_name(body.model)
        self.choices = body.n or 1
        if body.best_of not in (None, self.choices):
            raise unsupported("best_of", "leave it out, or give the same as n")
        if body.echo and body.logprobs is not None:
            expected = "log probabilities of a prompt are not computed; leave out echo or logprobs"
            raise ApiError(400, expected, param="echo")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options is for streams; give stream: true, too", param="stream_options")
        self.served, self.body = served, body
        self.stream, self.return_progress = bool(body.stream), bool(body.return_progress)
        options = options_of(body, served, OPENAI_DEFAULTS)
        options["max_tokens"] = max_tokens(served, body.max_tokens, body.n_predict, default=DEFAULT_TOKENS)
        self.alternatives = body.logprobs if body.logprobs is not None else body.n_probs or None
        options["logprobs"] = self.alternatives
        if options["max_tokens"] == 0:
            raise ApiError(400, "n_predict must be −1 or at least 1 on this route, got 0", param="n_predict")
        options |= response_format_option(body.response_format)
        found = prompts("prompt", body.prompt)
        if len(found) * self.choices > MAX_PROMPTS:
            raise ApiError(400, f"n × the number of prompts must be at most {MAX_PROMPTS:,}", param="n")
        made = [served.model.request(prompt, **options) for prompt in found]
        self.requests = [each for request in made for each in repeated(request, self.choices)]
        if self.return_progress and len(self.requests) > 1:
            raise ApiError(400, "return_progress is for one text; leave out n", param="return_progress")
        self.echoed = [self._echo(prompt) for prompt in found for _ in range(self.choices)]
        self.id, self.created = new_id("cmpl-"), int(time.time())

    def _echo(self, prompt: str | list[int]) -> str:
        if not self.body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.served.model.detokenize(prompt)

    def made(self, choices: list[CompletionChoice], **more: Any) -> CompletionResponse:
        """A response, or a part of a stream."""
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.served.name,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            **more,
        )

    def logprobs(self, index: int) -> CompletionLogprobsWriter | None:
        """What writes the log probabilities of a choice, if they are asked for."""
        if self.alternatives is None:
            return None
        return CompletionLogprobsWriter(self.served.model.tokenizer, self.alternatives, len(self.echoed[index]))

    def response(self, handles: Sequence[Handle]) -> CompletionResponse:
        """The whole answer."""
        choices = []
        for i, handle in enumerate(handles):
            completion, writer = handle.completion, self.logprobs(i)
            found = completion.logprobs if completion is not None else None
            logprobs = None if writer is None else writer.write(found or ())
            reason = finish_of(handle).openai
            assert reason != "tool_calls"
            choices.append(CompletionChoice(i, self.echoed[i] + str(completion or ""), logprobs, reason))
        return self.made(choices, usage=usage_of(handles, self.choices), timings=timings_of(handles[0]))

    def writer(self, handles: Sequence[Handle]) -> CompletionsWriter:
        """What writes the stream."""
        return CompletionsWriter(self, handles)


class CompletionsWriter:
    """Writes parts of texts."""

    def __init__(self, completions: Completions, handles: Sequence[Handle]) -> None:
        self._completions, self._handles = completions, handles
        self._logprobs = [completions.logprobs(i) for i in range(len(handles))]
        self._echoed = list(completions.echoed)
        options = completions.body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._timings = bool(completions.body.timings_per_token)

    def _event(self, choices: list[CompletionChoice], **more: Any) -> bytes:
        more.setdefault("usage", None if self._usage else UNSET)
        return b"data: %b\n\n" % _encode(self._completions.made(choices, **more))

    def delta(self, index: int, delta: Delta) -> bytes:
        """An event with more text."""
        text, self._echoed[index] = self._echoed[index] + delta.text, ""
        writer = self._logprobs[index]
        logprobs: CompletionLogprobs | None = None
        if writer is not None and delta.logprobs:
            logprobs = writer.write(delta.logprobs)
        if not text and logprobs is None:
            return b""
        choice = CompletionChoice(index, text, logprobs, None)
        if self._timings:
            return self._event([choice], timings=timings_of(self._handles[index]))
        return self._event([choice])

    def progress(self, index: int) -> bytes:
        """An event that says how much of the prompt is read."""
        return self._event([], prompt_progress=progress_of(self._handles[index]))

    def finish(self, index: int) -> bytes:
        """The last event of a choice."""
        handle = self._handles[index]
        text, self._echoed[index] = self._echoed[index], ""
        reason = finish_of(handle).openai
        assert reason != "tool_calls"
        return self._event([CompletionChoice(index, text, None, reason)], timings=timings_of(handle))

    def end(self) -> bytes:
        """Usage, if it is wanted, and the end."""
        done = b"data: [DONE]\n\n"
        if not self._usage:
            return done
        return self._event([], usage=usage_of(self._handles, self._completions.choices)) + done

    def error(self, problem: ApiError) -> bytes:
        """An error event."""
        return error_event(problem)


def prompts(name: str, given: str | list[Any]) -> list[str | list[int]]:
    """One prompt or several: a text, texts, token ids, or lists of them."""
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return [given]
    if len(kinds) > 1 or not kinds:
        expected = "a text, a list of texts, a list of token ids or a list of such lists"
        raise ApiError(400, f"{name} must be {expected}; this list has several kinds of items", param=name)
    if len(given) > MAX_PROMPTS:
        raise ApiError(400, f"{name} has {len(given):,} items; at most {MAX_PROMPTS:,} are read", param=name)
    return list(given)
