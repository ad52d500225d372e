"""The files that are made from tables. `make pages` writes them, and `tests/test_pages.py` holds each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docpages import (
    benchmarks,
    chart,
    errors,
    life,
    migration,
    model_types,
    models,
    routes,
    sampling_parameters,
    settings,
    tour,
    vllm,
)
from foreword.batch.proof.spec import TENSORS, render

ROOT = Path(__file__).parents[2]

PAGES: dict[str, Callable[[str], str]] = {
    "src/foreword/engine/option_types.py": lambda page: settings.option_types(),
    "src/foreword/executors/option_types.py": lambda page: settings.executor_option_types(),
    "docs/settings.md": lambda page: settings.page(),
    "docs/sampling-parameters.md": lambda page: sampling_parameters.page(),
    "docs/errors.md": lambda page: errors.page(),
    "docs/benchmarks.md": benchmarks.page,
    "docs/benchmarks.svg": lambda page: chart.picture(),
    "docs/life-of-a-token.md": life.page,
    "docs/life-of-a-token.svg": lambda page: life.picture(),
    "docs/tensors.md": lambda page: render(TENSORS),
    "docs/vllm-compatibility.md": lambda page: vllm.page(),
    "docs/from-other-engines.md": migration.with_table_of_names,
    "docs/models.md": models.with_tables,
    "docs/model-types.md": lambda page: model_types.page(),
    "docs/server.md": routes.with_table_of_routes,
    **tour.PAGES,
}
"""File → the function from its content to what it should be."""


def written(name: str) -> str:
    """Return what a file should be. A new one is made from nothing."""
    path = ROOT / name
    return PAGES[name](path.read_text(encoding="utf-8") if path.exists() else "")
