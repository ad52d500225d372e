"""Executors: run a model on an `InputBatch` and sample. `numpy` is short and the oracle, `native` is the product."""

from foreword.executors.executor import (
    Capability,
    Executor,
    LoraExecutor,
    PendingStep,
    StartedExecutor,
    TransferExecutor,
    check_inputs,
)
from foreword.executors.host import HostExecutor

__all__ = [
    "Capability", "Executor", "HostExecutor", "LoraExecutor", "PendingStep", "StartedExecutor", "TransferExecutor",
    "check_inputs",
]  # fmt: skip
