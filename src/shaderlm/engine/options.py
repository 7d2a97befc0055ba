"""The options of `generate`, `stream`, `chat` and `stream_chat`: their names, types, defaults and checks.

`GenerationOptions` and `ChatOptions` are what editors and type checkers see. Defaults are those of `GenerationParams`,
`SamplingParams` and `ChatParams`, which check the values. A test keeps the names together.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from types import NoneType
from typing import Any, TypedDict

import numpy as np

from ..errors import InputError
from .sampling import SamplingParams
from .structured import OPTIONS as STRUCTURE_OPTIONS
from .structured import Structure, structure_of


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `stream_chat`. Any of them may be left out."""

    max_tokens: int
    """Tokens to generate at most (default: 256)."""
    stop: str | Sequence[str] | None
    """Strings that end the generation. They are left out of the text."""
    ignore_eos: bool
    """Go on after the model's end-of-turn token (default: False)."""
    stop_token_ids: Sequence[int]
    """Tokens that end the generation, beside the model's own (default: none). They are left out of the text."""
    min_tokens: int
    """Tokens before which neither the end-of-turn token nor another stop token is sampled (default: 0)."""
    timeout: float | None
    """Seconds after which the generation ends, wherever it is (default: None, no limit)."""
    priority: int
    """Of generations that wait for others, the smaller number goes first (default: 0)."""
    cache_prompt: bool
    """Begin after what is in the cache of an earlier prompt with the same beginning, and keep this one's for later ones
    (default: True)."""
    parse_special: bool
    """Read the text of a special token, such as <|im_end|>, as that token (default: True; in a chat False). With False
    it is plain text; in a chat that holds for the messages' contents, not for the template around them."""
    temperature: float
    """0 (default): greedy, the most likely token. Larger values sample more evenly. Of this option and the next ones up
    to repetition_penalty, the default is the model's own value, if it has one (`LanguageModel.sampling_defaults`)."""
    top_k: int
    """Sample from the k most likely tokens (default: 0, all)."""
    top_p: float
    """Sample from the most likely tokens whose probabilities add up to p (default: 1, all)."""
    min_p: float
    """Sample from tokens with at least this fraction of the largest probability (default: 0, all)."""
    repetition_penalty: float
    """Divide positive logits of tokens seen before by it, multiply negative ones with it (default: 1, off)."""
    presence_penalty: float
    """Subtract it once from the logit of a token seen before (default: 0)."""
    frequency_penalty: float
    """Subtract it from a token's logit each time that the token was seen (default: 0)."""
    logit_bias: Mapping[int, float]
    """Token id → number that is added to its logit; −inf excludes the token."""
    seed: int | None
    """The same seed gives the same text on the same device (default: None, a different one each time)."""
    logprobs: int | None
    """Report the log probability of each token and of this many alternatives, 0 to 20 (default: None, no report)."""
    dry_multiplier: float
    """DRY: where the last n tokens came before, subtract dry_multiplier · dry_base^(n − dry_allowed_length) from the
    token that followed there, if n is at least dry_allowed_length (default: 0, off)."""
    dry_base: float
    """See dry_multiplier (default: 1.75)."""
    dry_allowed_length: int
    """See dry_multiplier (default: 2)."""
    dry_penalty_last_n: int
    """How many of the last tokens DRY looks at; −1: all (default: 64)."""
    dry_sequence_breakers: Sequence[str]
    """Strings over which a repetition does not reach (default: newline, colon, quotation mark, asterisk)."""
    xtc_probability: float
    """XTC: how often only the least likely is kept of the tokens with at least xtc_threshold (default: 0, never)."""
    xtc_threshold: float
    """See xtc_probability (default: 0.1; above 0.5: off)."""
    typical_p: float
    """Sample from the tokens whose surprise is nearest to the entropy, which add up to p (default: 1, all)."""
    top_n_sigma: float
    """Sample from logits within so many standard deviations of the largest (default: −1, all)."""
    dynatemp_range: float
    """The temperature follows the entropy, from temperature − range to temperature + range (default: 0, off)."""
    dynatemp_exponent: float
    """temperature − range + 2 · range · (entropy / largest entropy)^exponent (default: 1)."""
    mirostat: int
    """2: Mirostat 2.0, which keeps the surprise of tokens near mirostat_tau. It takes the place of all filters
    (default: 0, off)."""
    mirostat_tau: float
    """Bits of surprise that Mirostat aims at (default: 5)."""
    mirostat_eta: float
    """How quickly Mirostat follows (default: 0.1)."""
    samplers: Sequence[str] | None
    """Which samplers act, in which order: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature
    (default: None. Temperature comes after the penalties; if one of the samplers above acts but DRY, this order holds).
    """
    json_schema: Mapping[str, Any] | bool | None
    """The text is JSON that validates against this schema, unless it is cut: then its finish reason is "length".
    Of this option and the next four, one can be given (default: None)."""
    grammar: str | None
    """The text is in the language of this grammar, in llama.cpp's GBNF or in Lark (default: None)."""
    regex: str | None
    """The text matches this regular expression, as a whole (default: None)."""
    choice: Sequence[str] | None
    """The text is one of these (default: None)."""
    response_format: Mapping[str, Any] | None
    """The form of the text as OpenAI writes it: {"type": "json_object"}, or {"type": "json_schema", "json_schema":
    {"schema": …}} (default: None)."""


