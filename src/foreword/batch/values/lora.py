"""A LoRA adapter as a scheduler names it."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.errors import ConfigError
from foreword.integers import is_int32


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """The adapter of a request. lora_id: 1 or more, equal for equal adapters; 0 means no adapter and has no value."""

    lora_id: int
    name: str
    path: str = ""

    def __post_init__(self) -> None:
        if not is_int32(self.lora_id, 1):
            raise ConfigError(f"LoraRequest(lora_id={self.lora_id!r}): must be 1 or more; 0 means no adapter")
