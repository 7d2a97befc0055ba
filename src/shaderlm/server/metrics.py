"""Numbers for Prometheus: vLLM's names under `shaderlm:`, and those of llama-server that its dashboards use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..engine import EngineStats, Handle, Histogram
from ..runtime.disk_cache import DiskStats
from .generation import ratio
from .output import FINISHES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class Metrics:
    """Counts what the engine does not: how long clients wait."""

    def __init__(self) -> None:
        self.first_token, self.whole, self.queued = (Histogram(_SECONDS) for _ in range(3))
        # Of requests that are over: tokens of prompts that were computed, tokens after the first, and their seconds;
        # tokens of prompts that were cached; the most tokens of one.
        self.prompt_tokens = self.decoded_tokens = self.cached_tokens = self.most_tokens = 0
        self.prompt_seconds = self.decode_seconds = 0.0

    @property
    def prompt_speed(self) -> float:
        """Tokens per second."""
        return ratio(self.prompt_tokens, self.prompt_seconds)

    @property
    def decode_speed(self) -> float:
        """Tokens per second."""
        return ratio(self.decoded_tokens, self.decode_seconds)

    def finished(self, handle: Handle) -> None:
        """A request is over."""
        timing = handle.timing
        self.queued.observe(timing.queue_seconds)
        if handle.started:
            usage = handle.usage
            self.prompt_tokens += usage.prompt_tokens - usage.cached_tokens
            self.cached_tokens += usage.cached_tokens
            self.most_tokens = max(self.most_tokens, usage.prompt_tokens + usage.completion_tokens)
            self.prompt_seconds += timing.prompt_seconds
            self.decoded_tokens += timing.decoded
            self.decode_seconds += timing.decode_seconds
        if not handle.usage.completion_tokens:
            return
        first = timing.queue_seconds + timing.prompt_seconds
        self.first_token.observe(first)
        self.whole.observe(first + timing.decode_seconds)

    def plus(self, other: Metrics) -> Metrics:
        """Those of both."""
        both = Metrics()
        for name, value in vars(self).items():
            more = getattr(other, name)
            setattr(both, name, value.plus(more) if isinstance(value, Histogram) else value + more)
        both.most_tokens = max(self.most_tokens, other.most_tokens)
        return both


@dataclass(frozen=True)
class ModelNumbers:
    """What `/metrics` says of one model."""

    name: str
    metrics: Metrics
    stats: EngineStats


# What an engine has now; the other numbers count from its start.
_NOW = ("running", "waiting", "pages", "max_pages", "pages_used", "pages_cached")


def added(now: EngineStats | None, earlier: EngineStats | None) -> EngineStats | None:
    """What an engine does, and did with those before it that are closed. None: there is none."""
    if earlier is None:
        return now
    nothing: dict[str, Any] = dict.fromkeys(_NOW, 0)
    ended = replace(earlier, **nothing)
    return ended if now is None else _sum(now, ended)


def _sum(a: EngineStats, b: EngineStats) -> EngineStats:
    sums = dict[str, Any]()
    for each in fields(EngineStats):
        one, other = getattr(a, each.name), getattr(b, each.name)
        if isinstance(one, DiskStats) or isinstance(other, DiskStats):
            sums[each.name] = _sum_of_disks(one, other)
        elif isinstance(one, Histogram):
            sums[each.name] = one.plus(other)
        elif isinstance(one, Mapping):
            sums[each.name] = Counter(one) + Counter(other)
        elif isinstance(one, (int, float)):
            sums[each.name] = one + other
    return replace(a, **sums)


def _sum_of_disks(a: DiskStats | None, b: DiskStats | None) -> DiskStats | None:
    """Models share the folder, and what is in it."""
    if a is None or b is None:
        return a or b
    names = [each.name for each in fields(DiskStats) if each.name not in ("limit", "used_bytes")]
    sums: dict[str, Any] = {name: getattr(a, name) + getattr(b, name) for name in names}
    return replace(a, used_bytes=max(a.used_bytes, b.used_bytes), **sums)


def metrics_text(models: Sequence[ModelNumbers]) -> bytes:
    """What `/metrics` answers: numbers of each model, and llama-server's, which are of all together."""
    if not models:
        return b""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collectors([_Collector(each) for each in models]))
    stats, metrics = reduce(_sum, [each.stats for each in models]), reduce(Metrics.plus, [m.metrics for m in models])
    return generate_latest(registry) + _llama_text(stats, metrics).encode()


