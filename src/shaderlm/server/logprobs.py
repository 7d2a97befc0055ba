"""Log probabilities in OpenAI's two forms. Knows no HTTP library."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable

from ..engine import Handle, PromptLogprobs, TokenLogprob
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
    """The form of completions. Offsets count characters from the beginning of the text, over all parts of a stream.

    With log probabilities of the prompt, its tokens go first, and a token that ends the text goes last: who reads both
    counts on one item for each token that was asked for.
    """

    def __init__(self, tokenizer: Tokenizer, alternatives: int, handle: Handle, echoed: str) -> None:
        self._tokenizer, self._alternatives, self._handle = tokenizer, alternatives, handle
        self._echoed, self._offset, self._began = echoed, len(echoed), False
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._texts: dict[int, str] = {}  # by token: the likely ones are often the same

    def write(self, logprobs: Iterable[TokenLogprob], *, last: bool = False) -> CompletionLogprobs:
        """The next tokens."""
        lists = CompletionLogprobs([], [], [] if self._alternatives else None, [])
        if not self._began and self._handle.prompt_logprobs is not None:
            self._add_prompt(lists, self._handle.prompt_logprobs)
        self._began = True
        for each in logprobs:
            self._add(lists, each.id, each, self._offset)
            self._offset += len(self._decode(self._tokenizer.bytes_by_token[each.id]))
        end = self._handle.stop_logprob
        if last and end is not None and self._handle.prompt_logprobs is not None:
            self._add(lists, end.id, end, self._offset)
        return lists

    def _add_prompt(self, lists: CompletionLogprobs, logprobs: PromptLogprobs) -> None:
        tokenizer, text, at = self._tokenizer, self._echoed, 0
        vocabulary, decode = tokenizer.vocabulary, codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        pieces = [tokenizer.piece(token) for token in logprobs.ids]
        if logprobs.ids[0] == vocabulary.bos and not text.startswith(pieces[0].decode()):
            pieces[0] = b""  # it was put before the text, as was a space
        spaces = vocabulary.add_space_prefix and b"".join(pieces[:2]).startswith(b" ")
        for token, each, piece in zip(logprobs.ids, logprobs, pieces, strict=True):
            self._add(lists, token, each, min(max(0, at - spaces), len(text)))
            at += len(decode(piece))

    def _add(self, lists: CompletionLogprobs, token: int, logprob: TokenLogprob | None, offset: int) -> None:
        lists.tokens.append(self._text(token))
        lists.token_logprobs.append(None if logprob is None else finite(logprob.logprob))
        lists.text_offset.append(offset)
        if lists.top_logprobs is not None:
            lists.top_logprobs.append(None if logprob is None else self._top(logprob))

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The token and its alternatives by their texts. Of those that have the same text, the most likely one."""
        by_text = dict[str, float]()
        for token, value in ((logprob.id, logprob.logprob), *logprob.top):
            text, value = self._text(token), finite(value)
            by_text[text] = max(value, by_text.get(text, value))
        return by_text

    def _text(self, token: int) -> str:
        """A token's text; one that is a part of a character is written as its bytes."""
        if token not in self._texts:
            raw = self._tokenizer.piece(token)
            try:
                self._texts[token] = raw.decode()
            except UnicodeDecodeError:
                self._texts[token] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._texts[token]
