"""llama-server's routes: `/completion`, and what it tells about the model. Knows no HTTP library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ..engine import Delta, Handle, Request, TokenLogprob
from ..engine.request import Output
from ..engine.sampler_order import order_of
from ..text.stream import LineLimits
from .errors import ApiError
from .generation import LLAMA_DEFAULTS, SAMPLER_FIELDS, Progress, max_tokens, options_of, timings_of
from .logprobs import finite
from .output import finish_of
from .routes import Endpoint, Prepared, Writer, sse
from .served import FINGERPRINT, ServedModel
from .types import llama_server as types
from .types.common import MAX_PROMPTS


class LlamaCompletions(Prepared):
    """Completions that are checked and tokenised. n_predict 0 reads prompts into the cache and generates nothing."""

    route = Endpoint(
        *("/completion", "Continue a text", types.LlamaCompletionRequest, types.LlamaAnswer),
        events=(types.LlamaDelta, types.LlamaCompletion),
        aliases=("/completions",),
    )
    body: types.LlamaCompletionRequest | types.InfillRequest

    def __init__(self, served: ServedModel, body: types.LlamaCompletionRequest | types.InfillRequest) -> None:
        super().__init__(served, body)
        options = options_of(body, served, LLAMA_DEFAULTS)
        limit = max_tokens(served, body.n_predict, body.max_tokens)
        options |= {"max_tokens": max(limit, 1), "logprobs": body.n_probs or None}
        if body.ignore_eos:  # they are never sampled; elsewhere the text goes on after them
            ends = dict.fromkeys(served.model.tokenizer.stop_ids, -math.inf)
            options["logit_bias"] = {**options.get("logit_bias", {}), **ends}
        milliseconds = body.t_max_predict_ms or 0
        lines = LineLimits(body.n_indent or 0, milliseconds / 1e3 if milliseconds > 0 else None)
        output: Output = "text" if limit else "hidden"
        prompts = self._prompts()
        self.prompts = [each if isinstance(each, str) else served.model.detokenize(each) for each in prompts]
        more: dict[str, Any] = {"output": output, "lines": lines}
        more["reports_remaining"] = bool(body.n_probs and body.post_sampling_probs)
        self.requests = [replace(served.model.request(prompt, **options), **more) for prompt in prompts]
        if self.return_progress and len(self.requests) > 1:
            raise ApiError(400, "return_progress is for one prompt; send one", param="return_progress")

    def _prompts(self) -> list[str | list[int]]:
        assert isinstance(self.body, types.LlamaCompletionRequest)
        return read_prompts(self.served, self.body.prompt)

    def response(self, handles: Sequence[Handle]) -> Any:
        """The whole answer; a list of them where there are several prompts."""
        answers = [self._answer(i, handle) for i, handle in enumerate(handles)]
        return answers if len(answers) > 1 else answers[0]

    def _answer(self, index: int, handle: Handle) -> Any:
        completion = handle.completion
        tokens = completion.ids if completion is not None and self.body.return_tokens else []
        logprobs = completion.logprobs if completion is not None else None
        return self.last(index, handle, str(completion or ""), tokens, self.probabilities(logprobs))

    def probabilities(self, logprobs: Iterable[TokenLogprob] | None) -> list[types.CompletionProbability] | UnsetType:
        """Those of tokens, if they are asked for."""
        if not logprobs or not self.body.n_probs:
            return UNSET
        tokenizer, is_prob = self.served.model.tokenizer, bool(self.body.post_sampling_probs)

        def fields(token: int, logprob: float) -> tuple[Any, ...]:
            raw = tokenizer.piece(token)
            values = (UNSET, min(1.0, math.exp(logprob))) if is_prob else (finite(logprob), UNSET)
            return token, raw.decode(errors="replace"), list(raw), *values

        probabilities = []
        for each in logprobs:
            top = [types.TokenProbability(*fields(*pair)) for pair in each.top]
            tops = (UNSET, top) if is_prob else (top, UNSET)
            probabilities.append(types.CompletionProbability(*fields(each.id, each.logprob), *tops))
        return probabilities

    def last(self, index: int, handle: Handle, content: str, tokens: list[int], probabilities: Any = UNSET) -> Any:
        """The whole answer, or what a stream ends with: of all fields, those that are asked for."""
        answer = completion_of(self.served, handle, self.prompts[index], content=content, tokens=tokens, index=index)
        answer.completion_probabilities = probabilities
        return _selected(answer, self.body.response_fields) if self.body.response_fields else answer

    def writer(self, handles: Sequence[Handle]) -> LlamaWriter:
        """What writes the stream."""
        return LlamaWriter(self, handles)


class LlamaWriter(Writer):
    """Writes parts of texts. The last one of each has everything that a whole answer has, but the text."""

    def __init__(self, completions: LlamaCompletions, handles: Sequence[Handle]) -> None:
        self._completions, self._handles = completions, handles

    def _part(self, index: int, content: str = "", tokens: Sequence[int] = (), **fields: Any) -> bytes:
        usage = self._handles[index].usage
        return sse(
            types.LlamaDelta(
                index=index,
                content=content,
                tokens=list(tokens),
                id_slot=-1,
                tokens_predicted=usage.completion_tokens,
                tokens_evaluated=usage.prompt_tokens,
                **fields,
            )
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """An event with more text; with probabilities, one for each token."""
        if not delta.text and not delta.ids:
            return b""
        completions = self._completions
        fields = {"timings": timings_of(self._handles[index])} if completions.body.timings_per_token else {}
        if not completions.body.n_probs or len(delta.ids) < 2:
            probabilities = completions.probabilities(delta.logprobs)
            return self._part(index, delta.text, delta.ids, completion_probabilities=probabilities, **fields)
        parts = b""
        for i, (token, logprob) in enumerate(zip(delta.ids, delta.logprobs, strict=True)):
            text = delta.text if i == len(delta.ids) - 1 else ""
            probabilities = completions.probabilities([logprob])
            parts += self._part(index, text, [token], completion_probabilities=probabilities, **fields)
        return parts

    def progress(self, index: int, report: Progress) -> bytes:
        """An event that says how much of the prompt is read."""
        timings = report.timings if self._completions.body.timings_per_token else UNSET
        return self._part(index, prompt_progress=report.prompt, timings=timings)

    def finish(self, index: int) -> bytes:
        """The last event."""
        return sse(self._completions.last(index, self._handles[index], "", []))


def completion_of(
    served: ServedModel, handle: Handle, prompt: str, *, content: str, tokens: Sequence[int] = (), index: int = 0
) -> types.LlamaCompletion:
    """What `/completion` says of a handle that is finished."""
    usage, kind = handle.usage, finish_of(handle).llama
    return types.LlamaCompletion(
        index=index,
        content=content,
        tokens=list(tokens),
        id_slot=-1,
        model=served.name,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.cached_tokens,
        generation_settings=settings_of(handle.request),
        prompt=prompt,
        has_new_line="\n" in (handle.completion or ""),
        stop_type=kind,
        stopping_word=str(handle.stop_match) if kind == "word" else "",
        timings=timings_of(handle),
    )


def _selected(answer: types.LlamaCompletion, paths: Sequence[str]) -> dict[str, Any]:
    """Values of an answer by their paths, such as generation_settings/n_predict. Those that it does not have are left
    out, as llama-server does it.
    """
    fields, selected = msgspec.to_builtins(answer), dict[str, Any]()
    for path in paths:
        value, steps = fields, path.split("/")
        for step in steps:
            value = value.get(step, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            selected[path] = value
    return selected


def read_prompts(served: ServedModel, prompt: Any) -> list[str | list[int]]:
    """One prompt, or several: a list that has no token ids of its own."""
    if isinstance(prompt, list) and not any(isinstance(each, int) for each in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt has {len(prompt):,} items; at most {MAX_PROMPTS:,} are read", param="prompt")
        return [_read_prompt(served, each) for each in prompt]
    return [_read_prompt(served, prompt)]


def _read_prompt(served: ServedModel, prompt: Any) -> str | list[int]:
    """Text, token ids, or both in turn. The beginning is a text's beginning; later texts have no BOS."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, types.PromptObject):
        if prompt.multimodal_data:
            instead = "leave it out, or send pictures in messages to /v1/chat/completions"
            raise ApiError(400, f"multimodal_data: this route takes text alone; {instead}", param="prompt")
        return prompt.prompt_string
    ids: list[int] = []
    for i, each in enumerate(prompt):
        if isinstance(each, (list, types.PromptObject)):
            raise ApiError(400, "prompt has token ids and several prompts; give lists of ids", param="prompt")
        ids += served.model.tokenize(each, add_special=i == 0) if isinstance(each, str) else [each]
    served.model.runner.check_ids(ids)
    return ids


