"""LoRA adapters: low-rank changes of a model's linear layers, read from PEFT directories and GGUF files."""

from foreword.models.lora.adapter import MAX_RANK, FileStates, LoraAdapter, LoraPair
from foreword.models.lora.loader import file_states, read_encoder_lora, read_lora, read_lora_by_names, with_content

__all__ = [
    "MAX_RANK",
    "FileStates",
    "LoraAdapter",
    "LoraPair",
    "file_states",
    "read_encoder_lora",
    "read_lora",
    "read_lora_by_names",
    "with_content",
]
