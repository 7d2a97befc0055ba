"""`shaderlm serve --replicas`: the same server, its model on several replicas by Ray."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import click

from ..errors import InputError
from .loading import progress_bar
from .streaming import tell

_RAY_PARTS = 10_000
_SAME = ("queue", "kv_memory", "share_prefixes", "n_predict", "seed", "reasoning_format", "embedding", "warmup")
_ANSWERS = ("thinking", "thinking_budget", "tags", "strict_model")
_ALSO_SAME = ("sampling", "deterministic", "drain", "backend", "precision", "quantize")


def serve_replicas(
    model: str | None, device: str, keys: list[str], template: str | None, options: dict[str, Any]
) -> int:
    """Serve until a signal; the exit code. `options` are those of `serve`."""
    from ..formats.find import find
    from ..ray.cluster import HttpOptions, free_port, local_ray, ray_at, serve_until_signal
    from ..ray.config import cluster_config
    from ..ray.versions import check_ray

    check_ray()
    if options["web"] is not None:
        raise click.UsageError("--web is not for replicas: any web server can host an export.")
    if options["pull"]:
        raise click.UsageError("--pull is not for replicas: each may be on a machine of its own.")
    if options["allow_image_urls"] or options["mmproj"] or options["no_vision"] or options["image_tokens"]:
        raise click.UsageError("options of images are not for replicas yet; leave them out.")
    if options["draft"] is not None or options["draft_model"] is not None:
        raise click.UsageError("--draft is not for replicas yet; leave it out.")
    for name in ("cache_dir", "slot_save_path"):
        if options[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is not for replicas: each may be on a machine of its own.")
    logging.disable(logging.INFO)  # Ray tells what it does, and sets its levels again and again
    host, replicas, address = options["host"], options["replicas"] or 1, options["ray_address"]
    if address is not None and not options["port"]:
        raise click.UsageError(
            "--port 0 is a free port of this machine; with --ray-address, give a port of the cluster."
        )
    http = HttpOptions(host, options["port"] or free_port(host), options["ssl_cert_file"], options["ssl_key_file"])
    most = max(replicas, options["max_replicas"] or 0)
    has, gpus = resources(device, most) if address is None else ({"device": device}, 0)
    args = {
        "models": {model or _default(): _model_args(model, template, options) | has},
        "host": host,
        "api_keys": keys,
        "cors_origins": options["cors_origins"],
        "metrics": options["metrics"],
        "slots": options["slots"],
        "limits": options["limits"],
        "log_file": options["log_file"] and str(Path(options["log_file"]).absolute()),  # replicas are elsewhere
        "log_format": options["log_format"],
        "verbose": options["verbose"],
    }

    config = cluster_config(args)
    if address is None:  # otherwise the proxy listens on the cluster's head, and its nodes have the files
        http.check_free()
        with progress_bar() as progress:
            find(model, progress)  # once, and not by each replica

    def ready() -> None:
        (name,) = config.models
        tell(f"listening on {http.url}")
        tell(f"{name} is ready on {replicas} replicas: {http.url}/v1 is for OpenAI's clients")

    with local_ray(most, gpus) if address is None else ray_at(address):
        interrupted = serve_until_signal(config, http, ready, options["drain"])
    return 130 if interrupted else 0


def _default() -> str:
    from ..formats.default_model import NAME

    return NAME


def _model_args(model: str | None, template: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """One model, as `ray.config.ModelConfig` has it."""
    from ..cli.models import is_synthetic

    if is_synthetic(model):
        raise InputError(f"{model} has random weights, and replicas load files; give a model's file or name")
    path = None if model is None or not Path(model).exists() else str(Path(model).absolute())
    args = {name: options[name] for name in (*_SAME, *_ANSWERS, *_ALSO_SAME)}
    args |= {
        "model": path or model,
        "aliases": options["aliases"],
        "context": options["ctx_size"],
        "tune": not options["no_tune"],
        "ignore_keys": options["ignore_keys"],
        "chat_template": template,
        "replicas": options["replicas"] or 1,
        "max_replicas": options["max_replicas"],
    }
    if options["parallel"] is not None:
        args["parallel"] = options["parallel"]
    return args


def resources(device: str, replicas: int) -> tuple[dict[str, Any], int]:
    """What each replica has of this machine, as `ray.config.ModelConfig` has it, and how many GPUs Ray is told of.

    `auto` is the GPUs, one for each replica, or a part where there are more replicas; without a GPU it is the CPU.
    """
    if device != "auto":
        return {"device": device}, 0
    from ..gpu import adapters
    from ..ray.adapters import gpus_of

    gpus = len(gpus_of([each.caps for each in adapters()]))
    if gpus == 0:
        tell("shaderlm: there is no GPU, the replicas compute on the CPU")
        return {"device": "cpu"}, 0
    # A share lies on one GPU, and Ray counts it in parts of 10,000.
    share = math.floor(_RAY_PARTS / math.ceil(replicas / gpus)) / _RAY_PARTS
    return {"device": "auto", "num_gpus": share}, gpus
