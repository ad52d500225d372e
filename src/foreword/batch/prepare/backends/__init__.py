"""Three ways to compute a step, bit for bit equal: `loops` defines, `vectorized` and `native` compute.

Each module has ``run(states, buffers, plan, pad, gather) -> Scalars``. It raises for a plan that `plan.check` refuses,
with nothing written; otherwise it begins a generation of the buffers and writes every tensor of the step into them.
pad: (tokens, requests) after padding, −1 for none. gather: whether to gather the block tables.
"""
