"""Log probabilities in OpenAI's two forms. Knows no HTTP library."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable

from ..engine import TokenLogprob
from ..text import Tokenizer
from .types.openai import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

_IMPOSSIBLE = -9999.0  # JSON has no infinity; OpenAI writes this


def finite(logprob: float) -> float:
    """A number that JSON has a word for."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def text_of(raw: bytes) -> str:
    """A token's text; one that is a part of a character is written as its bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, found: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The form of chat completions."""

    def top(token: int, logprob: float) -> TopLogprob:
        raw = tokenizer.piece(token)
        return TopLogprob(raw.decode(errors="replace"), finite(logprob), list(raw))

    content = []
    for each in found:
        own = top(each.id, each.logprob)
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, [top(*pair) for pair in each.top]))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """The form of completions. Offsets count characters from the beginning of the text, over all parts of a stream."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int, offset: int = 0) -> None:
        self._tokenizer, self._alternatives, self._offset = tokenizer, alternatives, offset
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def write(self, found: Iterable[TokenLogprob]) -> CompletionLogprobs:
        """The next tokens."""
        tokens, logprobs, offsets = list[str](), list[float](), list[int]()
        tops = list[dict[str, float]]()
        for each in found:
            tokens.append(text_of(self._tokenizer.piece(each.id)))
            logprobs.append(finite(each.logprob))
            offsets.append(self._offset)
            pairs = {each.id: each.logprob} | dict(each.top)
            tops.append({text_of(self._tokenizer.piece(token)): finite(value) for token, value in pairs.items()})
            self._offset += len(self._decode(self._tokenizer.bytes_by_token[each.id]))
        return CompletionLogprobs(tokens, logprobs, tops if self._alternatives else None, offsets)
