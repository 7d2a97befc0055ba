"""A conversation in the form of chat templates, whichever API it came by, and the engine's request for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine import LanguageModel, Request
from ..engine.vision import pictures_of
from ..text import ChatTemplate
from ..text.chat import join_parts
from .errors import ApiError
from .images import Images
from .served import ServedModel
from .types.anthropic import ImageBlock, TextBlock
from .types.common import ConversationFields
from .types.openai import ContentPart, ImagePart
from .types.responses import InputImage, InputPart


@dataclass
class Conversation:
    """What a chat template renders. Tools and their choice are in OpenAI's form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    thinking: bool | None = None  # None: as the server has it
    thinking_budget: int | None = None

    def request(
        self, served: ServedModel, options: Mapping[str, Any], images: Images, *, reasoning: bool | None = None
    ) -> Request:
        """What the engine runs. It says how its answer is told apart, too. `reasoning`: are thoughts?"""
        _template_of(served.model)
        request = served.model.chat_request(
            self.messages,
            client=images.client,
            tools=self.tools or None,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning=served.reasoning == "auto" if reasoning is None else reasoning,
            thinking_budget=self._budget(served),
            template_kwargs=self.template_kwargs,
            **self._ending(served),
            **options,
        )
        images.release()
        return request

    def _budget(self, served: ServedModel) -> int | None:
        budget = served.thinking_budget if self.thinking_budget in (None, -1) else self.thinking_budget
        return None if budget is None or budget < 0 else budget

    def _ending(self, served: ServedModel) -> dict[str, Any]:
        """What the prompt ends with."""
        return {
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt": self.add_generation_prompt,
            "thinking": served.thinking if self.thinking is None else self.thinking,
        }

    def _shown_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None

    def ids(self, served: ServedModel) -> list[int]:
        """Its tokens."""
        _template_of(served.model)
        return served.model.chat_ids(
            self.messages, tools=self._shown_tools(), template_kwargs=self.template_kwargs, **self._ending(served)
        )

    def text(self, served: ServedModel) -> str:
        """Its text, for whoever wants to see it."""
        messages, _ = pictures_of(self.messages)
        return _template_of(served.model).render(
            messages, tools=self._shown_tools(), kwargs=self.template_kwargs, **self._ending(served)
        )


def _template_of(model: LanguageModel) -> ChatTemplate:
    if model.chat_template is None:
        instead = "use /v1/completions, or start the server with --chat-template"
        raise ApiError(400, f"this model has no chat template; {instead}", param="messages")
    return model.chat_template


def function_tool(**fields: Any) -> dict[str, Any]:
    """A tool as templates read it: a function with the fields that it has."""
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def named_tool(name: str) -> dict[str, Any]:
    """The choice of one tool, which must be called."""
    return {"type": "function", "function": {"name": name}}


def allowed_tools(mode: str, names: Sequence[str]) -> dict[str, Any]:
    """The choice of some tools, which alone may be called."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named_tool(name) for name in names]}}


def check_hosted(hosted: Sequence[tuple[int, str]], functions: int) -> None:
    """Tools that a provider runs itself are not there: without functions beside them, they are an error.

    Agents name them in every request and go on without; who asks for nothing else would wait for a search in vain.
    """
    if hosted and not functions:
        i, kind = hosted[0]
        message = f"this server does not run {kind[:80]!r}; it calls functions, which the client runs: give some"
        raise ApiError(400, f"tools[{i}]: {message}", param=f"tools[{i}].type")


Part = ContentPart | InputPart | TextBlock | ImageBlock


def content_of(content: str | Sequence[Part], where: str, images: Images) -> str | list[dict[str, Any]]:
    """A content that may come in parts: its text, or parts for a template where there are pictures."""
    if isinstance(content, str):
        return content
    parts: list[str | dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, (ImagePart, InputImage, ImageBlock)):
            parts.append(images.part(f"{where}[{i}]", part.url))
        else:
            parts.append(part.text)
    return joined(parts)


def joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts as one, or with pictures between them as parts for a template."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return join_parts(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def thinking_of(body: ConversationFields, effort: str | None) -> dict[str, Any]:
    """Whether the model thinks and how long, and variables for the template. `effort`: how much, unless they say it."""
    none = effort == "none"
    kwargs = {} if effort is None or none else {"reasoning_effort": effort}
    budget = body.thinking_budget_tokens if body.reasoning_budget_tokens is None else body.reasoning_budget_tokens
    return {
        "thinking": False if none and body.enable_thinking is None else body.enable_thinking,
        "thinking_budget": budget,
        "template_kwargs": kwargs | (body.chat_template_kwargs or {}),
    }
