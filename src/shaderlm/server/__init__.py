"""`shaderlm serve`: OpenAI's, Anthropic's and llama-server's HTTP APIs over one engine.

Needs the packages of the extra `shaderlm[serve]`. Imported by the command line alone.
"""
