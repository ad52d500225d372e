"""vLLM's second model runner (`vllm.v1.worker.gpu`) on a machine without Triton: its kernels as functions of NumPy.

Importing `foreword.vllm.kernels` needs NumPy alone, `foreword.vllm.registration` vLLM.
"""
