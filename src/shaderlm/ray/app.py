"""The application of Ray Serve: a deployment for each model, and the ingress in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from .config import INGRESS, ClusterConfig, ModelConfig, cluster_config, deployment_name
from .deployment import EngineReplica
from .ingress import Ingress

_INGRESS_REQUESTS = 100_000  # each stream is one for as long as it lasts: what limits them are the models' queues
_METRICS_SECONDS = 1.0


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """For `serve run shaderlm.ray:build_app KEY=VALUE …` and `serve deploy`; docs/scaling.md lists the keys."""
    return application(cluster_config(args))


def application(config: ClusterConfig, engine: type[EngineReplica] = EngineReplica) -> serve.Application:
    """The same from a configuration. `engine`: what runs in each replica."""
    plain = msgspec.to_builtins(config)
    # Keys are checked in front. An engine with them in its arguments would start again whenever they change.
    without_keys = msgspec.to_builtins(msgspec.structs.replace(config, api_keys=(), api_key_file=None))
    engines = {name: _deployment(engine, name, model).bind(name, without_keys) for name, model in config.models.items()}
    front = serve.deployment(serve.ingress()(Ingress)).options(
        name=INGRESS,
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=max(model.drain for model in config.models.values()),
        ray_actor_options={"num_cpus": 0},  # as Ray's own proxies: it waits most of the time
    )
    return front.bind(plain, engines)


def _deployment(engine: type[EngineReplica], name: str, model: ModelConfig) -> serve.Deployment:
    autoscaling = None
    if model.max_replicas is not None and model.max_replicas > model.replicas:
        autoscaling = AutoscalingConfig(
            min_replicas=model.replicas,
            max_replicas=model.max_replicas,
            target_ongoing_requests=model.parallel,
            upscale_delay_s=model.upscale_seconds,
            downscale_delay_s=model.downscale_seconds,
            metrics_interval_s=_METRICS_SECONDS,
            look_back_period_s=2 * _METRICS_SECONDS,
        )
    options: dict[str, Any] = {"num_replicas": model.replicas} if autoscaling is None else {}
    if autoscaling is not None:
        options["autoscaling_config"] = autoscaling
    return serve.deployment(engine).options(
        name=deployment_name(name),
        max_ongoing_requests=model.max_ongoing,
        max_queued_requests=model.queue,
        health_check_period_s=model.health_seconds,
        graceful_shutdown_timeout_s=model.drain,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": model.gpus},
        request_router_config=RequestRouterConfig(request_router_class="shaderlm.ray.router:PrefixRouter"),
        **options,
    )
