"""How byte-level vocabularies split text into words before merging: one table, by GGUF's `tokenizer.ggml.pre`.

Each expression splits what the ones before it left: its matches, and what is between them, are parts of their own.
The expressions are for Oniguruma, the engine of `tokenizers`. Each takes time in proportion to the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The expressions of a vocabulary, and what else its name decides.

    ignore_merges: a word that is a token stays whole. add_bos: BOS goes first, where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_NUMBER = r"\p{N}"
# Words of one script with the sign before them; numbers of one digit, or of up to three.
_WORDS = rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_ONE_DIGIT, _THREE_DIGITS = _WORDS % "", _WORDS % "{1,3}"
_SEED_CODER = rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"


def _cased(upper: str, lower: str, ending: str, number: str, signs: str) -> str:
    """A word is capital letters, then small ones: HTTPServer is two words."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+{signs}|{_SPACES}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = _cased(_UPPER, _LOWER, "", r"\p{N}", r"[\r\n/]*")
_GPT_4O = _cased(_UPPER, _LOWER, f"(?i:{_ENDINGS})?", r"\p{N}{1,3}", r"[\r\n/]*")
_NOT_HAN = r"(?:(?!\p{Han})%s)"
_KIMI = r"\p{Han}+|" + _cased(_NOT_HAN % _UPPER, _NOT_HAN % _LOWER, f"(?i:{_ENDINGS})?", r"\p{N}{1,3}", r"[\r\n]*")

_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE = "[0-9][0-9][0-9]"
_NOT_A_STOP = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# Ideographs, and what DeepSeek's vocabularies count among them.
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_IDEOGRAPHS_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Letters that have a case, as an early DeepSeek vocabulary lists them: not all that Unicode has.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s+$",  # as \s+$, which looks at each space of a run again and again
    _IDEOGRAPHS,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, _NUMBER)
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _IDEOGRAPHS_AND_KANA,
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
# Digits in threes, counted from the end of the number: the cuts of (?=(\d{3})+(?!\d)). That expression reads the rest
# of the number again for each digit. This one reads a number once, where it begins; then come its groups. The last
# group is no match, so that no cut is behind it.
_SUPERBPE = (
    r"\p{N}+",
    r"(?<!\d)\d{0,2}\K\d{3}(?=(?>(?:\d{3})+)(?!\d))|(?<!\d)\d{0,2}\K(?=\d{3}(?!\d))|\d{3}(?=\d)",
)

_LLAMA3 = Split((_THREE_DIGITS,), ignore_merges=True, add_bos=True)
_QWEN35 = (
    rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = (
    rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Vocabularies by what splits their text.
_ROWS: tuple[tuple[Split, str], ...] = (
    (Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE)), "default"),
    (Split((_GPT2,)), "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais mellum mpt olmo phi-2 trillion"),
    (Split((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (Split((_NOT_A_STOP,)), "bloom gpt3-finnish poro-chat"),
    (Split((_THREE_DIGITS,)), "chatglm-bpe dbrx glm4 smaug-bpe"),
    (Split((_NUMBER, _GPT2)), "codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder"),
    (Split(_DEEPSEEK_CODER), "deepseek-coder"),
    (Split(_DEEPSEEK_LLM), "deepseek-llm"),
    (Split((_ONE_DIGIT,)), "deepseek-r1-qwen grok-2 hunyuan kormo megrez qwen2 solar-open stablelm2"),
    (Split(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (Split((_PUNCTUATION, _GPT2, _THREE)), "falcon"),
    (_LLAMA3, "falcon-h1 falcon3 lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral"),
    (Split((_GPT_4O,)), "gpt-4o kanana2 llama4 minimax-m2"),
    (Split((_KIMI,)), "kimi-k2"),
    (Split((_QWEN35,)), "qwen35"),
    (Split((_SEED_CODER,)), "seed-coder"),
    (Split(_SUPERBPE), "superbpe"),
    (Split((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (Split((_NOT_A_STOP, _NUMBER)), "viking"),
)
SPLITS: Mapping[str, Split] = {name: split for split, names in _ROWS for name in names.split()}
