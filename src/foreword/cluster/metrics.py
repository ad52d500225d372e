"""Merge the metrics of all replicas into one page: each value has the number of its replica as a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families


def merged(pages: Iterable[tuple[str, str]]) -> list[Metric]:
    """Merge pages in Prometheus' text format, given by the name of the replica."""
    families: dict[str, Metric] = {}
    for name, page in pages:
        for found in text_string_to_metric_families(page):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.samples.append(sample._replace(labels={**sample.labels, "replica": name}))
    return list(families.values())


def responses_by_status(responses: Counter[int]) -> Metric:
    """Return the metric of the front end's responses."""
    answered = CounterMetricFamily("foreword:front_responses", "Answered HTTP requests.", labels=["status"])
    for status, count in list(responses.items()):
        answered.add_metric([str(status)], count)
    return answered


def replica_metrics(pids: Mapping[int, int], restarts: Sequence[int]) -> Iterator[Metric]:
    """Return the metrics of which replicas are ready, of their processes, and of restarts."""
    ready = GaugeMetricFamily("foreword:replica_ready", "Whether the replica takes requests.", labels=["replica"])
    process = GaugeMetricFamily("foreword:replica_pid", "Its process, if it does.", labels=["replica"])
    again = CounterMetricFamily("foreword:replica_restarts", "Restarts after an end.", labels=["replica"])
    for number, count in enumerate(restarts):
        ready.add_metric([str(number)], int(number in pids))
        again.add_metric([str(number)], count)
    for number, pid in pids.items():
        process.add_metric([str(number)], pid)
    yield from (ready, process, again)


class Page:
    """A collector of Prometheus with given metrics."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

    def text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)
