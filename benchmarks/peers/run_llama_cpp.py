"""llama.cpp through the C interface of llama-cpp-python, with all sequences in one context.

The `Llama` class of the package runs one sequence at a time, so `llama_batches.py` batches them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
from harness import main
from llama_batches import LlamaBatches


class LlamaCpp(LlamaBatches):
    engine, package = "llama.cpp", "llama_cpp_python"

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        self.threads = threads
        super().__init__(
            llama_cpp, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model)), longest
        )

    def new_context(self, num_seqs: int) -> ctypes.c_void_p:
        """Return a context with a separate cache per sequence, which is faster for large batches."""
        params = self.sized(llama_cpp.llama_context_default_params(), num_seqs, self.threads)
        params.kv_unified = False
        return llama_cpp.llama_init_from_model(self.model, params)

    def clear(self, context: ctypes.c_void_p) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

    def remove(self, context: ctypes.c_void_p, slot: int) -> None:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), slot, -1, -1)


if __name__ == "__main__":
    main(LlamaCpp)