def settings_of(request: Request) -> types.GenerationSettings:
    """What a request is run with, as llama-server writes it."""
    sampling = request.sampling
    limit = request.max_tokens if request.output == "text" else 0
    return types.GenerationSettings(
        n_predict=limit,
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
        logit_bias=[
            types.TokenBias(token, bias if math.isfinite(bias) else None) for token, bias in sampling.logit_bias.items()
        ],
        max_tokens=limit,
        **{name: getattr(sampling, name) for name in SAMPLER_FIELDS},
        dry_sequence_breakers=list(sampling.dry_sequence_breakers),
        samplers=list(order_of(sampling)),
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


def props(served: ServedModel, *, slots: bool, metrics: bool) -> types.Props:
    """What is served, and how."""
    model = served.model
    vocabulary, template = model.tokenizer.vocabulary, model.chat_template
    special = ["" if token is None else vocabulary.tokens[token] for token in (vocabulary.bos, vocabulary.eos)]
    sampling = {**LLAMA_DEFAULTS, **served.sampling_defaults}
    default = model.request([0], max_tokens=max_tokens(served), **sampling)
    return types.Props(
        default_generation_settings=types.DefaultSettings(served.context, settings_of(default)),
        total_slots=slot_count(served),
        modalities=types.Modalities(vision=model.vision is not None),
        endpoint_slots=slots,
        endpoint_metrics=metrics,
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
            next_token=[
                types.SlotToken(each.completion_tokens, max(0, each.max_tokens - each.completion_tokens), True)
            ],
            params=settings_of(each.request) if each.request.client == client else UNSET,
        )
        for i, each in enumerate(served.model.engine.sequences())
    ]
    free = range(len(busy), max(len(busy), slot_count(served)))
    idle = [types.SlotToken(0, -1, False)]
    return busy + [types.Slot(i, -1, served.context, False, "idle", 0, 0, 0, idle) for i in free]
