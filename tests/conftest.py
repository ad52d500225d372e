"""Fixtures of model files. The default model is fetched once and cached; the larger ones are used if they are there."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread, set before NumPy loads: on a busy machine its threads wait for each other far longer than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from foreword.models import registry

# A shell starts background commands with interrupts ignored, which processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples take as long as the machine needs. Each run draws others. `make thorough` draws more of them.
for name, number in (("foreword", 20), ("thorough", 100)):
    settings.register_profile(name, deadline=None, max_examples=number, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("foreword")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist calls it
def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: three for two cores, since tests wait for processes, sockets and timeouts."""
    return (os.cpu_count() or 1) * 3 // 2


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `long` all cases of a test marked `one_in(number)` but every number-th."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker("long")
            seen[name] += 1


@pytest.fixture(scope="session", autouse=True)
def no_recordings_of_failed_steps_are_left() -> Iterator[None]:
    """Delete what engines of this process recorded of steps that failed."""
    yield
    for path in Path(tempfile.gettempdir()).glob(f"foreword-{os.getpid()}-step-*.jsonl.gz"):
        path.unlink()


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model whose greedy answers are endless lower-case letters."""
    from talking_model import write_talking_model  # half a second at the start of every other session

    return write_talking_model(tmp_path_factory.mktemp("models") / "talker")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return registry.pull("smollm2")


def _cached(name: str) -> Path:
    path = registry.cached_path(name)
    if path is None:
        pytest.skip(f"{name} is not on this machine: `foreword models pull {name}` first")
    return path


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    return _cached("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return _cached("gemma3-270m")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    return _cached("all-minilm-l6-v2")
