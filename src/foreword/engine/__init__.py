"""The engine: its loop, the offline and the online interface, and observers."""

from foreword.engine.config import EngineConfig, engine_config
from foreword.engine.engine import Engine
from foreword.engine.observer import EngineMetrics, EngineObserver
from foreword.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foreword.engine.request_group import RequestOptions
from foreword.engine.text import TextStream

__all__ = [
    "CompletionOutput", "Engine", "EngineConfig", "EngineMetrics", "EngineObserver", "RequestMetrics", "RequestOptions",
    "RequestOutput", "TextStream", "engine_config",
]  # fmt: skip
