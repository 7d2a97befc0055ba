"""Text → token ids with the `tokenizers` package, and token ids → bytes with a table."""

from __future__ import annotations

import operator
import re
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, overload

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from ..errors import InputError, ModelError
from . import huggingface
from .splits import SPLITS
from .tokenizer_errors import wrap_tokenizer_errors
from .vocabulary import BYTE, BYTE_TOKEN, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

# What chat checkpoints end a turn with, beside EOS.
_TURN_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
# Gemma 4 ends a turn, and hands over to a tool.
_TURN_ENDS |= {"<turn|>", "<|tool_response>"}
# What `clean_spaces` replaces, in this order; an apostrophe alone loses both spaces, the others the first one.
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer:
    """Encodes and decodes with one vocabulary. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        check_vocabulary(vocabulary)
        # The bytes of every token; special tokens have none.
        self.bytes_by_token: Sequence[bytes] = _TokenBytes(vocabulary)
        # Tokens that end a generation: EOS, and the end-of-turn tokens that chat checkpoints use beside it.
        self.stop_ids = _stop_ids(vocabulary)
        if vocabulary.kind == "none":
            return  # there is no encoder: `_check_has_text` refuses texts
        build = {"bpe": _byte_level, "spm": _sentence_piece, "unigram": _unigram}[vocabulary.kind]
        flags: Mapping[str, AddedToken] = {}
        if vocabulary.rules is not None:
            build, flags = huggingface.encoder, huggingface.added_tokens(vocabulary)
        with wrap_tokenizer_errors("the tokenizer of this checkpoint cannot be made"):
            # Two of them: whether special tokens in the text are text or tokens cannot be chosen per call. The model,
            # which takes 0.1 s to make, is shared; tokens that are added are not part of it.
            if vocabulary.kind == "unigram":
                self._plain, self._special = build(_without_special(vocabulary)), build(vocabulary)
            else:
                self._plain = build(vocabulary)
                self._special = tokenizers.Tokenizer(self._plain.model)
                self._special.pre_tokenizer = self._plain.pre_tokenizer
                self._special.normalizer = self._plain.normalizer
            kinds = (USER_DEFINED, CONTROL, UNKNOWN)
            added = [i for i in vocabulary.not_normal if vocabulary.types[i] in kinds]
            self._added = [flags.get(vocabulary.tokens[i]) or _added_token(vocabulary, i) for i in added]
            self._special.add_tokens(self._added)
            self._plain.add_tokens([token for token in self._added if token.content not in self.special_tokens])

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Texts of the special tokens and their ids, longest first: GGUF's control tokens, and what ends a turn."""
        vocabulary, ends = self.vocabulary, self.stop_ids
        special = {
            vocabulary.tokens[i]: i
            for i in vocabulary.not_normal
            if vocabulary.types[i] in (CONTROL, UNKNOWN) or (vocabulary.types[i] == USER_DEFINED and i in ends)
        }
        return dict(sorted(special.items(), key=lambda item: -len(item[0])))

    def encode(self, text: str, add_special: bool = False, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special: put BOS and EOS where the checkpoint wants them. parse_special: read the text of a special token,
        such as <|im_end|>, as that token (default); False reads it as plain text.
        """
        vocabulary = self.vocabulary
        self._check_has_text()
        ids = _ids(self._special if parse_special else self._plain, text)
        if add_special and vocabulary.add_bos and vocabulary.bos is not None and ids[:1] != [vocabulary.bos]:
            ids = [vocabulary.bos, *ids]
        if add_special and vocabulary.add_eos and vocabulary.eos is not None:
            ids = [*ids, vocabulary.eos]
        return ids

    def _check_has_text(self) -> None:
        if self.vocabulary.kind == "none":
            raise InputError(
                "this file has no vocabulary, so that it reads no text: give token ids, such as generate([1, 2, 3]) in "
                "Python or a list as the prompt of /v1/completions"
            )

    def encoder_json(self) -> str:
        """The encoder that reads special tokens in the form of a tokenizer.json."""
        self._check_has_text()
        return str(self._special.to_str())

    def min_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least. Takes less time than to count them."""
        if (
            self.vocabulary.rules is not None
            or self.vocabulary.charsmap
            or self.vocabulary.remove_extra_whitespaces
            or not self._has_all_bytes
        ):
            return 0  # any number of characters may become nothing, or one unknown token
        if self.vocabulary.strip_before or self.vocabulary.strip_after:
            text = "".join(text.split())  # a token may take any number of spaces
        return -(-len(text.encode(errors="replace")) // self._max_token_bytes)

    @cached_property
    def _has_all_bytes(self) -> bool:
        vocabulary = self.vocabulary
        byte_tokens = [i for i in vocabulary.not_normal if vocabulary.types[i] == BYTE]
        return vocabulary.kind == "bpe" or len({vocabulary.tokens[i].upper() for i in byte_tokens}) == 256

    @cached_property
    def _max_token_bytes(self) -> int:
        """No more bytes of a text become one token. NFC makes a text shorter: to a third at most."""
        longest = max(len(text.encode(errors="replace")) for text in self.vocabulary.tokens)
        return longest if self._plain.normalizer is None else 3 * longest

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a text in which `mark`, a character, keeps apart what only looks like a special token.

        Special tokens without a mark in them are tokens; the marks are left out.
        """
        self._check_has_text()
        if mark not in text:
            return self.encode(text)
        if self.vocabulary.kind != "unigram":
            return _ids(self._without(mark), text)
        # Its model finds special tokens in what is left of the marks: each part by itself, by the model without them.
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self.special_tokens))})", text):
            if part in self.special_tokens:
                ids.append(self.special_tokens[part])
            elif part:
                ids.extend(self.encode(part.replace(mark, ""), parse_special=False))
        return ids

    def _without(self, mark: str) -> tokenizers.Tokenizer:
        """An encoder that takes marks out after it has looked for special tokens, and before all else."""
        encoder = tokenizers.Tokenizer(self._special.model)
        steps = [normalizers.Replace(mark, ""), *([self._special.normalizer] if self._special.normalizer else [])]
        encoder.normalizer = normalizers.Sequence(steps)
        if self._special.pre_tokenizer is not None:
            encoder.pre_tokenizer = self._special.pre_tokenizer
        for token in self._added:
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            # What is "normalized" would be looked for once more, when the marks are gone.
            normalized = token.normalized and token.content not in self.special_tokens
            encoder.add_tokens([AddedToken(token.content, normalized=normalized, **flags)])
        return encoder

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; special tokens have none."""
        try:
            at = operator.index(token)
        except TypeError:
            raise InputError(f"decode: a token id must be a whole number, got {reprlib.repr(token)}") from None
        if not 0 <= at < len(self.bytes_by_token):
            raise InputError(f"decode: a token id must lie in 0 … {len(self.bytes_by_token) - 1}, got {at}")
        return self.bytes_by_token[at]

    def piece(self, token: int) -> bytes:
        """The bytes of a token as they can be shown: those of a special token are its text."""
        raw, at = self.token_bytes(token), operator.index(token)
        special = self.vocabulary.types[at] in (CONTROL, UNKNOWN)
        return self.vocabulary.tokens[at].encode() if special else raw

    def text_or_bytes(self, token: int) -> str | list[int]:
        """The text of a token; where it is a part of a character, its bytes as numbers."""
        raw = self.piece(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, clean_spaces: bool = False) -> str:
        """The text of token ids. Broken UTF-8 becomes U+FFFD.

        skip_special: leave out special tokens, such as <|im_end|>. clean_spaces: take out spaces before punctuation and
        within contractions, for text of models that were trained on words with spaces between them. The text then no
        longer has the same ids.
        """
        if not isinstance(ids, Iterable):
            raise InputError(f"decode: ids must be a list of token ids, got {type(ids).__name__}")
        bytes_of = self.token_bytes if skip_special else self.piece
        text = b"".join(map(bytes_of, ids)).decode("utf-8", errors="replace")
        # The space that was put before the first word when it was encoded.
        text = text[1:] if self.vocabulary.add_space_prefix and text.startswith(" ") else text
        for spaced in _SPACED if clean_spaces else ():
            text = text.replace(spaced, spaced.strip())
        return text


def _added_token(vocabulary: Vocabulary, i: int) -> AddedToken:
    strips = {"lstrip": i in vocabulary.strip_before, "rstrip": i in vocabulary.strip_after}
    return AddedToken(vocabulary.tokens[i], normalized=False, **strips)


def _ids(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    if not isinstance(text, str):
        raise InputError(f"encode: text must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = "encode: text must be valid Unicode, it holds half a character (a lone surrogate)"
        raise InputError(problem) from None
    # In a batch other threads run meanwhile; `encode` of one text stops them, for 0.6 s if it has a megabyte.
    with wrap_tokenizer_errors("the tokenizer of this checkpoint is damaged"):
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def check_vocabulary(vocabulary: Vocabulary) -> None:
    """Refuse what no tokenizer can be built for. (Its merges are checked while it is built.)"""
    if vocabulary.kind == "bpe" and vocabulary.rules is None and vocabulary.pre not in SPLITS:
        known = ", ".join(SPLITS)
        raise ModelError(f"tokenizer.ggml.pre {reprlib.repr(vocabulary.pre)} is not known; it must be one of {known}")
    for i in vocabulary.not_normal:
        text = vocabulary.tokens[i]
        if vocabulary.types[i] == BYTE and not BYTE_TOKEN.fullmatch(text):
            raise ModelError(
                "tokenizer.ggml.tokens must have '<0x00>' … '<0xFF>' where tokenizer.ggml.token_type says byte "
                f"({BYTE}), the file has {reprlib.repr(text)} at {i}"
            )


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    pairs: Any = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    try:
        model = models.BPE(vocab=ids, merges=pairs, ignore_merges=SPLITS[vocabulary.pre].ignore_merges)
    except Exception:
        _check_merges(vocabulary, ids)  # takes 50 ms: only where something is wrong
        raise
    encoder = tokenizers.Tokenizer(model)
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[vocabulary.pre].patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    return encoder


def _check_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> None:
    """They must be pairs of tokens that make a token: `tokenizers` takes no other, and says so in a bare Exception."""
    for merge in vocabulary.merges:
        first, space, second = merge.partition(" ")
        if not space:
            raise ModelError(f"tokenizer.ggml.merges must hold pairs 'a b', the file has {reprlib.repr(merge)}")
        if first not in ids or second not in ids or first + second not in ids:
            missing = next(text for text in (first, second, first + second) if text not in ids)
            raise ModelError(
                f"tokenizer.ggml.merges must make tokens of tokens, the file has {reprlib.repr(merge)} but no token "
                f"{reprlib.repr(missing)}"
            )


def _sentence_piece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Pieces are merged, and what is no piece is written in bytes."""
    ids, texts = {text: i for i, text in enumerate(vocabulary.tokens)}, vocabulary.tokens
    unknown = None if vocabulary.unknown is None else texts[vocabulary.unknown]
    if vocabulary.ranked:
        pairs: Any = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    else:
        pairs = _scored_merges(vocabulary, ids)
    try:
        model = models.BPE(vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception:
        if vocabulary.ranked:
            _check_merges(vocabulary, ids)
        raise
    encoder = tokenizers.Tokenizer(model)
    encoder.normalizer = _normalizer(vocabulary)
    return encoder


def _scored_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, in the order of the pieces' scores."""
    merges = []
    for piece, i in ids.items():
        if vocabulary.types[i] in (NORMAL, USER_DEFINED):
            for cut in range(1, len(piece)):
                first, second = ids.get(piece[:cut]), ids.get(piece[cut:])
                if first is not None and second is not None:
                    merges.append((-vocabulary.scores[i], first, second))
    merges.sort()
    texts = vocabulary.tokens
    return [(texts[first], texts[second]) for _, first, second in merges]


def _without_special(vocabulary: Vocabulary) -> Vocabulary:
    """With texts that nobody can write in place of those of special tokens: a unigram model finds all its pieces."""
    tokens = list(vocabulary.tokens)
    for i in vocabulary.not_normal:
        if vocabulary.types[i] not in (USER_DEFINED, BYTE):
            tokens[i] = f"{secrets.token_hex(16)}-{i}"
    return replace(vocabulary, tokens=tokens)


def _unigram(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The pieces with the highest sum of scores."""
    if vocabulary.unknown is None:
        raise ModelError("tokenizer.ggml.unknown_token_id must be there for a vocabulary of the kind 't5'")
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    has_bytes = any(vocabulary.types[i] == BYTE for i in vocabulary.not_normal)
    model = models.Unigram(vocab=pieces, unk_id=vocabulary.unknown, byte_fallback=has_bytes)
    encoder = tokenizers.Tokenizer(model)
    encoder.normalizer = _normalizer(vocabulary)
    if has_bytes:  # the text <0x41> is not the piece of that byte
        encoder.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-Fa-f]{2}>)"), "merged_with_previous")
    return encoder


def _normalizer(vocabulary: Vocabulary) -> Any:
    """SentencePiece's: characters are replaced, extra spaces are taken out, one is put first, ▁ is written for each."""
    steps: list[Any] = []
    if vocabulary.charsmap:
        with wrap_tokenizer_errors("tokenizer.ggml.precompiled_charsmap cannot be read"):
            steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    if vocabulary.add_space_prefix:
        steps.append(normalizers.Prepend(" "))
    if vocabulary.escape_whitespaces:
        steps.append(normalizers.Replace(" ", "▁"))
    return normalizers.Sequence(steps)


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself, or one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class _TokenBytes(Sequence[bytes]):
    """The bytes of every token, each worked out when it is first asked for: a generation sees few of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._vocabulary.tokens)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        known = self._known.get(at)
        if known is None:
            if not -len(self) <= at < len(self):
                raise IndexError(at)
            known = self._known[at] = _token_bytes(self._vocabulary, at)
        return known


# As Latin-1, a character is the byte of its number; those that are not in the alphabet are made to fail.
_TO_LATIN_1 = dict.fromkeys(range(256), 0x400) | {ord(shown): byte for shown, byte in byte_alphabet().items()}


def _token_bytes(vocabulary: Vocabulary, token: int) -> bytes:
    text, kind = vocabulary.tokens[token], vocabulary.types[token]
    if kind in (CONTROL, UNKNOWN):
        return b""
    if kind == BYTE:
        return bytes.fromhex(text[3:5])  # `check_vocabulary` has seen it
    if vocabulary.kind != "bpe":
        return text.replace("▁", " ").encode()
    if kind == USER_DEFINED:
        return text.encode()
    try:
        return text.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _stop_ids(vocabulary: Vocabulary) -> frozenset[int]:
    ends = {i for i in vocabulary.not_normal if vocabulary.types[i] in (CONTROL, USER_DEFINED)}
    turn_ends = {i for i in ends if vocabulary.tokens[i] in _TURN_ENDS}
    return frozenset(turn_ends | set(vocabulary.ends) | ({vocabulary.eos} if vocabulary.eos is not None else set()))
