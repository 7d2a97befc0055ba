"""llama-server's routes: `/completion`, and what it tells about the model. Knows no HTTP library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType

from ..engine import Delta, Handle, Request, TokenLogprob
from .errors import ApiError
from .generation import LLAMA_DEFAULTS, max_tokens, options_of, progress_of, timings_of
from .logprobs import finite
from .output import finish_of
from .routes import Endpoint, Prepared, Writer, sse
from .served import FINGERPRINT, ServedModel
from .types import llama_server as types


class LlamaCompletions(Prepared):
    """A completion that is checked and tokenised. n_predict 0 reads the prompt into the cache and generates nothing."""

    route = Endpoint(
        *("/completion", "Continue a text", types.LlamaCompletionRequest, types.LlamaCompletion),
        events=(types.LlamaDelta, types.LlamaCompletion),
    )
    body: types.LlamaCompletionRequest

    def __init__(self, served: ServedModel, body: types.LlamaCompletionRequest) -> None:
        super().__init__(served, body)
        options = options_of(body, served, LLAMA_DEFAULTS)
        limit = max_tokens(served, body.n_predict)
        options |= {"max_tokens": max(limit, 1), "logprobs": body.n_probs or None}
        if body.t_max_predict_ms:
            options["timeout"] = body.t_max_predict_ms / 1e3
        prompt = _prompt(served, body.prompt)
        request = served.model.request(prompt, **options)
        self.requests = [request if limit else replace(request, output="hidden")]
        self.prompt = prompt if isinstance(prompt, str) else served.model.detokenize(prompt)

    def response(self, handles: Sequence[Handle]) -> types.LlamaCompletion:
        """The whole answer."""
        handle = handles[0]
        completion = handle.completion
        tokens = completion.ids if completion is not None and self.body.return_tokens else []
        logprobs = completion.logprobs if completion is not None else None
        return self.last(handle, str(completion or ""), tokens, self.probabilities(logprobs))

    def probabilities(self, logprobs: Iterable[TokenLogprob] | None) -> list[types.CompletionProbability] | UnsetType:
        """Those of tokens, if they are asked for."""
        if not logprobs or not self.body.n_probs:
            return UNSET
        tokenizer = self.served.model.tokenizer

        def fields(token: int, logprob: float) -> tuple[int, str, list[int], float]:
            raw = tokenizer.piece(token)
            return token, raw.decode(errors="replace"), list(raw), finite(logprob)

        probabilities = []
        for each in logprobs:
            top = [types.TokenProbability(*fields(*pair)) for pair in each.top]
            probabilities.append(types.CompletionProbability(*fields(each.id, each.logprob), top))
        return probabilities

    def last(self, handle: Handle, content: str, tokens: list[int], probabilities: Any) -> types.LlamaCompletion:
        """The whole answer, or what a stream ends with."""
        usage = handle.usage
        whole = str(handle.completion or "")
        kind = finish_of(handle).llama
        return types.LlamaCompletion(
            index=0,
            content=content,
            tokens=tokens,
            id_slot=-1,
            model=self.served.name,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            tokens_cached=usage.cached_tokens,
            generation_settings=settings_of(self.requests[0]),
            prompt=self.prompt,
            has_new_line="\n" in whole,
            stop_type=kind,
            stopping_word=str(handle.stop_match) if kind == "word" else "",
            timings=timings_of(handle),
            completion_probabilities=probabilities,
        )

    def writer(self, handles: Sequence[Handle]) -> LlamaWriter:
        """What writes the stream."""
        return LlamaWriter(self, handles[0])


class LlamaWriter(Writer):
    """Writes parts of a text. The last one has everything that a whole answer has, but the text."""

    def __init__(self, completions: LlamaCompletions, handle: Handle) -> None:
        self._completions, self._handle = completions, handle

    def _part(self, content: str = "", tokens: Sequence[int] = (), **fields: Any) -> bytes:
        usage = self._handle.usage
        return sse(
            types.LlamaDelta(
                index=0,
                content=content,
                tokens=list(tokens),
                id_slot=-1,
                tokens_predicted=usage.completion_tokens,
                tokens_evaluated=usage.prompt_tokens,
                **fields,
            )
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """An event with more text."""
        if not delta.text and not delta.ids:
            return b""
        body = self._completions.body
        timings = timings_of(self._handle) if body.timings_per_token else UNSET
        probabilities = self._completions.probabilities(delta.logprobs)
        return self._part(content=delta.text, tokens=delta.ids, completion_probabilities=probabilities, timings=timings)

    def progress(self, index: int) -> bytes:
        """An event that says how much of the prompt is read."""
        return self._part(prompt_progress=progress_of(self._handle))

    def finish(self, index: int) -> bytes:
        """The last event."""
        return sse(self._completions.last(self._handle, "", [], UNSET))


def _prompt(served: ServedModel, prompt: str | list[Any]) -> str | list[int]:
    """Text, token ids, or both in turn. The beginning is a text's beginning; later texts have no BOS."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > 1 and all(isinstance(each, str) for each in prompt):
        expected = "send one request for each, or use /v1/completions"
        raise ApiError(400, f"prompt: {len(prompt):,} texts are several prompts; {expected}", param="prompt")
    ids: list[int] = []
    for i, each in enumerate(prompt):
        ids += served.model.tokenize(each, add_special=i == 0) if isinstance(each, str) else [each]
    served.model.runner.check_ids(ids)
    return ids


