"""Quantised checkpoints in safetensors, whose matrices are converted to our number formats when they are read."""

from foreword.models.quantized.checkpoint import conversions, read_weights

__all__ = ["conversions", "read_weights"]
