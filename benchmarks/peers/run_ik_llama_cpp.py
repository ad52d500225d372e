"""ik_llama.cpp through the C interface of ik-llama-cpp-python, with all sequences in one context.

The `IkLlama` class of the package runs one sequence at a time, so `llama_batches.py` batches them. The module with the
C interface is private and has no function that removes one sequence, which is taken from its library.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from harness import main
from ik_llama_cpp import _ctypes_api as ik
from llama_batches import LlamaBatches

_NO_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


class IkLlamaCpp(LlamaBatches):
    engine, package = "ik_llama.cpp", "ik_llama_cpp_python"

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        library = ik.load_shared_library()
        library.llama_log_set(_NO_LOG, None)
        self._seq_rm = library.llama_kv_cache_seq_rm
        self._seq_rm.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        self._seq_rm.restype = ctypes.c_bool
        ik.llama_backend_init()
        self.model = ik.llama_model_load_from_file(str(model).encode(), ik.llama_model_default_params())
        self.threads = threads
        super().__init__(ik, ik.llama_vocab_n_tokens(ik.llama_model_get_vocab(self.model)), longest)

    def new_context(self, num_seqs: int) -> int | None:
        params = self.sized(ik.llama_context_default_params(), num_seqs, self.threads)
        params.flash_attn = True
        context: int | None = ik.llama_init_from_model(self.model, params)
        return context

    def clear(self, context: int) -> None:
        ik.llama_kv_cache_clear(context)

    def remove(self, context: int, slot: int) -> None:
        self._seq_rm(context, slot, -1, -1)


if __name__ == "__main__":
    main(IkLlamaCpp)
