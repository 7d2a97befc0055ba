"""A conversation in the form of chat templates, whichever API it came by, and the engine's request for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine import LanguageModel, Request
from .errors import unsupported
from .served import ServedModel


@dataclass
class Conversation:
    """What a chat template renders. Tools and their choice are in OpenAI's form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False

    def request(self, served: ServedModel, options: Mapping[str, Any], *, reasoning: bool = True) -> Request:
        """What the engine runs. It says how its answer is told apart, too."""
        return served.model.chat_request(
            self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning=reasoning and served.reasoning == "auto",
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
            **options,
        )

    def _shown_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None

    def ids(self, model: LanguageModel) -> list[int]:
        """Its tokens."""
        return model.chat_ids(
            self.messages,
            tools=self._shown_tools(),
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )

    def text(self, model: LanguageModel) -> str:
        """Its text, for whoever wants to see it."""
        template = model.chat_template
        if template is None:
            raise unsupported("messages", "this model has no chat template; use /v1/completions")
        return template.render(
            self.messages,
            tools=self._shown_tools(),
            continue_final_message=self.continue_final_message,
            kwargs=self.template_kwargs,
        )
