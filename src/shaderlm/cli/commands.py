"""All commands by name. One is imported when it is run: a list of them needs their summaries alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import click

from .arguments import CommandGroup
from .config import configure

# What each does, as its help begins; and its module, where that has another name.
SUMMARIES = {
    "batch": "Run a file of requests, many at once.",
    "bench": "Measure the speed of models, with the tests of llama-bench.",
    "chat": "Chat with a model.",
    "completion": "Print a script that completes words in a shell.",
    "devices": "List the WebGPU adapters of this machine, the default first.",
    "export-web": "Write a model as static files that browsers run.",
    "generate": "Answer a prompt, or continue a text.",
    "info": "Show what a model is, whether it runs, and how large it is.",
    "models": "List the models that are kept here, and the short names.",
    "perplexity": "Measure how well a model predicts a text.",
    "plan": "Print the plans of a model: its kernels in their order.",
    "profile": "Time every dispatch of a prefill and of decoding.",
    "ps": "List the models of a server that runs.",
    "pull": "Fetch a model.",
    "rm": "Remove a model, or what is left of its download.",
    "run": "Chat with a model, or answer PROMPT and end.",
    "serve": "Answer the HTTP APIs of OpenAI, Anthropic, llama.cpp and Ollama.",
    "stop": "Close a model of a server that runs.",
    "tokenize": "Show the tokens of a text, or the text of tokens.",
    "tune": "Find the fastest kernels for a model on this device.",
}
# What other programs call them, Ollama and vLLM first.
_ELSEWHERE = {
    "list": "models", "ls": "models", "show": "info", "help": "--help", "version": "--version", "remove": "rm",
    "delete": "rm", "download": "pull", "server": "serve", "complete": "generate", "cli": "run",
}  # fmt: skip
_MODULES = {
    **dict.fromkeys(("models", "pull", "rm"), "local_models"),
    **dict.fromkeys(("ps", "stop"), "server_models"),
}


class App(CommandGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added to them

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As any group does, but names that other programs have are explained."""
        if args[0] in _ELSEWHERE:
            raise click.UsageError(f"No such command '{args[0]}'. It is `shaderlm {_ELSEWHERE[args[0]]}` here.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without a look at each."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


class _Commands(Mapping[str, click.Command]):
    """The commands of `shaderlm`, each imported when it is looked up."""

    def __init__(self) -> None:
        self._imported: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in SUMMARIES:
            raise KeyError(name)
        if name not in self._imported:
            attribute = name.replace("-", "_")
            module = import_module(f".{_MODULES.get(name, attribute)}", __package__)
            command: click.Command = getattr(module, attribute)
            configure(command, name)
            self._imported[name] = command
        return self._imported[name]

    def __contains__(self, name: object) -> bool:
        return name in SUMMARIES

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)
