"""Loading, prefill, decode, sampling, stopping: the Python API. Knows no HTTP."""

from .completion import Completion, Stream, TokenLogprob
from .language_model import LanguageModel
from .loading import load
from .options import GenerationOptions
from .sampling import SamplingParams

__all__ = ["Completion", "GenerationOptions", "LanguageModel", "SamplingParams", "Stream", "TokenLogprob", "load"]
