"""Triton kernels of a step, K0 to K6. `foreword.device.kernels.catalog` lists them with the types they compile for."""
