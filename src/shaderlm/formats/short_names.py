"""Names that are quicker to type: each stands for one quantised GGUF file of the hub.

A row needs an architecture that runs, and a public list that names its repository, its file and the size. The hub
itself was not asked: a download says the size that the hub answers. By family, then by size.

| list | read at | what it is |
|---|---|---|
| `CATALOG` | ca0809d of 2026-08-22 | `dist/catalog.json.gz`: answers of the hub, sizes in MiB or GiB with one digit |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

CATALOG = "https://github.com/AtomicBot-ai/atomic-chat-model-catalog"


class ShortName(NamedTuple):
    """A file of a repository, about how many GB (10^9 bytes) it has, and the list where this was seen."""

    repo: str
    file: str
    gigabytes: float
    seen: str = CATALOG

    @property
    def model(self) -> str:
        """The name that `find` and `load` take."""
        return f"hf:{self.repo}/{self.file}"


SHORT_NAMES: Mapping[str, ShortName] = {
    "smollm2-360m": ShortName("bartowski/SmolLM2-360M-Instruct-GGUF", "SmolLM2-360M-Instruct-Q4_K_M.gguf", 0.27),
    "smollm2-1.7b": ShortName("bartowski/SmolLM2-1.7B-Instruct-GGUF", "SmolLM2-1.7B-Instruct-Q4_K_M.gguf", 1.06),
    "smollm3-3b": ShortName("ggml-org/SmolLM3-3B-GGUF", "SmolLM3-Q4_K_M.gguf", 1.9),
    "tinyllama-1.1b": ShortName(
        "QuantFactory/TinyLlama-1.1B-Chat-v1.0-GGUF", "TinyLlama-1.1B-Chat-v1.0.Q4_K_M.gguf", 0.67
    ),
    "llama3.2-1b": ShortName("bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf", 0.81),
    "llama3.2-3b": ShortName("bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q4_K_M.gguf", 2.0),
    "llama3.1-8b": ShortName(
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", 4.9
    ),
    "mistral-7b": ShortName("bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Mistral-7B-Instruct-v0.3-Q4_K_M.gguf", 4.4),
    "mistral-nemo-12b": ShortName(
        "bartowski/Mistral-Nemo-Instruct-2407-GGUF", "Mistral-Nemo-Instruct-2407-Q4_K_M.gguf", 7.5
    ),
    "mistral-small-24b": ShortName(
        "bartowski/Mistral-Small-24B-Instruct-2501-GGUF", "Mistral-Small-24B-Instruct-2501-Q4_K_M.gguf", 14.3
    ),
    "qwen2.5-0.5b": ShortName("bartowski/Qwen2.5-0.5B-Instruct-GGUF", "Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", 0.4),
    "qwen2.5-1.5b": ShortName("bartowski/Qwen2.5-1.5B-Instruct-GGUF", "Qwen2.5-1.5B-Instruct-Q4_K_M.gguf", 0.99),
    "qwen2.5-3b": ShortName("bartowski/Qwen2.5-3B-Instruct-GGUF", "Qwen2.5-3B-Instruct-Q4_K_M.gguf", 1.9),
    "qwen2.5-7b": ShortName("bartowski/Qwen2.5-7B-Instruct-GGUF", "Qwen2.5-7B-Instruct-Q4_K_M.gguf", 4.7),
    "qwen2.5-14b": ShortName("bartowski/Qwen2.5-14B-Instruct-GGUF", "Qwen2.5-14B-Instruct-Q4_K_M.gguf", 9.0),
    "qwen2.5-coder-1.5b": ShortName(
        "bartowski/Qwen2.5-Coder-1.5B-Instruct-GGUF", "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf", 0.99
    ),
    "qwen2.5-coder-7b": ShortName(
        "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF", "Qwen2.5-Coder-7B-Instruct-Q4_K_M.gguf", 4.7
    ),
    "qwen2.5-coder-14b": ShortName(
        "bartowski/Qwen2.5-Coder-14B-Instruct-GGUF", "Qwen2.5-Coder-14B-Instruct-Q4_K_M.gguf", 9.0
    ),
    "qwen3-0.6b": ShortName("unsloth/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q4_K_M.gguf", 0.4),
    "qwen3-1.7b": ShortName("unsloth/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q4_K_M.gguf", 1.1),
    "qwen3-4b": ShortName("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", 2.5),
    "qwen3-4b-2507": ShortName("unsloth/Qwen3-4B-Instruct-2507-GGUF", "Qwen3-4B-Instruct-2507-Q4_K_M.gguf", 2.5),
    "qwen3-8b": ShortName("Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", 5.0),
    "qwen3-14b": ShortName("Qwen/Qwen3-14B-GGUF", "Qwen3-14B-Q4_K_M.gguf", 9.0),
    "qwen3-30b-a3b": ShortName("Qwen/Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B-Q4_K_M.gguf", 18.6),
    "qwen3-coder-30b-a3b": ShortName(
        "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF", "Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf", 18.6
    ),
    "gemma2-2b": ShortName("bartowski/gemma-2-2b-it-GGUF", "gemma-2-2b-it-Q4_K_M.gguf", 1.7),
    "gemma2-9b": ShortName("bartowski/gemma-2-9b-it-GGUF", "gemma-2-9b-it-Q4_K_M.gguf", 5.8),
    "gemma3-270m": ShortName("unsloth/gemma-3-270m-it-GGUF", "gemma-3-270m-it-Q4_K_M.gguf", 0.25),
    "gemma3-1b": ShortName("ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf", 0.81),
    "gemma3-4b": ShortName("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf", 2.5),
    "gemma3-12b": ShortName("ggml-org/gemma-3-12b-it-GGUF", "gemma-3-12b-it-Q4_K_M.gguf", 7.3),
    "phi3.5-mini": ShortName("bartowski/Phi-3.5-mini-instruct-GGUF", "Phi-3.5-mini-instruct-Q4_K_M.gguf", 2.4),
    "phi4-mini": ShortName(
        "bartowski/microsoft_Phi-4-mini-instruct-GGUF", "microsoft_Phi-4-mini-instruct-Q4_K_M.gguf", 2.5
    ),
    "phi4-14b": ShortName("bartowski/phi-4-GGUF", "phi-4-Q4_K_M.gguf", 9.0),
    "gpt-oss-20b": ShortName("bartowski/openai_gpt-oss-20b-GGUF", "openai_gpt-oss-20b-MXFP4.gguf", 12.1),
    "deepseek-r1-1.5b": ShortName(
        "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF", "DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf", 1.1
    ),
    "deepseek-r1-7b": ShortName(
        "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF", "DeepSeek-R1-Distill-Qwen-7B-Q4_K_M.gguf", 4.7
    ),
    "deepseek-r1-14b": ShortName(
        "bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF", "DeepSeek-R1-Distill-Qwen-14B-Q4_K_M.gguf", 9.0
    ),
}
