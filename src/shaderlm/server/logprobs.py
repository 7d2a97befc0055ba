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


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The form of chat completions."""

    def fields(token: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = tokenizer.piece(token)
        return raw.decode(errors="replace"), finite(logprob), list(raw)

    content = []
    for each in logprobs:
        top = [TopLogprob(*fields(*pair)) for pair in each.top]
        content.append(ChatLogprob(*fields(each.id, each.logprob), top))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """The form of completions. Offsets count characters from the beginning of the text, over all parts of a stream."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int, offset: int = 0) -> None:
        self._tokenizer, self._alternatives, self._offset = tokenizer, alternatives, offset
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def write(self, logprobs: Iterable[TokenLogprob]) -> CompletionLogprobs:
        """The next tokens."""
        lists = CompletionLogprobs([], [], [] if self._alternatives else None, [])
        for each in logprobs:
            lists.tokens.append(self._text(each.id))
            lists.token_logprobs.append(finite(each.logprob))
            lists.text_offset.append(self._offset)
            if lists.top_logprobs is not None:
                pairs = {each.id: each.logprob} | dict(each.top)
                lists.top_logprobs.append({self._text(token): finite(logprob) for token, logprob in pairs.items()})
            self._offset += len(self._decode(self._tokenizer.bytes_by_token[each.id]))
        return lists

    def _text(self, token: int) -> str:
        """A token's text; one that is a part of a character is written as its bytes."""
        raw = self._tokenizer.piece(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
