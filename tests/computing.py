"""Other logits for an executor."""

from collections.abc import Callable
from functools import partial

from foreword.executors.host import HostExecutor


def replace_compute(executor: HostExecutor, compute: Callable) -> None:
    """Steps compute their logits by this function: greedy ones too, which the native executor draws without logits."""
    executor.compute = compute
    executor.draw = partial(HostExecutor.draw, executor)
