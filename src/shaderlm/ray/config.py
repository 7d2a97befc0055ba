"""What is deployed: models, how many replicas of each, and the front. From `key=value`, YAML or a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import InputError
from ..formats.default_model import NAME as DEFAULT_MODEL

DEFAULT_PARALLEL = (
    32  # sequences of a replica, where nothing else is said: what autoscaling and back-pressure count with
)
INGRESS = "ingress"  # the name of its deployment
_FILE = "config"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: a deployment of Ray Serve with one engine per replica."""

    # As the options of `shaderlm serve`.
    model: str | None = None
    aliases: tuple[str, ...] = ()
    device: str = "auto"
    backend: Literal["auto", "wgpu", "dawn"] = "auto"
    context: int | None = None
    precision: Literal["fast", "exact"] = "fast"
    tune: bool = True
    ignore_keys: tuple[str, ...] = ()
    quantize: Literal["q4_0", "q8_0"] | None = None
    deterministic: bool = False
    parallel: int = DEFAULT_PARALLEL
    queue: int = 1024
    kv_memory: int | None = None  # bytes of a replica
    share_prefixes: bool = False
    n_predict: int | None = None
    seed: int | None = None
    sampling: dict[str, Any] = {}  # options of `generate` that requests do not give, such as temperature
    chat_template: str | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"
    thinking: bool = True
    thinking_budget: int | None = None
    tags: tuple[str, ...] = ()
    strict_model: bool = False
    embedding: bool = False
    warmup: bool = True
    # Replicas, and what each has of its machine.
    replicas: int = 1  # the fewest, if there are max_replicas
    max_replicas: int | None = None  # autoscaling up to so many; None: as many as `replicas`
    num_gpus: float | None = None  # whole, or a part of one; None: 1 with the device auto, 0 with any other
    num_cpus: float = 1
    upscale_seconds: float = 3.0  # of more requests than the replicas take, before another one starts
    downscale_seconds: float = 60.0  # of fewer, before one ends
    drain: float = 30.0  # seconds of a replica that ends, to finish its requests
    health_seconds: float = 5.0  # between checks of a replica

    @property
    def gpus(self) -> float:
        """How many GPUs a replica has."""
        return self.num_gpus if self.num_gpus is not None else float(self.device == "auto")

    @property
    def max_ongoing(self) -> int:
        """Requests that a replica has at once: those that run, and as many to follow them without a pause."""
        return 2 * self.parallel

    def check(self, name: str) -> None:
        """What cannot be deployed is an InputError."""
        least: dict[str, float] = {"replicas": 1, "parallel": 1, "queue": 1, "num_cpus": 0, "drain": 0}
        least |= {"upscale_seconds": 0, "downscale_seconds": 0, "health_seconds": 0.1}
        for field, low in least.items():
            if getattr(self, field) < low:
                raise InputError(f"{field} of {name} must be at least {low:g}, got {getattr(self, field)}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InputError(
                f"max_replicas of {name} must be at least replicas, got {self.max_replicas} and {self.replicas}"
            )
        if self.sampling:
            from ..engine.options import generation_params  # takes 0.1 s to import

            generation_params(self.sampling)
        if not 0 <= self.gpus <= 1:
            expected = "1, a part of it, or 0: an engine has one device"
            raise InputError(f"num_gpus of {name} must be {expected}; got {self.gpus:g}")
        if self.gpus and self.device != "auto":
            raise InputError(
                f"{name} has num_gpus {self.gpus:g} and the device {self.device!r}; where Ray gives GPUs, the device "
                "must be auto. Or give num_gpus 0"
            )


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All models, and what is in front of them."""

    models: dict[str, ModelConfig]  # by the name in requests; the first is for requests that name none
    ingress_replicas: int = 1
    host: str = "127.0.0.1"  # where Ray's proxy listens: pages of other hosts are refused without a key
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    metrics: bool = True
    slots: bool = True
    limits: tuple[str, ...] = ()  # NAME=VALUE, as --limit
    log_file: str | None = None
    log_format: Literal["text", "json"] = "text"
    verbose: bool = False

    @property
    def keys(self) -> list[str]:
        """The keys, those of the file as well."""
        if self.api_key_file is None:
            return [*self.api_keys]
        return [*self.api_keys, *_lines(Path(self.api_key_file))]


def cluster_config(args: Mapping[str, Any]) -> ClusterConfig:
    """The configuration that `serve run shaderlm.ray:build_app KEY=VALUE …` or a YAML file gives.

    `config` names a TOML file with the same keys. One model needs no table: its keys may stand beside the others.
    """
    values = dict(args)
    path = values.pop(_FILE, None)
    if path is not None:
        values = {**_toml(Path(path)), **values}
    if "models" not in values:
        names = set(ModelConfig.__struct_fields__)
        model = {key: values.pop(key) for key in [*values] if key in names}
        values["models"] = {str(model.get("model") or DEFAULT_MODEL): model}
    try:
        config = msgspec.convert(_split_lists(values), ClusterConfig, strict=False)
    except msgspec.ValidationError as problem:
        raise InputError(f"the configuration of the cluster is wrong: {problem}") from None
    if not config.models:
        raise InputError("the configuration of the cluster must have at least one model, got none")
    deployments = [INGRESS, *map(deployment_name, config.models)]
    if len({*deployments}) < len(deployments):
        raise InputError(f"names of models must differ in letters and digits, and from {INGRESS!r}: {deployments[1:]}")
    for name, each in config.models.items():
        each.check(name)
    return config


def deployment_name(model: str) -> str:
    """What Ray calls a model's deployment: its names become parts of paths and labels."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-") or "model"


def _split_lists(values: dict[str, Any]) -> dict[str, Any]:
    """On a command line a list is one text, with commas."""
    lists = ("api_keys", "cors_origins", "limits", "aliases", "tags", "ignore_keys")

    def split(key: str, value: Any) -> Any:
        return [each for each in value.split(",") if each] if key in lists and isinstance(value, str) else value

    models = values["models"]
    if isinstance(models, Mapping):
        models = {
            name: {key: split(key, value) for key, value in each.items()} if isinstance(each, Mapping) else each
            for name, each in models.items()
        }
    return {key: split(key, value) for key, value in values.items()} | {"models": models}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InputError(f"cannot read {path}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InputError(f"{path} must be TOML: {problem}") from None


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as problem:
        raise InputError(f"cannot read {path}: {problem.strerror}") from None
    if not lines:
        raise InputError(f"api_key_file {path} has no key; write one on each line")
    return lines
