"""The metrics of all replicas as one text, each sample with the label `replica`, and what the routers count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def merge(
    texts: Iterable[tuple[str, str]],
    front: str,
    counts: Mapping[str, Mapping[str, int]],
    replicas: Mapping[str, int],
) -> bytes:
    """`texts`: of each replica. Of each model, `counts`: why requests went where they did, and how many `replicas`.

    `front`: who counts. Any of several may be asked, and each has counts of its own.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector([*_labelled(texts), *_of_routers(front, counts, replicas)]))
    return generate_latest(registry)


class _Collector:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._families


def _labelled(texts: Iterable[tuple[str, str]]) -> list[Metric]:
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(Sample(sample.name, {**sample.labels, "replica": replica}, sample.value))
    return [*families.values()]


def _of_routers(front: str, counts: Mapping[str, Mapping[str, int]], replicas: Mapping[str, int]) -> Iterator[Metric]:
    routed = CounterMetricFamily(
        "shaderlm:routed_requests", "Requests by why their replica was chosen", labels=["model_name", "reason", "front"]
    )
    for model, reasons in counts.items():
        for reason, count in sorted(reasons.items()):
            routed.add_metric([model, reason, front], count)
    yield routed
    there = GaugeMetricFamily("shaderlm:replicas", "Replicas that requests may go to", labels=["model_name", "front"])
    for model, count in replicas.items():
        there.add_metric([model, front], count)
    yield there
