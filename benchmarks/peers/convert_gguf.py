"""Convert the default model's GGUF file to another format with llama.cpp.

    python convert_gguf.py GGUF OUTPUT TYPE       in the environment `llama_cpp`; TYPE: q4_0, q8_0, bf16, f16, f32

Q4_1 weights are dequantised first: q8_0, bf16 and f32 preserve them, q4_0 loses visible quality.
"""

from __future__ import annotations

import ctypes
import os
import sys

import llama_cpp

source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = {
    "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}[kind]
params.allow_requantize = True
partial = f"{target}.partial"
if llama_cpp.llama_model_quantize(source.encode(), partial.encode(), ctypes.byref(params)):
    raise SystemExit(f"llama.cpp could not convert {source} to {kind}")
os.replace(partial, target)
