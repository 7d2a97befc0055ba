"""A conversation in the form of chat templates, whichever API it came by, and the engine's request for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..engine import Constraint, LanguageModel, Request
from ..text.reasoning import OPEN, ReasoningParser
from .answers import AnswerParser
from .errors import unsupported
from .served import Served


@dataclass
class ToolUse:
    """Functions in OpenAI's form, and whether they are called."""

    tools: list[dict[str, Any]]
    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with "required": this one
    parallel: bool = True


@dataclass
class Conversation:
    """What a chat template renders."""

    messages: list[dict[str, Any]]
    tools: ToolUse | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False

    def ids(self, model: LanguageModel) -> list[int]:
        """Its tokens."""
        return model.chat_ids(
            self.messages,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )

    def text(self, model: LanguageModel) -> str:
        """Its text, for whoever wants to see it."""
        template = model.chat_template
        if template is None:
            raise unsupported("messages", "this model has no chat template; use /v1/completions")
        return template.render(
            self.messages, continue_final_message=self.continue_final_message, kwargs=self.template_kwargs
        )


def chat_request(
    served: Served,
    conversation: Conversation,
    options: Mapping[str, Any],
    constraint: Constraint | None,
    *,
    reasoning: bool = True,
) -> tuple[Request, Callable[[], AnswerParser]]:
    """The engine's request, and what makes parsers of its answers."""
    if conversation.tools is not None and conversation.tools.tools and conversation.tools.choice != "none":
        raise unsupported("tools", "leave them out")
    ids = conversation.ids(served.model)
    request = replace(served.model.request(ids, **options), constraint=constraint)
    splits = reasoning and served.reasoning == "auto" and reasons(served.model)
    inside = splits and served.model.detokenize(ids[-8:]).rstrip().endswith(OPEN)

    def parser() -> AnswerParser:
        return AnswerParser(ReasoningParser(inside=inside) if splits else None)

    return request, parser


def reasons(model: LanguageModel) -> bool:
    """Does its chat template know thinking tags?"""
    template = model.chat_template
    return template is not None and OPEN in str(template.source)
