"""Bytes on disk → named arrays: GGUF files, the table of weight formats, where models are found. No GPU, no text."""
