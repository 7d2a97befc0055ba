"""`shaderlm run`: `chat` or `generate` with a model that is named first, as in Ollama."""

from __future__ import annotations

from typing import Any

import click

from .cache_options import cache_options
from .chat import chat
from .completion import complete_models
from .draft_options import draft_options
from .generate import generate
from .options import CHAT_SAMPLING, load_options, sampling_options
from .prompts import TextCommand


@click.command(cls=TextCommand)
@click.argument("model", metavar="NAME", shell_complete=complete_models)
@click.argument("prompt", required=False)
@load_options
@cache_options
@draft_options
@sampling_options(max_tokens=1024, **CHAT_SAMPLING)
@click.option("--system", metavar="TEXT", help="A system message at the beginning.")
@click.option("-v", "--verbose", is_flag=True, help="Print how fast it ran, on stderr.")
@click.pass_context
def run(ctx: click.Context, /, prompt: str | None, **options: Any) -> None:
    """Chat with a model, or answer PROMPT and end.

    NAME is a short name of `shaderlm models`, a .gguf file, a Hugging Face folder, hf:ORG/REPO or
    hf:ORG/REPO/FILE.gguf. What is not here is downloaded once; its size is printed first. PROMPT `-` reads standard
    input.
    """
    if prompt is None:
        options["parse_special"] = bool(options["parse_special"])
        ctx.invoke(chat, **options)
    else:
        ctx.invoke(generate, prompt=prompt, **options)
