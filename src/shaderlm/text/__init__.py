"""Text ↔ token ids, chat templates, streaming. Knows neither models nor GPU."""

from .chat import ChatTemplate
from .stream import TextStream
from .tokenizer import Tokenizer, check_vocabulary
from .vocabulary import Vocabulary

__all__ = ["ChatTemplate", "TextStream", "Tokenizer", "Vocabulary", "check_vocabulary"]
