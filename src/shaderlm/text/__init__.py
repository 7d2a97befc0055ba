"""Text ↔ token ids, chat templates, streaming. Knows neither models nor GPU."""

from .chat import ChatTemplate, RenderLimits
from .chat_output import CallDelta, ChatDelta, ChatFormat, ChatParser, ContentDelta, ReasoningDelta
from .stream import TextStream
from .tokenizer import Tokenizer, check_vocabulary
from .tools import Tool, ToolChoice, call_format, read_tools
from .vocabulary import Vocabulary

__all__ = [
    "CallDelta",
    "ChatDelta",
    "ChatFormat",
    "ChatParser",
    "ChatTemplate",
    "ContentDelta",
    "ReasoningDelta",
    "RenderLimits",
    "TextStream",
    "Tokenizer",
    "Tool",
    "ToolChoice",
    "Vocabulary",
    "call_format",
    "check_vocabulary",
    "read_tools",
]
