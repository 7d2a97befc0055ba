"""Names that are quicker to type, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping

SHORT_NAMES: Mapping[str, str] = {
    "smollm2-360m": "hf:HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "hf:HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "tinyllama-1.1b": "hf:TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llama3.2-1b": "hf:meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "hf:meta-llama/Llama-3.2-3B-Instruct",
    "llama3.1-8b": "hf:meta-llama/Llama-3.1-8B-Instruct",
    "mistral-7b": "hf:mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-0.5b": "hf:Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b": "hf:Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "hf:Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "hf:Qwen/Qwen3-1.7B",
    "qwen3-4b": "hf:Qwen/Qwen3-4B",
    "qwen3-8b": "hf:Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "hf:Qwen/Qwen3-30B-A3B",
    "smollm3-3b": "hf:HuggingFaceTB/SmolLM3-3B",
    "gemma3-1b": "hf:google/gemma-3-1b-it",
    "phi4-mini": "hf:microsoft/Phi-4-mini-instruct",
    "gpt-oss-20b": "hf:openai/gpt-oss-20b",
}
