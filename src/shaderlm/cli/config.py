"""Options from the environment and from a file, for what the command line leaves out.

`--max-tokens` of `generate` is SHADERLM_GENERATE_MAX_TOKENS in the environment, and `max-tokens` below `[generate]` in
the file. The command line goes first, then the environment, then the file, then the default.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import InputError

_PREFIX = "SHADERLM"
_TELLING = 4  # characters: a shorter value may be in an error by chance
_FILE = "shaderlm.config"  # of a context's meta: the file that was read
_log = logging.getLogger(__name__)
_values: dict[str, tuple[str, str]] = {}  # of the command that runs, from elsewhere: option → value and place


def options_of(command: click.Command) -> dict[str, click.Option]:
    """The options of a command that have a value here, by their long names without dashes."""
    options = [each for each in command.params if isinstance(each, click.Option) and not each.is_eager]
    return {name[2:]: option for option in options for name in option.opts if name.startswith("--")}


def configure(command: click.Command, *names: str, below: bool = True) -> None:
    """Let a command, and those `below` it, take options from elsewhere: each name has a variable of the environment."""
    options = options_of(command)
    for option in options.values():
        option.envvar = [_variable((*names, name)) for name, each in options.items() if each is option]
    if command.callback is not None:
        command.callback = _with_values(command.callback, names)
    for name, each in subcommands(command).items() if below else ():
        configure(each, *names, name)


def subcommands(command: click.Command) -> Mapping[str, click.Command]:
    """The commands below a command."""
    return command.commands if isinstance(command, click.Group) else {}


def default_file() -> Path | None:
    """Where the file is without `--config`; None if there is no home directory."""
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming") / "shaderlm" / "config.toml"
        place = Path(os.environ.get("XDG_CONFIG_HOME", ""))
        return (place if place.is_absolute() else Path.home() / ".config") / "shaderlm" / "config.toml"
    except RuntimeError:
        return None


def use_file(context: click.Context, path: str | None) -> None:
    """Read the file and make its values the defaults of the commands below this context."""
    _values.clear()  # of an earlier command in this process
    file = default_file() if path is None else Path(path)
    if file is None or (path is None and not os.path.isfile(file)):
        return
    context.default_map = option_values(context.command, read_tables(file), file, ())
    context.meta[_FILE] = file


def read_tables(file: Path) -> dict[str, Any]:
    """A TOML file."""
    import tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as problem:
        raise InputError(f"{file} must be UTF-8, byte {problem.start} is not") from None
    except OSError as problem:
        raise InputError(f"cannot read {file}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise InputError(f"{file} is not TOML: {problem}") from None


def option_values(command: click.Command, table: Mapping[str, Any], file: Path, path: Sequence[str]) -> dict[str, Any]:
    """click's default map of a command, from a table of the file: texts, which its options read like arguments."""
    options = options_of(command) if path else {}  # --config names the file, and is not in it
    below = subcommands(command)
    defaults: dict[str, Any] = {}
    for key, value in table.items():
        where = ".".join((*path, key))
        option = options.get(key.replace("_", "-"))
        if key in below:
            if not isinstance(value, dict):
                raise InputError(f"{file}: {where} must be a table, as [{where}] begins one, got {_shown(value)}")
            defaults[key] = option_values(below[key], value, file, (*path, key))
        elif option is not None:
            try:
                _set(defaults, option, value)
            except ValueError as problem:
                raise InputError(f"{file}: {where} must be {problem}") from None
        else:
            raise InputError(f"{file}: {where} is not known; {_expected(key, path, options, below)}")
    return defaults


def _expected(key: str, path: Sequence[str], options: Iterable[str], below: Mapping[str, click.Command]) -> str:
    name = key.replace("_", "-")
    close = difflib.get_close_matches(name, [*options, *below], 1, 0.5)
    tables = [f"[{'.'.join((*path, command))}]" for command in below if name in options_of(below[command])]
    if tables:
        return f"an option stands in the table of a command: {', '.join(tables)}"
    if close:
        return f"did you mean {'.'.join((*path, close[0]))}?"
    if not path:
        return "expected a table with the name of a command, such as [generate]"
    return f"`shaderlm {' '.join(path)} --help` lists the options"


