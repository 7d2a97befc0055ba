"""`/v1/completions`: from the request to the engine, and from handles to the response or its stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..engine import Delta, Handle, Request
from .errors import ApiError, unsupported
from .generation import openai_options, repeated, timings_of, usage_of
from .logprobs import CompletionLogprobsWriter
from .output import finish_of
from .routes import ChunkWriter, Endpoint, Prepared
from .served import ServedModel
from .types.common import MAX_PROMPTS, Usage
from .types.openai import CompletionChoice, CompletionRequest, CompletionResponse

DEFAULT_TOKENS = 16  # OpenAI's


class Completions(Prepared):
    """A completion that is checked and tokenised."""

    route = Endpoint(
        *("/v1/completions", "Continue texts", CompletionRequest, CompletionResponse, (CompletionResponse,)),
        api="OpenAI",
        done=True,
    )
    body: CompletionRequest

    def __init__(self, served: ServedModel, body: CompletionRequest) -> None:
        super().__init__(served, body, "cmpl-")
        self.choices = body.n or 1
        if body.best_of not in (None, self.choices):
            raise unsupported("best_of", "leave it out, or give the same as n")
        nothing = body.max_tokens == 0  # is generated
        options = openai_options(served, body, 1 if nothing else body.max_tokens, default=DEFAULT_TOKENS)
        self.alternatives = body.logprobs if body.logprobs is not None else body.n_probs or None
        options["logprobs"] = self.alternatives
        prompts = read_prompts("prompt", body.prompt)
        if len(prompts) * self.choices > MAX_PROMPTS:
            raise ApiError(400, f"n × the number of prompts must be at most {MAX_PROMPTS:,}", param="n")
        requests = [served.model.request(prompt, **options) for prompt in prompts]
        if body.echo and self.alternatives is not None:
            self._check_size(requests)
            requests = [served.model.scored(request) for request in requests]
        if nothing:
            requests = [replace(request, output="nothing") for request in requests]
        self.requests = [each for request in requests for each in repeated(request, self.choices)]
        if self.return_progress and len(self.requests) > 1:
            raise ApiError(400, "return_progress is for one text; leave out n", param="return_progress")
        self.echoed = [self._echo(prompt) for prompt in prompts for _ in range(self.choices)]

    def _check_size(self, requests: Sequence[Request]) -> None:
        """Log probabilities of prompts take memory until all of them are there."""
        tokens = sum(len(request.prompt_ids) for request in requests) * self.choices
        numbers, most = tokens * (1 + (self.alternatives or 0)), self.served.limits.prompt_logprobs
        if numbers > most:
            asked = f"{tokens:,} tokens of prompts with {self.alternatives} alternatives each are {numbers:,} numbers"
            limit = f"this server takes at most {most:,} in a request"
            raise ApiError(
                400, f"{asked}; {limit}. Send fewer prompts at once, or a smaller logprobs", param="logprobs"
            )

    def _echo(self, prompt: str | list[int]) -> str:
        if not self.body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.served.model.detokenize(prompt)

    def logprobs(self, index: int, handle: Handle) -> CompletionLogprobsWriter | None:
        """What writes the log probabilities of a choice, if they are asked for."""
        if self.alternatives is None:
            return None
        return CompletionLogprobsWriter(self.served.model.tokenizer, self.alternatives, handle, self.echoed[index])

    def response(self, handles: Sequence[Handle]) -> CompletionResponse:
        """The whole answer."""
        choices = []
        for i, handle in enumerate(handles):
            completion, writer = handle.completion, self.logprobs(i, handle)
            logprobs = None
            if writer is not None:
                logprobs = writer.write((completion and completion.logprobs) or (), last=True)
            reason = finish_of(handle).openai
            assert reason != "tool_calls"
            choices.append(CompletionChoice(i, self.echoed[i] + str(completion or ""), logprobs, reason))
        usage, timings = usage_of(handles, self.choices), timings_of(handles[0])
        return CompletionResponse(**self.identity(), choices=choices, usage=usage, timings=timings)

    def writer(self, handles: Sequence[Handle]) -> CompletionsWriter:
        """What writes the stream."""
        return CompletionsWriter(self, handles)


class CompletionsWriter(ChunkWriter):
    """Writes parts of texts."""

    def __init__(self, completions: Completions, handles: Sequence[Handle]) -> None:
        super().__init__(completions, handles, CompletionResponse)
        self._choices = completions.choices
        self._logprobs = [completions.logprobs(i, handle) for i, handle in enumerate(handles)]
        self._echoed = list(completions.echoed)

    def delta(self, index: int, delta: Delta) -> bytes:
        """An event with more text."""
        text, self._echoed[index] = self._echoed[index] + delta.text, ""
        writer = self._logprobs[index]
        logprobs = writer.write(delta.logprobs) if writer is not None and delta.logprobs else None
        if not text and logprobs is None:
            return b""
        if logprobs is None and not self._with_timings:
            return self._text_chunk(index, text)
        timings = {"timings": timings_of(self._handles[index])} if self._with_timings else {}
        return self._chunk([CompletionChoice(index, text, logprobs, None)], **timings)

    def _encode_text(self, index: int, text: str) -> bytes:
        return self._chunk([CompletionChoice(index, text, None, None)])

    def finish(self, index: int) -> bytes:
        """The last event of a choice."""
        handle = self._handles[index]
        text, self._echoed[index] = self._echoed[index], ""
        writer, logprobs = self._logprobs[index], None
        if writer is not None and not (logprobs := writer.write((), last=True)).tokens:
            logprobs = None
        reason = finish_of(handle).openai
        assert reason != "tool_calls"
        return self._chunk([CompletionChoice(index, text, logprobs, reason)], timings=timings_of(handle))

    def usage(self) -> Usage:
        """Tokens of all texts."""
        return usage_of(self._handles, self._choices)


def read_prompts(field: str, prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt or several: a text, texts, token ids, or lists of them."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1 or not kinds:
        expected = "a text, a list of texts, a list of token ids or a list of such lists"
        raise ApiError(400, f"{field} must be {expected}; this list has several kinds of items", param=field)
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(400, f"{field} has {len(prompt):,} items; at most {MAX_PROMPTS:,} are read", param=field)
    return list(prompt)
