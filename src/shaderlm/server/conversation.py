"""A conversation in the form of chat templates, whichever API it came by, and the engine's request for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine import LanguageModel, Request
from ..text import ChatTemplate
from ..text.chat import join_parts
from .errors import ApiError
from .served import ServedModel
from .types.anthropic import TextBlock
from .types.common import ConversationFields
from .types.openai import TextPart
from .types.responses import InputPart


@dataclass
class Conversation:
    """What a chat template renders. Tools and their choice are in OpenAI's form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False

    def request(self, served: ServedModel, options: Mapping[str, Any], *, reasoning: bool = True) -> Request:
        """What the engine runs. It says how its answer is told apart, too."""
        _template_of(served.model)
        return served.model.chat_request(
            self.messages,
            tools=self.tools or None,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning=reasoning and served.reasoning == "auto",
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
            **options,
        )

    def _rendering(self) -> dict[str, Any]:
        tools = None if self.tool_choice == "none" else self.tools or None
        return {"tools": tools, "continue_final_message": self.continue_final_message}

    def ids(self, model: LanguageModel) -> list[int]:
        """Its tokens."""
        _template_of(model)
        return model.chat_ids(self.messages, template_kwargs=self.template_kwargs, **self._rendering())

    def text(self, model: LanguageModel) -> str:
        """Its text, for whoever wants to see it."""
        return _template_of(model).render(self.messages, kwargs=self.template_kwargs, **self._rendering())


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


def join_text(content: str | Sequence[TextPart | InputPart | TextBlock]) -> str:
    """The text of a content that may come in parts."""
    return content if isinstance(content, str) else join_parts(part.text for part in content)


def template_kwargs(body: ConversationFields, effort: str | None) -> dict[str, Any]:
    """Variables for the template. `effort`: how much the model thinks, unless they say it, too."""
    return ({} if effort is None else {"reasoning_effort": effort}) | (body.chat_template_kwargs or {})
