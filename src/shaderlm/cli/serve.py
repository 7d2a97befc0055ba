"""`shaderlm serve`: the HTTP server. Options are spelled as llama-server spells them, where it has the same thing."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import InputError, ModelError
from ..install import install_command
from .cache_options import cache_options, size_in_bytes
from .completion import complete_models
from .draft_options import draft_options
from .image_options import vision_options
from .loading import leave_line, status
from .models import check_device, described, is_synthetic, load_any
from .options import backend_option, ignore_key_option, precision_option, quantize_option, tune_option
from .prompts import read_text
from .sampler_options import default_sampling_options
from .serve_models import are_several, several_models, several_models_options, sleeping_model
from .streaming import tell

if TYPE_CHECKING:
    from ..formats.checkpoint import Checkpoint
    from ..gpu import Backend
    from ..server.limits import Limits
    from ..server.loading import ServeOptions
    from ..server.models import Models
    from ..server.served import ServedModel


_LISTED = 8  # names in a line


def _many(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Repeated, or separated by commas."""
    return tuple(each.strip() for text in texts for each in text.split(",") if each.strip())


def _aliases(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """As `_many`. Names that come together have no order: answers say the first by the alphabet, as llama-server's."""
    return tuple(name for text in texts for name in sorted(set(_many(ctx, param, (text,)))))


def _many_keys(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """As `_many`. A key that is empty, such as a variable that is not set, would leave the server open."""
    keys = _many(ctx, param, texts)
    if any(not each.strip() for text in texts for each in text.split(",")):
        raise click.BadParameter("a key must not be empty", ctx, param)
    try:
        ",".join(keys).encode()
    except UnicodeEncodeError:
        raise click.BadParameter("a key must be valid UTF-8", ctx, param) from None
    return keys


class _ModelName(click.ParamType[str]):
    """A name or a path, which may have spaces: a variable of the environment has one."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        """All of it."""
        return [rv]


@click.command()
@click.option(
    "-m",
    "--model",
    "models",
    type=_ModelName(),
    multiple=True,
    shell_complete=complete_models,
    help="As for generate, or as for bench synthetic:SHAPE:FORMAT. Of several, each is loaded when it is first asked "
    "for.  [default: smollm2-135m, downloaded once]",
)
@several_models_options(size_in_bytes)
@click.option("--device", default="auto", show_default=True, help="As for generate.")
@backend_option
@precision_option
@tune_option
@ignore_key_option
@quantize_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any that is free.")
@click.option(
    "-c", "--ctx-size", "--context", type=click.IntRange(1), metavar="N", help="Context of each sequence, in tokens."
)
@click.option(
    "-np",
    "--parallel",
    type=click.IntRange(1),
    metavar="N",
    help="Sequences that run at the same time.  [default: 128]",
)
@click.option("--queue", type=click.IntRange(0), default=1024, show_default=True, help="Requests that may wait.")
@click.option("--kv-memory", callback=size_in_bytes, metavar="SIZE", help="Memory of the KV cache, such as 8G.")
@cache_options
@draft_options
@vision_options
@click.option(
    "--allow-image-urls",
    is_flag=True,
    help="Fetch pictures whose addresses clients give, from public hosts.",
)
@click.option(
    "--slot-save-path",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Folder that clients may save slots into, and restore them from: POST /slots/{id}?action=save.",
)
@click.option(
    "--share-prefixes",
    is_flag=True,
    help="Requests with different keys share cached prompts, too. Then a client can find out whether others sent one.",
)
@click.option(
    "--api-key", "api_keys", multiple=True, callback=_many_keys, metavar="KEY", help="A key. May be repeated."
)
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False), help="Keys, one on each line.")
@click.option(
    "-a",
    "--alias",
    "aliases",
    multiple=True,
    callback=_aliases,
    metavar="NAME",
    help="A name of the model. May be repeated.  [default: those of its file, and what -m says]",
)
@click.option(
    "--tags", multiple=True, callback=_many, metavar="TAG", help="What the list of models says of it. May be repeated."
)
@click.option(
    "--strict-model", is_flag=True, help="Refuse requests for another model. Without it this one answers them."
)
@click.option(
    "--cors-origins",
    multiple=True,
    callback=_many,
    metavar="ORIGIN",
    help="Pages that may use the server: *, localhost, or origins. May be repeated.  "
    "[default: localhost; * where there are keys]",
)
@click.option("--metrics/--no-metrics", default=False, show_default=True, help="Answer /metrics.")
@click.option("--slots/--no-slots", default=True, show_default=True, help="Answer /slots.")
@click.option(
    "-n",
    "--n-predict",
    "--max-tokens",
    "n_predict",
    type=click.IntRange(-1),
    metavar="N",
    help="Tokens to generate by default, at most.",
)
@click.option(
    "-s", "--seed", type=click.IntRange(-(1 << 63), (1 << 63) - 1), metavar="N", help="Seed of requests that have none."
)
@default_sampling_options
@click.option(
    "--chat-template",
    metavar="TEXT|NAME",
    help="A Jinja template, or the name of a usual one such as chatml, instead of the model's own.",
)
@click.option("--chat-template-file", type=click.Path(exists=True, dir_okay=False), help="The same, from a file.")
@click.option(
    "--reasoning-format",
    type=click.Choice(["auto", "deepseek", "none"]),
    default="auto",
    show_default=True,
    help="auto, deepseek: thoughts are told from the answer. none: they are text.",
)
@click.option(
    "--reasoning",
    "thinking",
    type=click.Choice(["on", "off", "auto"]),
    callback=lambda ctx, param, text: text != "off",
    default="auto",
    show_default=True,
    help="May the model think before it answers? auto: if it can.",
)
@click.option(
    "--reasoning-budget",
    "thinking_budget",
    type=click.IntRange(-1),
    default=-1,
    show_default=True,
    metavar="N",
    help="Tokens to think at most. −1: no limit.",
)
@click.option("--embedding", "--embeddings", is_flag=True, help="Answer /v1/embeddings.")
@click.option(
    "--pull/--no-pull",
    default=None,
    help="Let clients fetch models by /api/pull.  [default: only without keys, on this machine alone]",
)
@click.option(
    "--web",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Host an export of export-web at /web/: browsers compute by themselves. Without -m, no model is loaded here.",
)
@click.option("--ssl-cert-file", type=click.Path(exists=True, dir_okay=False), help="Certificate (PEM), for HTTPS.")
@click.option("--ssl-key-file", type=click.Path(exists=True, dir_okay=False), help="Its private key (PEM).")
@click.option(
    "--drain", type=click.FloatRange(0, 1e6), default=30.0, show_default=True, help="Seconds to finish requests in."
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="What a request may cost, such as body_seconds=30. May be repeated; docs/server.md lists them.",
)
@click.option("--log-file", type=click.Path(dir_okay=False), help="Log requests to this file, instead of stderr.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of a line.")
@click.option(
    "--replicas", type=click.IntRange(1), metavar="N", help="Serve by so many replicas. Needs the extra `ray`."
)
@click.option(
    "--max-replicas", type=click.IntRange(1), metavar="N", help="Start more of them under load, up to so many."
)
@click.option("--ray-address", metavar="ADDR", help="Run the replicas on this Ray cluster, such as auto or HOST:6379.")
@click.option("-v", "--verbose", is_flag=True, help="Log every request, also /health; put __verbose into answers.")
@click.option("--warmup/--no-warmup", default=True, show_default=True, help="Compile all kernels before the start.")
@click.option("--deterministic", is_flag=True, help="Answers do not depend on what runs beside them. Slower.")
def serve(models: tuple[str, ...], **options: Any) -> None:
    """Answer the HTTP APIs of OpenAI, Anthropic, llama.cpp and Ollama.

    A browser shows a chat at the server's address. Ctrl-C lets requests finish, twice ends them.
    Browsers give WebGPU, which --web needs, to HTTPS and to this machine alone: other devices need --ssl-cert-file.
    """
    _check_packages()
    from ..server.access import Origins, is_loopback
    from ..server.addresses import Fetcher
    from ..server.app import make_app
    from ..server.limits import limits_of
    from ..server.request_log import RequestLog
    from ..server.running import allow_connections, make_server
    from ..server.service import Service
    from ..server.web import Export

    keys = _keys(options["api_keys"], options["api_key_file"])
    if (options["ssl_cert_file"] is None) != (options["ssl_key_file"] is None):
        raise click.UsageError("--ssl-cert-file and --ssl-key-file belong together; give both.")
    web = None if options["web"] is None else Export(Path(options["web"]))
    several = are_several(models, options)
    hosts_only = web is not None and not models and not several
    if hosts_only:
        _refuse_model_options()
    limits = limits_of(options["limits"])
    host = options["host"]
    if not hosts_only and not keys and not is_loopback(host):
        tell(f"shaderlm: anyone who reaches {host} may use this server; --api-key protects it")
    if any(options[name] is not None for name in ("replicas", "max_replicas", "ray_address")):
        from .serve_replicas import serve_replicas

        if several or options["sleep_idle_seconds"] >= 0:
            raise click.UsageError("--replicas is for one model, which stays loaded; give one -m.")
        model = next(iter(models), None)
        template = _check_options(model, options)
        sys.exit(serve_replicas(model, options["device"], keys, template, options))
    origins = Origins(options["cors_origins"], has_keys=bool(keys))
    _log_to_stderr()
    if web is not None and not is_loopback(host) and options["ssl_cert_file"] is None:
        only = "only here" if host in _ANY_HOST else "nowhere"
        tell(f"shaderlm: {_INSECURE} {only}")

    served_models: Models | Callable[[], ServedModel] | None = None
    if several:
        check_device(options["device"], options["backend"])
        served_models = several_models(models, options, lambda name, own: _loader(name, own, limits, keys))
    elif not hosts_only:
        served_models = _loader(next(iter(models), None), options, limits, keys, only=True)
        if options["sleep_idle_seconds"] >= 0:
            served_models = sleeping_model(served_models, options)

    address = ""

    def listening(url: str) -> None:
        nonlocal address
        address = url
        tell(f"listening on {address}")
        if several:
            tell(f"{_listed(service.models)}: each is loaded when it is first asked for")
        if web is not None:
            where = _page_address(address)
            tell(f"{where}/web/ runs {web.name} in browsers" if where else "browsers cannot run /web/ without HTTPS")

    def on_loaded(served: ServedModel) -> None:
        if several:
            tell(f"{served.name} is loaded on {served.model.report.device}, in {served.model.report.seconds:.2f} s")
            return
        here = _page_address(address) or address
        where = f"{here} has a chat, {here}/v1 is for OpenAI's clients"
        if not served.model.has_chat_template:
            where = f"{here}/v1/completions continues texts. It has no chat template, and --chat-template gives it one"
        tell(served.model.cache_limit)
        tell(f"{served.name} is ready on {served.model.report.device}: {where}")

    allow_connections()
    service = Service(
        served_models,
        metrics=options["metrics"],
        slots=options["slots"],
        limits=limits,
        pull=may_pull(options["pull"], host, keys),
        fetcher=Fetcher(limits.image_seconds, limits.image_body_bytes) if options["allow_image_urls"] else None,
    )
    log = RequestLog(options["log_file"], options["log_format"], verbose=options["verbose"])
    server = make_server(
        make_app(service, keys=keys, origins=origins, host=host, web=web, log=log),
        service,
        host=host,
        port=options["port"],
        drain=options["drain"],
        ready=listening,
        ssl_cert_file=options["ssl_cert_file"],
        ssl_key_file=options["ssl_key_file"],
    )
    service.models.on_loaded = on_loaded
    server.on_drain = lambda requests: _tell_drain(requests, options["drain"])
    try:
        server.run()
    finally:
        log.close()
    if service.models.failure is not None:
        raise service.models.failure
    code = 130 if server.interrupted else 0
    if service.models.is_loading:
        leave_line()
        os._exit(code)  # a thread reads a file or compiles, and cannot be stopped
    sys.exit(code)


# Options that say nothing about a model.
_WITHOUT_MODEL = {"web", "host", "port", "cors_origins", "ssl_cert_file", "ssl_key_file", "drain"}
_WITHOUT_MODEL |= {"limits", "log_file", "log_format", "verbose"}
_INSECURE = "browsers on other devices need HTTPS for WebGPU; give --ssl-cert-file and --ssl-key-file, or /web/ runs"
_ANY_HOST = ("0.0.0.0", "::", "[::]")


def _refuse_model_options() -> None:
    """What would have no effect is a mistake: --api-key, for example, protects nothing of an export."""
    context = click.get_current_context()
    for param in context.command.params:
        on_command_line = context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if on_command_line and param.name not in _WITHOUT_MODEL:
            raise click.UsageError(f"{_long_name(param)} is for a model that this server runs; give -m with it, too.")


def _long_name(param: click.Parameter) -> str:
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


def _page_address(address: str) -> str | None:
    """Where browsers run an export: over HTTPS, or on this machine. None: they find no WebGPU at this address."""
    from ..server.access import is_loopback

    scheme, _, port = address.rpartition(":")
    host = scheme.rpartition("/")[2]
    if address.startswith("https:") or is_loopback(host):
        return _reachable(address)
    return f"http://localhost:{port}" if host in _ANY_HOST else None


def _reachable(address: str) -> str:
    """The address with one of this machine instead of `0.0.0.0`, which nobody can open."""
    scheme, _, port = address.rpartition(":")
    if scheme.rpartition("/")[2] not in _ANY_HOST:
        return address
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documents: nothing is sent, but a route is chosen
        return f"{scheme.partition('/')[0]}//{probe.getsockname()[0]}:{port}"
    return address


def _check_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn", "msgspec", "prometheus_client") if find_spec(name) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        raise InputError(f"serve needs packages that are not installed ({names}): {install_command('serve')}")


def _keys(keys: tuple[str, ...], path: str | None) -> list[str]:
    if path is None:
        return [*keys]
    lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise InputError(f"--api-key-file {path} has no key; write one on each line")
    return [*keys, *lines]


def may_pull(wanted: bool | None, host: str, keys: Sequence[str]) -> bool:
    """May clients fetch models? Where nothing is said, those that can be the server's own user alone."""
    from ..server.access import is_loopback

    return is_loopback(host) and not keys if wanted is None else wanted


def _template(text: str | None, path: str | None) -> str | None:
    """The template that was named. A broken one is an InputError."""
    from ..text import ChatTemplate
    from ..text.named_templates import NAMED_TEMPLATES

    if text is not None and path is not None:
        raise click.UsageError("--chat-template and --chat-template-file exclude each other.")
    if text is not None and re.fullmatch(r"[\w.-]+", text):
        if text not in NAMED_TEMPLATES:
            raise InputError(f"--chat-template must be a Jinja template or one of {', '.join(NAMED_TEMPLATES)}")
        text = NAMED_TEMPLATES[text]
    source, name = (text, "--chat-template") if path is None else (read_text(path), f"--chat-template-file {path}")
    if source is not None:
        try:
            ChatTemplate(source, name=name).compile()
        except ModelError as problem:
            raise InputError(str(problem)) from None
    return source


def _check_model(
    model: str | None, device: str, backend: Backend, context: int | None, ignore_keys: tuple[str, ...]
) -> Checkpoint | None:
    """What is wrong with a model that is here, or with its device, ends the server before it listens.

    The checkpoint, which stays open for the load that follows, if it was opened.
    """
    from ..engine.loading import check_context
    from ..formats.find import find, is_remote
    from ..formats.opening import open_checkpoint
    from ..models.checkpoint import architecture_of, read_config

    if model is not None and is_synthetic(model):
        check_context(context, described(model)[1].context)
    elif not is_remote(model):
        file = open_checkpoint(find(model))
        try:
            with file.named_in_errors():
                check_context(context, read_config(architecture_of(file), file, ignore_keys).context)
            check_device(device, backend)
        except BaseException:
            file.close()
            raise
        return file
    check_device(device, backend)
    return None


def _check_options(model: str | None, options: dict[str, Any]) -> str | None:
    """What is wrong with a model's options is said now; the chat template that they name."""
    from ..engine.options import generation_params

    generation_params(options["sampling"])
    if options["n_predict"] == 0:
        raise click.UsageError("--n-predict must be −1 (until the end) or at least 1, got 0.")
    if model is not None and is_synthetic(model):
        if options["ignore_keys"]:
            raise click.UsageError(f"{model} has no metadata; leave out --ignore-key.")
        if options["quantize"]:
            raise click.UsageError(f"{model} has random weights; its name may say their format, leave out --quantize.")
    return _template(options["chat_template"], options["chat_template_file"])


def _loader(
    model: str | None, options: dict[str, Any], limits: Limits, keys: Sequence[str], *, only: bool = False
) -> Callable[[], ServedModel]:
    """What loads a model with its options. `only`: there is no other one, and its file is looked at now."""
    from ..formats.default_model import NAME as DEFAULT_MODEL
    from ..server.loading import serve_model

    template = _check_options(model, options)
    checked: list[Checkpoint] = []  # for the first load
    if only:
        about = (model, options["device"], options["backend"], options["ctx_size"], options["ignore_keys"])
        if (checkpoint := _check_model(*about)) is not None:
            checked.append(checkpoint)
    if model is not None and is_synthetic(model):
        options = {**options, "aliases": options["aliases"] or (model,)}  # there is no file whose name it could have
    # Streams of other models would stop for half a second.
    serve_options = replace(_serve_options(template, limits, keys, options), prepare_grammars=only)
    same = ["backend", "precision", "ignore_keys", "quantize", "deterministic", "draft", "draft_model"]
    same += ["draft_tokens"] if options["draft_tokens"] is not None else []
    how = {name: options[name] for name in same} | {"context": options["ctx_size"], "tune": not options["no_tune"]}
    if not is_synthetic(model):
        how |= {"vision": not options["no_vision"]} | {name: options[name] for name in ("mmproj", "image_tokens")}

    def load() -> ServedModel:
        with checked.pop() if checked else nullcontext() as checkpoint:
            loaded = load_any(model, options["device"], measure=True, checkpoint=checkpoint, **how)
        return serve_model(loaded, model or DEFAULT_MODEL, serve_options, status)

    return load


def _listed(models: Models) -> str:
    names = [each.name for each in models.all()]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"serves {', '.join(names[:_LISTED])}{more}" if names else "serves no model yet"


def _serve_options(template: str | None, limits: Limits, keys: Sequence[str], options: dict[str, Any]) -> ServeOptions:
    from ..server.loading import ServeOptions

    same = (
        *("n_predict", "seed", "sampling", "embedding", "parallel", "queue", "kv_memory", "share_prefixes", "warmup"),
        *("tags", "strict_model", "thinking", "thinking_budget", "verbose", "cache_dir", "cache_disk"),
        "slot_save_path",
    )
    return ServeOptions(
        names=options["aliases"],
        reasoning="none" if options["reasoning_format"] == "none" else "auto",
        limits=limits,
        keys=tuple(keys),
        chat_template=template,
        **{name: options[name] for name in same},
    )


def _tell_drain(requests: int, seconds: float) -> None:
    if sys.stderr.isatty():
        tell("")  # after ^C
    what = "a request" if requests == 1 else f"{requests:,} requests"
    tell(f"waiting up to {seconds:g} s for {what}; Ctrl-C once more does not wait")


def _log_to_stderr() -> None:
    """Warnings and errors of uvicorn, beside those of our own packages."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("uvicorn")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