class ChatOptions(GenerationOptions, total=False):
    """Keyword arguments of `chat` and `stream_chat`: also what concerns messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions that the answer may call, as OpenAI describes them: [{"type": "function", "function": {"name": …,
    "description": …, "parameters": a JSON schema}}] (default: None)."""
    tool_choice: str | Mapping[str, Any] | None
    """"auto" (default), "none", "required" (at least one call), or one function by its name: {"type": "function",
    "function": {"name": …}}."""
    parallel_tool_calls: bool
    """May an answer call several functions (default: True)?"""
    reasoning: bool
    """Tell what a reasoning model thinks from its answer, in `Completion.message` (default: True)."""
    continue_final_message: bool
    """Go on with the last message instead of answering it (default: False)."""
    add_generation_prompt: bool
    """End the prompt with the beginning of an answer (default: True)."""
    thinking: bool | None
    """May the model think before it answers? (default: None, as its chat template has it)."""
    thinking_budget: int | None
    """Tokens to think at most: then the thought is ended for the model (default: None, no limit)."""
    template_kwargs: Mapping[str, Any] | None
    """Variables for the chat template, such as {"enable_thinking": False} (default: None)."""


@dataclass(frozen=True)
class GenerationParams:
    """What was asked of a generation, checked."""

    max_tokens: int = 256
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    timeout: float | None = None
    priority: int = 0
    cache_prompt: bool = True
    parse_special: bool = True
    json_schema: Mapping[str, Any] | bool | None = field(default=None, hash=False)
    grammar: str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    response_format: Mapping[str, Any] | None = field(default=None, hash=False)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("min_tokens", 0), ("priority", None)):
            object.__setattr__(self, name, _whole(name, getattr(self, name), least))
        for name in ("ignore_eos", "parse_special", "cache_prompt"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise InputError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.timeout is not None:
            object.__setattr__(self, "timeout", _seconds("timeout", self.timeout))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        self.structure  # noqa: B018 (checks what was given)

    @cached_property
    def structure(self) -> Structure | None:
        """What the text must look like."""
        return structure_of({name: getattr(self, name) for name in STRUCTURE_OPTIONS})


@dataclass(frozen=True)
class ChatParams:
    """What was asked of a chat beside its generation, checked. `text.read_tools` checks tools and tool_choice."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    thinking: bool | None = None
    thinking_budget: int | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("parallel_tool_calls", "reasoning", "continue_final_message", "add_generation_prompt"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.thinking, (bool, NoneType)):
            raise InputError(f"thinking must be None, True or False, got {self.thinking!r}")
        if self.thinking_budget is not None:
            object.__setattr__(self, "thinking_budget", _whole("thinking_budget", self.thinking_budget, 0))
        if self.template_kwargs is not None and not isinstance(self.template_kwargs, Mapping):
            raise InputError(f"template_kwargs must be a mapping, got {type(self.template_kwargs).__name__}")


def _whole(name: str, number: Any, least: int | None) -> int:
    at_least = "" if least is None else f" of at least {least}"
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or (least is not None and number < least):
        raise InputError(f"{name} must be a whole number{at_least}, got {number!r}")
    return int(number)


def _seconds(name: str, seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float, np.number)) or not 0 < float(seconds) < 1e9:
        raise InputError(f"{name} must be None or a number of seconds above 0, got {seconds!r}")
    return float(seconds)


def _token_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (list, tuple, set, frozenset, np.ndarray)):
        raise InputError(f"stop_token_ids must be a list of token ids (whole numbers), got {ids!r}")
    return tuple(_whole("a token of stop_token_ids", each, 0) for each in ids)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, (list, tuple)) or any(not isinstance(text, str) for text in strings):
        raise InputError(f"stop must be a str or a list of them, got {stop!r}")
    return tuple(strings)


_SAMPLING = {field.name: field for field in fields(SamplingParams)}
_OWN = {field.name: field for field in fields(GenerationParams) if field.name != "sampling"}
_CHAT = {field.name: field for field in fields(ChatParams)}
OPTION_NAMES = (*_OWN, *_SAMPLING)
CHAT_OPTION_NAMES = tuple(_CHAT)


def chat_params(options: Mapping[str, Any]) -> tuple[ChatParams, GenerationParams]:
    """The options of a chat, the same way."""
    _check_names(options, (*OPTION_NAMES, *_CHAT))
    # Messages may hold text of others: what looks like a special token there is text, unless it is asked for.
    others = {"parse_special": False} | {name: value for name, value in options.items() if name not in _CHAT}
    return ChatParams(**{name: options[name] for name in _CHAT if name in options}), generation_params(others)


def _check_names(options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {close[0]!r}?" if close else "."
            raise InputError(f"unknown option {name!r}{hint} The options are {', '.join(known)}")


def generation_params(options: Mapping[str, Any]) -> GenerationParams:
    """The options as checked values. An unknown name, or a value out of range, is an InputError."""
    _check_names(options, OPTION_NAMES)
    sampling = SamplingParams(**{name: value for name, value in options.items() if name in _SAMPLING})
    return GenerationParams(**{name: value for name, value in options.items() if name in _OWN}, sampling=sampling)


def show_options(method: Any, *, chat: bool = False) -> None:
    """Show the options, with their defaults, in `help()` and in editors that ask the running program."""
    signature = inspect.signature(method)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=field.type)
        for name, field in {**_OWN, **_SAMPLING, **(_CHAT if chat else {})}.items()
    ]
    method.__signature__ = signature.replace(parameters=[*parameters, *options])


def _default(field: Any) -> Any:
    return field.default_factory() if field.default is MISSING else field.default
