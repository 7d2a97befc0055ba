"""Hugging Face folders as checkpoints under GGUF's keys and names: config.json, safetensors, tokenizer files."""
