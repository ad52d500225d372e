"""Models of others that answer better than those known by name, as data: which of them fit into how much memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

KV_BYTES = 2 << 30
"""Memory for the KV cache and for the process, which each of them gets."""


@dataclass(frozen=True, slots=True)
class Recommended:
    """One file of the hub that loads.

    model: what ``-m`` takes. size: its bytes, about; active: those that a token reads, fewer than all with experts.
    good_at: in a few words. license: of the weights, as the hub names it. confirmed: what of id, size and license was
    read on a page of the hub; nothing: the row is from memory.
    """

    model: str
    size: float
    good_at: str
    license: str
    active: float = 0.0
    confirmed: str = ""

    @property
    def memory(self) -> float:
        """The bytes that it needs."""
        return self.size + KV_BYTES

    def most_tokens_per_second(self, memory_bytes_per_second: float) -> float:
        """Return the bound on tokens per second of one request: every token reads the active weights once."""
        return memory_bytes_per_second / (self.active or self.size)


RECOMMENDED = (
    Recommended("Qwen/Qwen3-0.6B-GGUF:Q8_0", 0.64e9, "short answers, thinking, tool calls", "Apache-2.0"),
    Recommended(
        "LiquidAI/LFM2-1.2B-GGUF:Q4_K_M",
        0.73e9,
        "chats, extraction; fast: few attention layers",
        "LFM 1.0",
        confirmed="licence",
    ),
    Recommended("Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M", 1.1e9, "chats, many languages", "Apache-2.0"),
    Recommended("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", 1.1e9, "code, gaps in code", "Apache-2.0"),
    Recommended(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
        1.1e9,
        "chats in English",
        "Apache-2.0",
        confirmed="id, size, licence",
    ),
    Recommended("Qwen/Qwen3-1.7B-GGUF:Q8_0", 1.8e9, "answers, thinking, tool calls", "Apache-2.0"),
    Recommended(
        "Qwen/Qwen3-4B-GGUF:Q4_K_M",
        2.5e9,
        "answers, thinking, code, tool calls",
        "Apache-2.0",
        confirmed="size, licence",
    ),
    Recommended(
        "ibm-granite/granite-4.0-h-tiny-GGUF:Q4_K_M",
        4.2e9,
        "documents, tool calls; fast",
        "Apache-2.0",
        0.7e9,
        confirmed="licence",
    ),
    Recommended("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5.0e9, "answers, thinking, code, tool calls", "Apache-2.0"),
    Recommended(
        "unsloth/gpt-oss-20b-GGUF:Q4_K_M",
        11.6e9,
        "answers, thinking, tool calls; fast for its size",
        "Apache-2.0",
        2.3e9,
        "id, size, licence",
    ),
    Recommended("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18.6e9, "the best of these; fast for its size", "Apache-2.0", 2.1e9),
)
"""The models from the smallest to the largest. The project pins none of them, and has not run these files."""


def fitting(memory: float) -> Iterator[Recommended]:
    """Return the models that fit into so many bytes, the largest first."""
    return (model for model in reversed(RECOMMENDED) if model.memory <= memory)
