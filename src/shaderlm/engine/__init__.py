"""Loading, prefill, decode, sampling, stopping. Knows no HTTP."""

from .answer import Completion, Stream, TokenLogprob
from .language_model import LanguageModel
from .loading import load
from .sampling import Sampling

__all__ = ["Completion", "LanguageModel", "Sampling", "Stream", "TokenLogprob", "load"]
