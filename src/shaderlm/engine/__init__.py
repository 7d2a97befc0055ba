"""Loading, prefill, decode, sampling, stopping: the Python API. Knows no HTTP."""

from .completion import Completion, PromptLogprobs, Timing, TokenLogprob
from .driver import Engine
from .handle import Handle
from .histogram import Histogram
from .language_model import LanguageModel
from .loading import load
from .options import ChatOptions, GenerationOptions
from .request import Constraint, ConstraintFactory, Delta, EngineOptions, EngineStats, Request, SequenceInfo, Usage
from .sampling import SamplingParams
from .stream import AsyncStream, Stream

__all__ = [
    "AsyncStream",
    "ChatOptions",
    "Completion",
    "Constraint",
    "ConstraintFactory",
    "Delta",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "GenerationOptions",
    "Handle",
    "Histogram",
    "LanguageModel",
    "PromptLogprobs",
    "Request",
    "SamplingParams",
    "SequenceInfo",
    "Stream",
    "Timing",
    "TokenLogprob",
    "Usage",
    "load",
]
