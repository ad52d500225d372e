"""The metrics of a server of several models: those of each loaded one, and which are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from foreword.server.metrics import registry_of
from foreword.server.models import Models, State


class ModelsMetrics:
    """A collector of Prometheus. A model that is loaded again counts from 0, as a process does that starts again."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(registry_of(self))

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for _, context in self._models.loaded:
            for family in context.metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
        yield from self._of_server()

    def _of_server(self) -> Iterator[Metric]:
        models = self._models
        for name, text, label, found in (
            ("foreword:server_responses", "Answered HTTP requests.", "status", models.responses),
            ("foreword:server_rejections", "Requests refused because the server was full.", "reason", models.refused),
        ):
            family = CounterMetricFamily(name, text, labels=[label])
            for value, count in list(found.items()):
                family.add_metric([str(value)], count)
            yield family
        state = GaugeMetricFamily("foreword:model_state", "1 for the state.", labels=["model_name", "state"])
        loads = CounterMetricFamily("foreword:model_loads", "Loads of the model.", labels=["model_name"])
        memory = GaugeMetricFamily("foreword:model_bytes", "Memory of a loaded model.", labels=["model_name"])
        for entry in models.entries:
            states = Counter({entry.state: 1})
            for name in get_args(State):
                state.add_metric([entry.name, name], states[name])
            loads.add_metric([entry.name], entry.num_loads)
            memory.add_metric([entry.name], entry.num_bytes)
        waiting = GaugeMetricFamily("foreword:requests_waiting_for_models", "Requests whose model is being loaded.")
        waiting.add_metric([], len(models.waiting))
        budget = GaugeMetricFamily("foreword:model_budget_bytes", "Memory that loaded models may use together.")
        budget.add_metric([], models.budget or 0)
        yield from (state, loads, memory, waiting, budget)
