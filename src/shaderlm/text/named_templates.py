"""Chat templates by name, for models whose files have none or a wrong one. Names are those of llama.cpp.

Most are the same text around each message of a role. Tools are told in the messages, as `tools` does it.
"""

from __future__ import annotations

import json
from typing import NamedTuple

Around = tuple[str, str]  # what is before a message and after it


class _Form(NamedTuple):
    """A conversation as text. `answer`: what the model goes on from; `trim`: without white space around contents."""

    system: Around
    user: Around
    assistant: Around
    answer: str
    begin: str = ""
    trim: bool = False

    def jinja(self) -> str:
        """The same as a template."""
        content = "m['content'] | trim" if self.trim else "m['content']"
        branches = [
            f"{{% {word} m['role'] == '{role}' %}}{_text(before)}{{{{ {content} }}}}{_text(after)}"
            for word, role, (before, after) in (
                ("if", "system", self.system),
                ("elif", "assistant", self.assistant),
                ("elif", "user", self.user),
            )
        ]
        messages = f"{{% for m in messages %}}{''.join(branches)}{{% endif %}}{{% endfor %}}"
        answer = f"{{% if add_generation_prompt %}}{_text(self.answer)}{{% endif %}}" if self.answer else ""
        return _text(self.begin) + messages + answer


def _text(text: str) -> str:
    """A text as it is written in a template: line ends after tags would be lost."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _same(before: str, after: str, answer: str | None = None, *, begin: str = "", trim: bool = False) -> _Form:
    """All roles alike. Their names are where `ROLE` is."""
    system, user, assistant = ((before.replace("ROLE", role), after) for role in ("system", "user", "assistant"))
    return _Form(system, user, assistant, assistant[0] if answer is None else answer, begin, trim)


_GRANITE = _same("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\n")
_VICUNA = _Form(("", "\n\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:")
_EXAONE = _Form(
    *(("[|system|]", "[|endofturn|]\n"), ("[|user|]", "\n"), ("[|assistant|]", "[|endofturn|]\n"), "[|assistant|]"),
    trim=True,
)
_MISTRAL_7 = _Form(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), ("[INST] ", "[/INST]"), (" ", "</s>"), "")
_BAILING = _Form(
    *(("<role>SYSTEM</role>", ""), ("<role>HUMAN</role>", ""), ("<role>ASSISTANT</role>", "")), "<role>ASSISTANT</role>"
)
_FORMS = {
    "chatml": _same("<|im_start|>ROLE\n", "<|im_end|>\n"),
    "llama3": _same("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>", trim=True),
    "llama4": _same("<|header_start|>ROLE<|header_end|>\n\n", "<|eot|>", trim=True),
    "phi3": _same("<|ROLE|>\n", "<|end|>\n"),
    "phi4": _same("<|im_start|>ROLE<|im_sep|>", "<|im_end|>"),
    "falcon3": _same("<|ROLE|>\n", "\n"),
    "zephyr": _same("<|ROLE|>\n", "<|endoftext|>\n"),
    "chatglm3": _same("<|ROLE|>\n ", "", "<|assistant|>", begin="[gMASK]sop"),
    "chatglm4": _same("<|ROLE|>\n", "", begin="[gMASK]<sop>"),
    "glmedge": _same("<|ROLE|>\n", "", "<|assistant|>"),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "megrez": _same("<|role_start|>ROLE<|role_end|>", "<|turn_end|>"),
    "seed_oss": _same("<seed:bos>ROLE\n", "<seed:eos>"),
    "solar-open": _same("<|begin|>ROLE<|content|>", "<|end|>", "<|begin|>assistant"),
    "exaone-moe": _same("<|ROLE|>\n", "<|endofturn|>\n", trim=True),
    "command-r": _Form(
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        trim=True,
    ),
    "openchat": _Form(
        ("", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    "vicuna": _VICUNA,
    "vicuna-orca": _VICUNA._replace(system=("SYSTEM: ", "\n")),
    "deepseek": _Form(("", ""), ("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n"), "### Response:\n"),
    "deepseek2": _Form(("", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", "<｜end▁of▁sentence｜>"), "Assistant:"),
    "deepseek3": _Form(
        ("", "\n\n"), ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"), "<｜Assistant｜>"
    ),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE,
    "minicpm": _Form(("", ""), ("<用户>", "<AI>"), ("", ""), "", trim=True),
    "rwkv-world": _Form(("System: ", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", "\n\n"), "Assistant:", trim=True),
    "mistral-v7": _MISTRAL_7,
    "mistral-v7-tekken": _Form(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>"), ""),
    "smolvlm": _Form(
        *(("", "\n\n"), ("User: ", "<end_of_utterance>\n"), ("Assistant: ", "<end_of_utterance>\n"), "Assistant:"),
        begin="<|im_start|>",
    ),
    "bailing": _BAILING,
    "bailing-think": _BAILING._replace(answer="<role>ASSISTANT</role><think>"),
    "gpt-oss": _Form(
        ("<|start|>system<|message|>", "<|end|>"),
        ("<|start|>user<|message|>", "<|end|>"),
        ("<|start|>assistant<|message|>", "<|return|>"),
        "<|start|>assistant",
    ),
    "kimi-k2": _Form(
        ("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "grok-2": _Form(
        ("System: ", "<|separator|>\n\n"),
        ("Human: ", "<|separator|>\n\n"),
        ("Assistant: ", "<|separator|>\n\n"),
        "Assistant:",
    ),
    "hunyuan-moe": _Form(("<|startoftext|>", "<|extra_4|>"), ("<|startoftext|>", "<|extra_0|>"), ("", "<|eos|>"), ""),
}


def _turns(begin: str, system: Around, end: str, assistant: Around, *, trim: str = "", first: str | None = None) -> str:
    """A turn is a system message, if there is one, and the user's, within one pair of tags."""
    start = f"{{% if loop.first %}}{_text(begin if first is None else first)}{{% elif not ns.inside %}}{_text(begin)}"
    content = f"{{{{ m['content']{trim} }}}}"
    return (
        "{% set ns = namespace(inside=false) %}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        f"{_text(assistant[0])}{content}{_text(assistant[1])}{{% set ns.inside = false %}}{{% else %}}"
        f"{start}{{% endif %}}{{% set ns.inside = true %}}{{% if m['role'] == 'system' %}}"
        f"{_text(system[0])}{content}{_text(system[1])}{{% else %}}{content}{_text(end)}{{% endif %}}"
        "{% endif %}{% endfor %}"
    )


