"""`shaderlm completion`: scripts that let a shell complete commands, options, files and names of models."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterable
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

VARIABLE = "_SHADERLM_COMPLETE"  # says that a shell asks, and which
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
# A name of a file may have any character. bash inserts a completion as it is, and runs what `$(…)` in it says.
_SPECIAL = re.compile(r"[^\w./:@%+=,-]")


class Bash(BashComplete):
    """Bash takes `hf:ORG/REPO` for three words, of which it replaces the last, and `--model=NAME` for three, too."""

    # Before bash 4.4 there is no nosort, and in 3.2, which macOS has, no compopt: files are where nothing else is.
    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' line
    COMPREPLY=()
    while read -r line; do
        case $line in
            plain,*) COMPREPLY+=("${line#plain,}") ;;
            dir,*) compopt -o dirnames 2>/dev/null ;;
            file,*) compopt -o default 2>/dev/null ;;
        esac
    done < <(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s 2>/dev/null ||
    complete -o default -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The whole words before the one to complete, and that one."""
        args, incomplete = super().get_completion_args()
        args = [word for word in args if word != "="]
        if incomplete == ":" and args:
            incomplete = f"{args.pop()}:"
        while len(args) > 1 and args[-1] == ":":
            incomplete = f"{args[-2]}:{incomplete}"
            del args[-2:]
        self._replaced = incomplete.rpartition(":")[0]
        self._is_quoted = _has_open_quote(os.environ["COMP_WORDS"])
        return args, incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        """Without what cannot be written between quotes as it is."""
        items = super().get_completions(args, incomplete)
        if not self._is_quoted:
            return items
        return [each for each in items if each.type != "plain" or not _SPECIAL.search(each.value)]

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """The part that bash replaces."""
        value = str(item.value)
        if self._replaced:
            value = value.removeprefix(f"{self._replaced}:")
        escaped = _SPECIAL.sub(r"\\\g<0>", value)
        return f"{item.type},{escaped}"


def _has_open_quote(words: str) -> bool:
    try:
        shlex.split(words)
    except ValueError:
        return True
    return False


add_completion_class(Bash)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes words in a shell.

    Words are commands, options, their values, files and names of models.

    \b
    bash  echo 'eval "$(shaderlm completion bash)"' >> ~/.bashrc
    zsh   echo 'source <(shaderlm completion zsh)' >> ~/.zshrc
    fish  shaderlm completion fish > ~/.config/fish/completions/shaderlm.fish
    """
    of_shell = get_completion_class(shell)
    assert of_shell is not None
    app = click.get_current_context().find_root().command
    script = of_shell(app, {}, "shaderlm", VARIABLE)
    print(script.source_template % script.source_vars())  # `source()` would start a bash, to see its version


def complete_models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Names of models: those that are here, and the short ones; and files."""
    names = {*_short_names(), *_local_names()}
    if os.environ.get(VARIABLE, "").startswith("bash"):  # it completes files only where there is nothing else
        names.update(glob.iglob(f"{glob.escape(incomplete)}*.gguf"))
    return [*complete_files(context, parameter, incomplete), *_matching(names, incomplete)]


def complete_local_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Names of models that are here."""
    return _matching(_local_names(), incomplete)


def complete_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Short names of models."""
    return _matching(_short_names(), incomplete)


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Files."""
    return [CompletionItem(incomplete, type="file")]


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem[str]]:
    # A name is a line of what a shell reads.
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and name.isprintable()]


def _short_names() -> list[str]:
    from ..formats.default_model import NAME
    from ..formats.short_names import SHORT_NAMES

    return [NAME, *SHORT_NAMES]


def _local_names() -> list[str]:
    """As `formats.local_models` lists them, which takes 0.1 s to import: only by the names of files."""
    from ..errors import ShaderlmError
    from ..files import cache_directory
    from ..formats.hub_transfer import folders

    try:
        names = [path.stem for path in (cache_directory() / "quantized").glob("[!.]*.gguf")]
        for repo, folder in folders().items():
            snapshots = (folder / "snapshots").glob("*")
            files = {path.relative_to(each).as_posix() for each in snapshots for path in each.rglob("*.*")}
            if any(file.endswith(".safetensors") for file in files):
                names.append(f"hf:{repo}")
            names += [f"hf:{repo}/{file}" for file in files if file.endswith(".gguf") and not _LATER_PART.search(file)]
        return names
    except (OSError, ShaderlmError):  # a completion prints nothing but completions
        return []
