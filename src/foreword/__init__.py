"""Foreword: step preparation for the forward pass of an LLM, as a library, and a complete small engine around it.

`foreword.batch` is the library and needs NumPy alone; the names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.batch import PoolingParams, SamplingParams
    from foreword.engine.async_llm import AsyncLLM
    from foreword.engine.llm import LLM
    from foreword.engine.outputs import CompletionOutput, RequestOutput
    from foreword.engine.pooling import PoolingRequestOutput
    from foreword.errors import (
        CapacityError,
        ConfigError,
        ContextLengthError,
        EngineError,
        ForewordError,
        ModelError,
        ModelOutputError,
        PlanError,
        RequestError,
        StepError,
        UnknownAdapterError,
        UnsupportedModelError,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EngineError",
    "ForewordError",
    "ModelError",
    "ModelOutputError",
    "PlanError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepError",
    "UnknownAdapterError",
    "UnsupportedModelError",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "foreword.engine.async_llm",
    "LLM": "foreword.engine.llm",
    "CompletionOutput": "foreword.engine.outputs",
    "PoolingParams": "foreword.batch",
    "PoolingRequestOutput": "foreword.engine.pooling",
    "RequestOutput": "foreword.engine.outputs",
    "SamplingParams": "foreword.batch",
    "CapacityError": "foreword.errors",
    "ConfigError": "foreword.errors",
    "ContextLengthError": "foreword.errors",
    "EngineError": "foreword.errors",
    "ForewordError": "foreword.errors",
    "ModelError": "foreword.errors",
    "ModelOutputError": "foreword.errors",
    "PlanError": "foreword.errors",
    "RequestError": "foreword.errors",
    "StepError": "foreword.errors",
    "UnknownAdapterError": "foreword.errors",
    "UnsupportedModelError": "foreword.errors",
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'foreword' has no attribute {name!r}")
        from importlib import import_module

        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "foreword.engine":
                raise
            text = f"foreword-batch has no {name}: it is the layer alone. Install foreword in its place"
            raise ImportError(text) from None
