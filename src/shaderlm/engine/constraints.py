"""Constraints of generations: which tokens may come next, so that the text is in the language of a grammar.

The package `llguidance` does the work. It is imported when the first grammar is compiled.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..gpu.packages import version_of
from ..install import install_command
from ..limited import Answer, LimitedProgram
from ..text import ChatFormat, Tokenizer, Tool, ToolChoice
from .call_grammar import check_strict
from .structured import (
    Structure,
    chat_grammar,
    check_schema,
    guided,
    json_text,
    structure_grammar,
    unsupported_place,
    whole_grammar,
)

if TYPE_CHECKING:
    import llguidance

_MAX_GRAMMARS, _MAX_PASSED = 64, 1024  # that are kept: compiled ones, and what has passed a trial
# What it took to compile all that are kept. Their memory goes with it: up to 150 MB for a second were seen.
_MAX_COMPILE_SECONDS = 4.0
_MAX_LARK_BYTES = 16 << 20
_LONGEST_REASON = 500  # characters of llguidance's own words


_trials = LimitedProgram(
    str(Path(__file__).with_name("grammar_trial.py")), ("llguidance",), processes=2, memory=128 << 20
)


class _Trials:
    """Compiles the grammars of one request in a limited process, within its seconds."""

    def __init__(self, seconds: float, vocabulary: int, special: Mapping[str, int]) -> None:
        self._seconds = self._remaining = seconds
        self._tokens = {"vocabulary": vocabulary, "special": special}

    def lark(self, gbnf: str) -> str:
        """Lark of GBNF; what is Lark already stays as it is."""
        answer = self._ask("grammar", {"gbnf": _without_escapes(gbnf)})
        if answer.kind == "lark":
            return answer.text
        words = "it is read as GBNF, and as Lark where it has a rule `start:`"
        raise InputError(f"grammar cannot be honoured: {_reason(answer.text)}; {words}")

    def refusal(self, option: str, grammar: str) -> str | None:
        """Why a grammar cannot be compiled; None: it can, in time. InputError: not in time."""
        answer = self._ask(option, {"grammar": grammar, **self._tokens})
        return None if answer.kind == "passed" else _reason(answer.text)

    def _ask(self, option: str, question: dict[str, Any]) -> Answer:
        answer = Answer("time", "", 0.0)
        if self._remaining > 0:
            answer = _trials.ask(question, self._remaining, _MAX_LARK_BYTES)
        self._remaining -= answer.seconds
        problems = {
            "time": f"takes more than {self._seconds:g} s to compile, which is the most",
            "memory": "takes too much memory to compile",
            "ended": "takes too much memory to compile, or breaks the compiler",
        }
        if answer.kind in problems:
            raise _TooCostlyError(f"{option} {problems[answer.kind]}; make it simpler")
        return answer


class _TooCostlyError(InputError):
    """A grammar costs more than its limits."""


class _Guidance(NamedTuple):
    """What all grammars of a vocabulary share."""

    tokenizer: llguidance.LLTokenizer
    ends: frozenset[int]  # tokens that end a text
    only_ends: bytes  # the mask of these alone


# Of vocabularies, by what they hold: a model that is loaded again needs the same. They take up to a second to make, in
# which Python runs nothing else.
_MAX_TABLES = 4
_tables: OrderedDict[bytes, _Guidance] = OrderedDict()
_tables_lock = threading.Lock()


class Grammar:
    """A compiled grammar. Safe to share between threads and requests."""

    def __init__(self, matcher: llguidance.LLMatcher, guidance: _Guidance, first: bytes) -> None:
        self._matcher, self._guidance, self._first = matcher, guidance, first

    def start(self) -> GrammarConstraint:
        """A constraint for one generation."""
        return GrammarConstraint(self._matcher.deep_copy(), self._guidance, self._first)


class GrammarConstraint:
    """The state of one generation. For one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, guidance: _Guidance, first: bytes) -> None:
        self._matcher, self._guidance = matcher, guidance
        self._tokenizer, self._ends, self._only_ends = guidance
        self._mask: bytes | None = first  # for the next token, as far as it was asked for
        self._may_be_complete = False

    def mask(self) -> bytes | None:
        """The tokens that may come next: a bit per token in u32 words, the lowest first; 1: allowed.

        None, after `accept` said None: no token may come, the text is complete. Python runs other threads meanwhile.
        """
        if self._mask is None:
            self._mask = _bitmask(self._matcher, self._only_ends)
            if self._matcher.is_error():
                raise InputError(f"the grammar takes too long here: {_reason(self._matcher.get_error())}")
        return None if self._may_be_complete and self._mask == self._only_ends else self._mask

    def accept(self, token: int) -> bool | None:
        """This token came. False: the text is complete. None: the next mask says whether it is."""
        matcher, mask, self._mask = self._matcher, self._mask, None
        if token in self._ends:
            return False
        if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
            raise InputError("no token that the grammar allows could be sampled; does logit_bias exclude all of them?")
        if not matcher.consume_token(token):
            raise InputError(f"the grammar does not go on: {_reason(matcher.get_error())}")
        if matcher.is_stopped():
            return False
        self._may_be_complete = bool(matcher.is_accepting())
        return None if self._may_be_complete else True

    def fork(self) -> GrammarConstraint:
        """Another one in the same state."""
        fork = GrammarConstraint(self._matcher.deep_copy(), self._guidance, b"")
        fork._mask, fork._may_be_complete = self._mask, self._may_be_complete
        return fork

    def is_complete(self, dropped: int, prefix: bytes) -> bool:
        """Is the text complete without its last `dropped` tokens, but with these bytes of them? No token may follow."""
        matcher = self._matcher
        if dropped and not matcher.rollback(dropped):
            return False
        if prefix and not matcher.consume_tokens(self._tokenizer.tokenize_bytes(prefix)):
            return False
        return bool(matcher.is_accepting())


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps them. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self.seconds = 2.0  # that the schemas, grammars and tools of a request may take together
        self._lock, self._guidance_lock = threading.Lock(), threading.Lock()
        # By a hash: texts may have megabytes. With the seconds that it took to compile.
        self._grammars: OrderedDict[bytes, tuple[Grammar, float]] = OrderedDict()
        self._tried: OrderedDict[bytes, None] = OrderedDict()

    def prepare(self) -> None:
        """Make the tables of the vocabulary now, and the process for trials. Python runs nothing else meanwhile."""
        self._shared_guidance()
        self._new_trials().refusal("this grammar", whole_grammar({"lark_grammar": "start: /a/"}))

    def of_structure(self, structure: Structure) -> Grammar:
        """For a text."""
        trials = self._new_trials()
        grammar = whole_grammar(self._structure(structure, trials))
        return self._compiled(structure.option, grammar, lambda reason: _unsupported(structure, reason), trials)

    def of_chat(
        self, output: ChatFormat, choice: ToolChoice | None, structure: Structure | None, *, may_think: bool
    ) -> Grammar | None:
        """For an answer in a chat; None: anything may come."""
        if choice is None and structure is None:
            return None
        trials = self._new_trials()
        inner = None if structure is None else self._structure(structure, trials)
        for tool in () if choice is None else choice.tools:
            self._check_parameters(tool, trials)
            if output.calls is not None:
                check_strict(output.calls, tool)
        text = chat_grammar(output, choice, inner, self._tokenizer.special_tokens, may_think=may_think)
        option = "tools" if structure is None else structure.option
        return self._compiled(option, text, lambda reason: f"the answer's form cannot be honoured: {reason}", trials)

    def _new_trials(self) -> _Trials:
        self._shared_guidance()  # says so where llguidance is missing
        return _Trials(self.seconds, self._vocabulary, self._tokenizer.special_tokens)

    def _structure(self, structure: Structure, trials: _Trials) -> dict[str, Any]:
        """As a grammar that compiles by itself."""
        if structure.kind == "json_schema":
            self._check_schema(json.loads(structure.text), structure.option, trials)
        grammar = structure_grammar(structure, trials.lark)
        if structure.kind != "json_schema":
            self._check(structure.option, whole_grammar(grammar), lambda why: _unsupported(structure, why), trials)
        return grammar

    def _check_parameters(self, tool: Tool, trials: _Trials) -> None:
        option = f"the schema of the parameters of {tool.name}"
        schema = json.loads(json_text(option, tool.parameters))
        self._check_schema(schema, option, trials, lenient=not tool.strict)

    def _check_schema(self, schema: Any, option: str, trials: _Trials, *, lenient: bool = False) -> None:
        """Refuse a schema that cannot be honoured, with the reason and the place."""

        def unsupported_reason(part: Any) -> str | None:
            return trials.refusal(option, whole_grammar({"json_schema": guided(part, lenient=lenient)}))

        def refused(reason: str) -> str:
            place = "#"
            with suppress(_TooCostlyError):  # then the place is not looked for any further
                place, reason = unsupported_place(schema, unsupported_reason, reason)
            return f"{option} cannot be honoured at {place}: {reason}"

        if schema is False:
            raise InputError(f"{option} cannot be honoured: nothing satisfies it")
        if not lenient:
            check_schema(schema, option)
        self._check(option, whole_grammar({"json_schema": guided(schema, lenient=lenient)}), refused, trials)

    def _check(self, option: str, text: str, refused: Callable[[str], str], trials: _Trials) -> None:
        """Refuse what cannot be compiled in time."""
        key = _key(text)
        with self._lock:
            if key in self._grammars or key in self._tried:
                return
        reason = trials.refusal(option, text)
        if reason is not None:
            raise InputError(refused(reason))
        with self._lock:
            self._tried[key] = None
            if len(self._tried) > _MAX_PASSED:
                self._tried.popitem(last=False)

    def _compiled(self, option: str, text: str, refused: Callable[[str], str], trials: _Trials) -> Grammar:
        key = _key(text)
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
                return self._grammars[key][0]
        self._check(option, text, refused, trials)
        started = time.monotonic()
        grammar = self._compile(text, refused)
        with self._lock:
            self._grammars[key] = grammar, time.monotonic() - started
            while len(self._grammars) > 1 and (
                len(self._grammars) > _MAX_GRAMMARS
                or sum(seconds for _, seconds in self._grammars.values()) > _MAX_COMPILE_SECONDS
            ):
                self._grammars.popitem(last=False)
        return grammar

    def _compile(self, text: str, refused: Callable[[str], str]) -> Grammar:
        guidance = self._shared_guidance()
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(guidance.tokenizer, text, log_level=0, limits=limits)
        first = b""
        if not matcher.is_error():
            first = _bitmask(matcher, guidance.only_ends)  # it takes longest, and shows whether there is a text at all
        if matcher.is_error():
            raise InputError(refused(_reason(matcher.get_error())))
        return Grammar(matcher, guidance, first)

    def _shared_guidance(self) -> _Guidance:
        with self._guidance_lock:
            return self._guidance

    @cached_property
    def _guidance(self) -> _Guidance:
        try:
            import llguidance
        except ImportError:
            needed = "JSON schemas, grammars and tools need the package llguidance"
            raise InputError(f"{needed}; install it with: {install_command('structured')}") from None
        ends = self._tokenizer.stop_ids
        if not ends:
            raise InputError("this model has no token that ends a text; structured output needs one")
        tokens = _Tokens(self._tokenizer, self._vocabulary)
        key = tokens.key(ends)
        with _tables_lock:
            if key in _tables:
                _tables.move_to_end(key)
                return _tables[key]
        wrapped: Any = llguidance.TokenizerWrapper(tokens)
        bits = np.zeros(-(-self._vocabulary // 32) * 32, np.uint8)
        bits[sorted(ends)] = 1
        only_ends = np.packbits(bits, bitorder="little").tobytes()
        try:
            tokenizer = llguidance.LLTokenizer(wrapped, eos_token=sorted(ends))
        except TypeError:  # older versions take one token
            needed = f"JSON schemas, grammars and tools need a newer llguidance than {version_of('llguidance')}"
            raise InputError(f"{needed}; install it with: {install_command('structured', upgrade=True)}") from None
        guidance = _Guidance(tokenizer, ends, only_ends)
        with _tables_lock:
            _tables[key] = guidance
            if len(_tables) > _MAX_TABLES:
                _tables.popitem(last=False)
        return guidance


class _Tokens:
    """A tokenizer as `llguidance.TokenizerWrapper` takes it. A model may have more tokens than its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._encode = tokenizer.encode
        special = tokenizer.special_tokens
        names = {i: text.encode() for text, i in special.items()}
        known = [names.get(i) or text for i, text in enumerate(tokenizer.bytes_by_token)]
        self.tokens = [*known, *[b""] * (vocabulary - len(known))]
        self.special_token_ids = sorted(names)
        self.eos_token_id, self.bos_token_id = min(tokenizer.stop_ids), None

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, parse_special=False)

    def key(self, ends: Iterable[int]) -> bytes:
        """A hash of all that the tables are made of."""
        parts = [*self.tokens, repr((self.special_token_ids, sorted(ends))).encode()]
        sizes = np.array([len(part) for part in parts], np.int64)
        return hashlib.blake2b(sizes.tobytes() + b"".join(parts), digest_size=32).digest()


def _bitmask(matcher: llguidance.LLMatcher, only_ends: bytes) -> bytes:
    """A mask as long as this one: llguidance's has a word more where the vocabulary is a multiple of 32."""
    return matcher.compute_bitmask()[: len(only_ends)]


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _unsupported(structure: Structure, reason: str) -> str:
    return f"{structure.option} cannot be honoured: {reason}"


# What it says in terms of its own parts, in terms of schemas.
_WORDS = {
    "NoExtension": "nothing satisfies it",
    "oneOf constraints are not supported": "oneOf is kept where its cases are of different types; use anyOf",
}


def _reason(problem: object) -> str:
    """llguidance's words on one line."""
    words = str(problem).replace("<non-verbose/>", "")
    known = next((ours for theirs, ours in _WORDS.items() if words.startswith(theirs)), None)
    if known is not None:
        return known
    return " ".join(words.split())[:_LONGEST_REASON] or type(problem).__name__


_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.S)


def _without_escapes(grammar: str) -> str:
    r"""GBNF's \uXXXX and \UXXXXXXXX of characters beyond ASCII as these characters: the conversion cuts them short."""

    def character(match: re.Match[str]) -> str:
        code = int(match[1] or match[2] or "0", 16)
        return chr(code) if 0xA0 <= code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]

    return _ESCAPE.sub(character, grammar)
