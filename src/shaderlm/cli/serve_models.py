"""Several models of `serve`: their names, the options of each, and how long they stay.

An option of `serve` that says nothing about the server itself is one of each model, and may stand in its table of
--models-file: a new one needs nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from .config import option_values, read_tables
from .models import is_synthetic
from .options import apply_options
from .sampler_options import SAMPLING_NAMES

if TYPE_CHECKING:
    from ..server.models import Models, ModelSource
    from ..server.served import ServedModel

Loader = Callable[[str, dict[str, Any]], Callable[[], "ServedModel"]]
# Options of the server, and not of a model.
OF_SERVER = {"host", "port", "api_keys", "api_key_file", "cors_origins", "metrics", "slots", "pull", "web", "drain"}
OF_SERVER |= {"allow_image_urls"}
OF_SERVER |= {"ssl_cert_file", "ssl_key_file", "limits", "log_file", "log_format", "verbose", "strict_model"}
OF_SERVER |= {"replicas", "max_replicas", "ray_address"}
OF_SEVERAL = {"models_dir", "models_file", "models_memory", "models_max"}
_OF_ONE = {"aliases": "--alias", "tags": "--tags"}  # on the command line: with several, each has its own
DEFAULT_MOST = 4  # as llama-server


def several_models_options(parse_size: Callable[..., int | None]) -> Callable[[Any], Any]:
    """--models-dir and others."""
    folder, file = click.Path(exists=True, file_okay=False), click.Path(exists=True, dir_okay=False)
    options: list[Any] = [
        click.option("--models-dir", type=folder, metavar="DIR", help="Serve all models of a folder."),
        click.option(
            "--models-file",
            type=file,
            metavar="FILE",
            help="Serve the models of a TOML file, a table with options each.",
        ),
        click.option(
            "--models-memory",
            callback=parse_size,
            metavar="SIZE",
            help="Memory of all models that are loaded at the same time, such as 8G.",
        ),
        click.option(
            "--models-max",
            type=click.IntRange(0),
            metavar="N",
            help=f"Models that are loaded at the same time; 0: any number.  [default: {DEFAULT_MOST}]",
        ),
        click.option(
            "--sleep-idle-seconds",
            type=float,
            default=-1.0,
            show_default=True,
            metavar="N",
            help="Close a model that was not used for so long, until it is asked for; -1: never.",
        ),
    ]
    return lambda command: apply_options(options, command)


@dataclass(frozen=True)
class _Row:
    """A model as the command line has it."""

    model: str  # what `load` takes
    options: dict[str, Any]


def are_several(names: tuple[str, ...], options: dict[str, Any]) -> bool:
    """Is this a server of several models? What is for several, and has no effect on one, is an error."""
    if len(names) > 1 or options["models_dir"] is not None or options["models_file"] is not None:
        for name, flag in _OF_ONE.items():
            if options[name]:
                raise click.UsageError(f"{flag} is of one model; with several, give it in a table of --models-file.")
        return True
    for name in ("models_memory", "models_max"):
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is for several models; give --models-dir, or -m twice.")
    return False


def sleep_seconds(options: dict[str, Any]) -> float:
    """How long a model stays without requests."""
    seconds: float = options["sleep_idle_seconds"]
    return seconds if seconds >= 0 else math.inf


def sleeping_model(load: Callable[[], ServedModel], options: dict[str, Any]) -> Models:
    """The only model of a server, which closes it after a while without requests."""
    from ..server.models import Models, ModelsOptions, ModelSource

    source = ModelSource(name="the model", load=load)
    return Models(lambda: [source], ModelsOptions(sleep_seconds=sleep_seconds(options)), one=True)


def several_models(names: tuple[str, ...], options: dict[str, Any], loader: Loader) -> Models:
    """All models that are named, and those of the folder; `loader` checks a model's options, and loads it with them."""
    from ..server.models import Models, ModelsOptions, ModelSource, local_path

    context = click.get_current_context()
    given = {**_rows(names, options), **_rows_of_file(context, options)}
    folder = options["models_dir"]
    made = dict[tuple[str, str], ModelSource]()

    def source(name: str, row: _Row) -> ModelSource:
        key = name, row.model
        if key not in made:
            # Which names there are is decided before a request comes to a model.
            own = {**row.options, "aliases": (name, *row.options["aliases"]), "strict_model": False}
            load = loader(row.model, own)
            aliases, tags = row.options["aliases"], row.options["tags"]
            more = {"context": row.options["ctx_size"], "embedding": row.options["embedding"]}
            more |= {"vision": not row.options["no_vision"], "mmproj": row.options["mmproj"]}
            path = local_path(row.model)
            made[key] = ModelSource(name=name, load=load, aliases=aliases, tags=tags, path=path, **more)
        return made[key]

    def sources() -> Iterator[ModelSource]:
        from ..formats.models_dir import models_in

        there = {} if folder is None else models_in(Path(folder))
        for name, row in given.items():
            is_there = row.model == name and name in there
            yield source(name, _Row(str(there[name]), row.options) if is_there else row)
        for name, path in there.items():
            if name not in given:
                yield source(name, _Row(str(path), options))

    _check_names([*sources()])
    most = DEFAULT_MOST if options["models_max"] is None else options["models_max"] or None
    waiting = options["queue"] + (options["parallel"] or 0)
    kept = {"memory": options["models_memory"], "most": most, "sleep_seconds": sleep_seconds(options)}
    return Models(sources, ModelsOptions(**kept, waiting=max(1, waiting)))


def _rows(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, _Row]:
    """The models of -m. One that is not there is an error now."""
    from ..formats.find import find, is_remote, shown_name

    rows = dict[str, _Row]()
    for model in names:
        is_local = not is_synthetic(model) and not is_remote(model)
        name = shown_name(model, find(model)) if is_local else model
        if name in rows:
            raise InputError(f"-m names two models {name!r}; give one of them another name in --models-file")
        rows[name] = _Row(model, options)
    return rows


def _rows_of_file(context: click.Context, options: dict[str, Any]) -> dict[str, _Row]:
    """Those of --models-file: each table is a model, with options that go before those of the command line."""
    if options["models_file"] is None:
        return {}
    file = Path(options["models_file"])
    params = {param.name: param for param in context.command.params}
    rows = dict[str, _Row]()
    for name, table in read_tables(file).items():
        if not isinstance(table, dict):
            raise InputError(f"{file}: {name} must be a table with options of a model, as [{name}] begins one")
        values = dict[str, Any]()
        for param, text in option_values(context.command, table, file, (name,)).items():
            if param in OF_SERVER | OF_SEVERAL | {"sleep_idle_seconds"}:
                key = param.replace("_", "-")
                raise InputError(f"{file}: {key} in {name} is an option of the server, and not of a model")
            try:
                values[param] = params[param].process_value(context, text)
            except click.BadParameter as problem:
                raise InputError(f"{file}: {name}: {problem.format_message()}") from None
        model = values.pop("models", (name,))
        if len(model) != 1:
            raise InputError(f"{file}: {name} must have one model, got {len(model)}")
        sampling = {each: values.pop(each) for each in SAMPLING_NAMES if each in values}
        own = {**options, **values, "sampling": {**options["sampling"], **sampling}}
        rows[name] = _Row(model[0], own)
    return rows


def _check_names(sources: list[ModelSource]) -> None:
    """A name is that of one model."""
    models = dict[str, str]()
    for source in sources:
        for name in (source.name, *source.aliases):
            if models.setdefault(name, source.name) != source.name:
                raise InputError(f"{name!r} is a name of two models, {models[name]} and {source.name}")
