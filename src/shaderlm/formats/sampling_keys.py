"""Options of sampling that a checkpoint may have its own values for."""

from __future__ import annotations

# The name of the option, which is also the one in generation_config.json, and GGUF's key.
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "repetition_penalty": "general.sampling.penalty_repeat",
    **{name: f"general.sampling.{name}" for name in ("top_k", "top_p", "min_p")},
}
