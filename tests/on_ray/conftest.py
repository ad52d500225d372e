"""A Ray of 8 logical CPUs that the tests start and stop. Without the extra tests are skipped."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import foreword

PATHS = os.pathsep.join((str(Path(foreword.__file__).parents[1]), str(Path(__file__).parents[1])))

with warnings.catch_warnings():  # Ray's own modules use what is deprecated
    warnings.simplefilter("ignore")
    try:
        import ray
        import ray.data
        import ray.serve
    except ModuleNotFoundError:
        ray = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": PATHS}},
    )
    yield
    ray.shutdown()