def settings_of(request: Request) -> types.GenerationSettings:
    """What a request is run with, as llama-server writes it."""
    sampling = request.sampling
    return types.GenerationSettings(
        n_predict=request.max_tokens if request.output == "text" else 0,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(request.stop),
        min_tokens=request.min_tokens,
        n_probs=sampling.logprobs or 0,
        cache_prompt=request.cache_prompt,
    )


# About the model -----------------------------------------------------------------------------------------


def tokenize(served: ServedModel, body: types.TokenizeRequest) -> types.TokenizeResponse:
    """Token ids of a text, with their texts if they are asked for."""
    parse_special = body.parse_special is not False
    text = body.prompt if body.content is None else body.content
    if text is None:
        raise ApiError(400, "content, the text, is missing", param="content")
    special = bool(body.add_special or body.add_special_tokens)
    ids = served.model.tokenize(text, add_special=special, parse_special=parse_special)
    if not body.with_pieces:
        return types.TokenizeResponse(list(ids))
    return types.TokenizeResponse(
        [types.TokenPiece(token, served.model.tokenizer.text_or_bytes(token)) for token in ids]
    )


def detokenize(served: ServedModel, body: types.DetokenizeRequest) -> types.DetokenizeResponse:
    """The text of token ids, special tokens included."""
    model = served.model
    if body.tokens:
        model.runner.check_ids(body.tokens)
    text = model.detokenize(body.tokens)
    return types.DetokenizeResponse(text, text)


def tokenizer_info(served: ServedModel) -> types.TokenizerInfo:
    """What lm-eval and others ask before they tokenise over HTTP."""
    vocabulary, template = served.model.tokenizer.vocabulary, served.model.chat_template
    bos, eos = (None if token is None else vocabulary.tokens[token] for token in (vocabulary.bos, vocabulary.eos))
    source = None if template is None else str(template.source)
    return types.TokenizerInfo(bos, eos, None, vocabulary.add_bos, source)


def props(served: ServedModel) -> types.Props:
    """What is served, and how."""
    model = served.model
    vocabulary, template = model.tokenizer.vocabulary, model.chat_template
    special = ["" if token is None else vocabulary.tokens[token] for token in (vocabulary.bos, vocabulary.eos)]
    sampling = {**LLAMA_DEFAULTS, **model.sampling_defaults}
    default = model.request([0], max_tokens=max_tokens(served), **sampling)
    return types.Props(
        default_generation_settings=types.DefaultSettings(served.context, settings_of(default)),
        total_slots=slot_count(served),
        model_alias=served.name,
        model_path=str(model.report.path),
        chat_template="" if template is None else str(template.source),
        bos_token=special[0],
        eos_token=special[1],
        build_info=FINGERPRINT,
        device=model.report.device,
        backend=model.report.backend,
    )


def slot_count(served: ServedModel) -> int:
    """How many sequences run at the same time."""
    model = served.model
    outputs = min(model.runner.max_outputs, model.runner.max_tokens)
    return min(model.engine.options.parallel or outputs, outputs)


def slots(served: ServedModel, client: str | None = None) -> list[types.Slot]:
    """The sequences that run, then those that wait, then free places. Of those of other clients only their sizes."""
    busy = [
        types.Slot(
            id=i,
            id_task=each.id,
            n_ctx=served.context,
            is_processing=True,
            state=each.state,  # type: ignore[arg-type]
            n_prompt_tokens=each.prompt_tokens,
            n_prompt_tokens_processed=each.prompt_done,
            n_prompt_tokens_cache=each.cached_tokens if each.request.client == client else 0,
            next_token=types.SlotToken(each.completion_tokens, max(0, each.max_tokens - each.completion_tokens)),
            params=settings_of(each.request) if each.request.client == client else None,
        )
        for i, each in enumerate(served.model.engine.sequences())
    ]
    free = range(len(busy), max(len(busy), slot_count(served)))
    return busy + [types.Slot(i, -1, served.context, False, "idle", 0, 0, 0, types.SlotToken(0, 0), None) for i in free]
