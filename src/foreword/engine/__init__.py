"""The loop that turns requests into outputs, and the offline interface on top of it."""

from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine
from foreword.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foreword.engine.text import TextStream
from foreword.executors.executor import Executor

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Executor",
    "RequestMetrics",
    "RequestOutput",
    "TextStream",
]
