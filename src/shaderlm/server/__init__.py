"""`shaderlm serve`: OpenAI's, Anthropic's, llama-server's and Ollama's HTTP APIs over one engine.

Needs the packages of the extra `shaderlm[serve]`. Imported by the command line alone.
"""