def _system_in_user(before: str, after: str, assistant: Around, answer: str, *, trim: str = "") -> str:
    """What the system says is the beginning of the next message of the user."""
    content = f"{{{{ m['content']{trim} }}}}"
    return (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
        f"{{% set ns.system = ns.system + (m['content']{trim}) %}}{{% elif m['role'] == 'user' %}}{_text(before)}"
        f"{{% if ns.system %}}{{{{ ns.system }}}}{_text(chr(10) * 2)}{{% set ns.system = '' %}}{{% endif %}}"
        f"{content}{_text(after)}{{% else %}}{_text(assistant[0])}{content}{_text(assistant[1])}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{_text(answer)}{{% endif %}}"
    )


_SYSTEM = ("<<SYS>>\n", "\n<</SYS>>\n\n")
_WRITTEN = {
    "llama2": _turns("[INST] ", ("", "\n"), " [/INST]", ("", "</s>")),
    "llama2-sys": _turns("[INST] ", _SYSTEM, " [/INST]", ("", "</s>")),
    "llama2-sys-bos": _turns("<s>[INST] ", _SYSTEM, " [/INST]", ("", "</s>"), first="[INST] "),
    "llama2-sys-strip": _turns("[INST] ", _SYSTEM, " [/INST]", ("", "</s>"), trim=" | trim"),
    "mistral-v1": _turns(" [INST] ", ("", "\n\n"), " [/INST]", (" ", "</s>")),
    "mistral-v3": _turns("[INST] ", ("", "\n\n"), "[/INST]", (" ", "</s>")),
    "mistral-v3-tekken": _turns("[INST]", ("", "\n\n"), "[/INST]", ("", "</s>")),
    "gemma": _system_in_user(
        *("<start_of_turn>user\n", "<end_of_turn>\n", ("<start_of_turn>model\n", "<end_of_turn>\n")),
        *("<start_of_turn>model\n",),
        trim=" | trim",
    ),
    "orion": _system_in_user("Human: ", "\n\nAssistant: </s>", ("", "</s>"), ""),
    "monarch": (
        "{% for m in messages %}{% if not loop.first %}<s>{% endif %}{{ m['role'] + '\\n' + m['content'] + '</s>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
    ),
}
NAMED_TEMPLATES: dict[str, str] = {**{name: form.jinja() for name, form in _FORMS.items()}, **_WRITTEN}
