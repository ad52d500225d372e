"""Check the steps of vLLM while it serves, and run the kernels of its second model runner as functions of NumPy.

`CheckedWorker` is vLLM's worker of this platform with the check, for ``vllm serve --worker-cls
foreword.vllm.CheckedWorker``; FOREWORD_CHECK needs no option (docs/check-your-engine.md).

Importing `foreword.vllm.kernels` needs NumPy alone, `foreword.vllm.registration` vLLM.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "CheckedWorker":
        from foreword.vllm.attach import checked_worker  # it imports vLLM

        return checked_worker()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
