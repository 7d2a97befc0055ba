"""shaderlm: large language models on any GPU, from Python, through WebGPU."""

__version__ = "0.1.0.dev0"