class _Collectors:
    """Of several models: each number once, with a sample of each model."""

    def __init__(self, collectors: Sequence[_Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        """All numbers as they are now."""
        families = dict[str, Metric]()
        for metric in (metric for each in self._collectors for metric in each.collect()):
            if metric.name in families:
                families[metric.name].samples += metric.samples
            else:
                families[metric.name] = metric
        yield from families.values()


class _Collector:
    def __init__(self, model: ModelNumbers) -> None:
        self._metrics, self._name, self._stats = model.metrics, model.name, model.stats

    def collect(self) -> Iterator[Metric]:
        """All numbers of one model."""
        yield from self._engine(self._stats)
        yield from self._histograms(self._stats)

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        name = self._name
        usage = stats.pages_used / stats.max_pages if stats.max_pages else 0.0
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for family, stem, words, value in (
            (gauge, "num_requests_running", "Requests that run", stats.running),
            (gauge, "num_requests_waiting", "Requests that wait", stats.waiting),
            (gauge, "kv_cache_usage_perc", "Part of the KV cache that running requests use, 1: all of it", usage),
            (counter, "prefix_cache_queries", "Tokens of prompts, looked up in the prefix cache", stats.prefix_queries),
            (counter, "prefix_cache_hits", "Tokens of prompts, found in the prefix cache", stats.prefix_hits),
            (counter, "prompt_tokens", "Tokens of prompts", stats.prompt_tokens),
            (counter, "generation_tokens", "Tokens that were generated", stats.generation_tokens),
            (counter, "spec_decode_num_drafts", "Drafts that were verified", stats.drafts),
            (counter, "spec_decode_num_draft_tokens", "Tokens of these drafts", stats.drafted_tokens),
            (counter, "spec_decode_num_accepted_tokens", "Tokens of these that were accepted", stats.accepted_tokens),
            *_disk_numbers(stats),
        ):
            metric = family(f"shaderlm:{stem}", words, labels=["model_name"])
            metric.add_metric([name], value)
            yield metric
        reasons = dict.fromkeys((each.metrics for each in FINISHES.values()), 0)
        for reason, count in stats.finished.items():
            reasons[FINISHES[reason].metrics] += count
        ended = CounterMetricFamily(
            "shaderlm:request_success", "Requests that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, count in reasons.items():
            ended.add_metric([name, reason], count)
        yield ended

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        metrics = self._metrics
        for stem, words, histogram in (
            ("time_to_first_token_seconds", "From the request to its first token", metrics.first_token),
            ("inter_token_latency_seconds", "From a token of a request to the next", stats.token_gaps),
            ("e2e_request_latency_seconds", "From the request to its last token", metrics.whole),
            ("request_queue_time_seconds", "From the request to its first step", metrics.queued),
        ):
            family = HistogramMetricFamily(f"shaderlm:{stem}", words, labels=["model_name"])
            buckets, total = histogram.buckets()
            family.add_metric([self._name], buckets, total)
            yield family


def _disk_numbers(stats: EngineStats) -> Iterator[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, int]]:
    """Of the cache on disk, if there is one."""
    disk, gauge, counter = stats.disk, GaugeMetricFamily, CounterMetricFamily
    if disk is None:
        return
    yield counter, "disk_cache_hits", "Tokens of prompts, found in the cache on disk", disk.hits
    yield counter, "disk_cache_read_bytes", "Bytes that were read from the cache on disk", disk.read_bytes
    yield counter, "disk_cache_written_bytes", "Bytes that were written to it", disk.written_bytes
    yield counter, "disk_cache_evictions", "Its files that were removed for others", disk.evicted
    yield counter, "disk_cache_invalid", "Its files that were not as they were written, and were removed", disk.invalid
    yield counter, "disk_cache_failed_writes", "Files that could not be written to it", disk.failed_writes
    yield gauge, "disk_cache_bytes", "Bytes of its files", disk.used_bytes


def _llama_text(stats: EngineStats, metrics: Metrics) -> str:
    """llama-server's own numbers, by its own names: not all of its counters end with _total."""
    steps = stats.steps
    numbers: list[tuple[str, str, str, float]] = [
        ("counter", "prompt_tokens_total", "Tokens of prompts that were computed", metrics.prompt_tokens),
        ("counter", "prompt_tokens_cached_total", "Tokens of prompts that were in the cache", metrics.cached_tokens),
        ("counter", "prompt_seconds_total", "Seconds in which prompts were read", metrics.prompt_seconds),
        ("counter", "tokens_predicted_total", "Tokens that were generated", stats.generation_tokens),
        ("counter", "tokens_predicted_seconds_total", "Seconds in which they were", metrics.decode_seconds),
        ("counter", "n_decode_total", "Steps of the model", steps),
        ("counter", "n_tokens_max", "The most tokens that a sequence had", metrics.most_tokens),
        ("gauge", "prompt_tokens_seconds", "Prompt tokens per second of a request", metrics.prompt_speed),
        ("gauge", "predicted_tokens_seconds", "Generated tokens per second of a request", metrics.decode_speed),
        ("gauge", "requests_processing", "Requests that run", stats.running),
        ("gauge", "requests_deferred", "Requests that wait", stats.waiting),
        ("gauge", "n_busy_slots_per_decode", "Sequences of a step, on average", ratio(stats.sequences, steps)),
        ("counter", "spec_decode_num_draft_tokens_total", "Tokens that were drafted", stats.drafted_tokens),
        ("counter", "spec_decode_num_accepted_tokens_total", "Of those, accepted", stats.accepted_tokens),
        ("counter", "spec_decode_num_drafts_total", "Drafts", stats.drafts),
    ]
    return "".join(
        f"# HELP llamacpp:{name} {words}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {float(value)}\n"
        for kind, name, words, value in numbers
    )
