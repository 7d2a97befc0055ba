"""Text ↔ token ids, chat templates, streaming. Knows neither models nor GPU."""

from .call_form import CallForm, Hole, JsonArguments, KeyedArguments, Parameters
from .chat import ChatTemplate, RenderLimits
from .chat_output import CallDelta, ChatDelta, ChatFormat, ChatParser, ContentDelta, ReasoningDelta
from .stream import TextStream
from .tokenizer import Tokenizer, check_vocabulary
from .tools import Tool, ToolChoice, read_tools
from .vocabulary import Vocabulary

__all__ = [
    "CallDelta",
    "CallForm",
    "ChatDelta",
    "ChatFormat",
    "ChatParser",
    "ChatTemplate",
    "ContentDelta",
    "Hole",
    "JsonArguments",
    "KeyedArguments",
    "Parameters",
    "ReasoningDelta",
    "RenderLimits",
    "TextStream",
    "Tokenizer",
    "Tool",
    "ToolChoice",
    "Vocabulary",
    "check_vocabulary",
    "read_tools",
]