def _set(defaults: dict[str, Any], option: click.Option, value: Any) -> None:
    """The value as text, which the option reads like an argument: 8.5 is no whole number then."""
    assert option.name is not None
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"true or false, got {_shown(value)}")
        if option.is_bool_flag:
            defaults[option.name] = value
        elif value:
            defaults[option.name] = option.flag_value
        return
    many = option.multiple or option.nargs != 1
    values = value if many and isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, (bool, dict, list)):
            raise ValueError(
                f"{'text, a number, or a list of them' if many else 'text or a number'}, got {_shown(each)}"
            )
    if option.nargs not in (1, len(values)):
        raise ValueError(f"a list of {option.nargs}, got {_shown(value)}")
    texts = [str(each) for each in values]
    defaults[option.name] = texts if many else texts[0]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "a table" if isinstance(value, dict) else repr(value)


# Errors ----------------------------------------------------------------------------------------------------


def _with_values(callback: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function of a command, which first notes what did not come from the command line, for `with_source`."""

    @functools.wraps(callback)
    def run(*arguments: Any, **options: Any) -> Any:
        context = click.get_current_context()
        if names:
            _warn_of_unknown_variables(context.command, names)
        for name, option in options_of(context.command).items():
            _check_switch(context, option)
            where = _source(context, option, name)
            if where is not None:
                _values[name] = (str(context.params.get(option.name or "")), where)
        return callback(*arguments, **options)

    return run


def _variable(names: Iterable[str]) -> str:
    return "_".join((_PREFIX, *names)).upper().replace("-", "_")


def _variable_in_use(option: click.Parameter) -> str:
    """The one that has a value. click takes the first of them, too."""
    variables = [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()
    return next((name for name in variables if os.environ.get(name)), "")


def _warn_of_unknown_variables(command: click.Command, names: Sequence[str]) -> None:
    """No error: others set variables, too. Of a service shaderlm-serve, Kubernetes sets SHADERLM_SERVE_SERVICE_HOST."""
    known = [_variable((*names, name)) for name in options_of(command)]
    below = tuple(f"{_variable((*names, name))}_" for name in subcommands(command))
    for option in options_of(command):
        name, value = _variable([option]), os.environ.get(_variable([option]), "")
        if value and not value.startswith("tcp://"):  # Kubernetes: SHADERLM_PORT of a service shaderlm
            meant = _variable((*names, option))
            _log.warning("the environment variable %s is no option; did you mean %s?", name, meant)
    for name in sorted(os.environ):
        if name.startswith(f"{_variable(names)}_") and name not in known and not name.startswith(below):
            close = difflib.get_close_matches(name, known, 1, 0.8)
            meant = f"; did you mean {close[0]}?" if close else ""
            _log.warning("the environment variable %s is no option of `%s`%s", name, " ".join(names), meant)


def _source(context: click.Context, option: click.Parameter, name: str) -> str | None:
    source = context.get_parameter_source(option.name or "")
    if source is ParameterSource.ENVIRONMENT:
        return f"the environment variable {_variable_in_use(option)}"
    if source is ParameterSource.DEFAULT_MAP:
        names = context.command_path.split()[-_depth(context) :]
        return f"{'.'.join((*names, name))} in {context.meta[_FILE]}"
    return None


def _depth(context: click.Context) -> int:
    return 0 if context.parent is None else 1 + _depth(context.parent)


def name_source(problem: click.ClickException) -> None:
    """Let a refused value say that it comes from the file, or from which variable."""
    if isinstance(problem, click.BadParameter) and problem.ctx is not None and isinstance(problem.param, click.Option):
        for name, option in options_of(problem.ctx.command).items():
            where = _source(problem.ctx, option, name) if option is problem.param else None
            if where is not None:
                problem.param_hint = f"{option.get_error_hint(problem.ctx)} ({where})"
                return


def with_source(message: str) -> str:
    """A later error, with the place of the value that it is about: it begins with the option, or has its value.

    `auto` and other words stand in errors about something else, too: those count in quotes.
    """
    for name, (value, where) in _values.items():
        named = re.match(rf"(--)?{name.replace('-', '[-_]')}(?![\w-])", message)
        shown = repr(value) if value.isalnum() else value
        if named or (len(value) >= _TELLING and shown in message):
            return f"{message} (from {where})"
    return message


def _check_switch(context: click.Context, option: click.Option) -> None:
    """click takes a word that is neither yes nor no for no word, where switches exclude each other."""
    variable = _variable_in_use(option)
    word = os.environ.get(variable, "")
    if option.is_flag and not option.is_bool_flag and word not in ("", option.flag_value):
        try:
            click.BOOL.convert(word, option, context)
        except click.BadParameter as problem:
            problem.param_hint = f"the environment variable {variable}"
            raise
