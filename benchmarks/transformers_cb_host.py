"""Host time to prepare a step in transformers' continuous batching and in Foreword, on the same steps.

    python benchmarks/transformers_cb_host.py [--only S1] [--json]

transformers is the installed package, unchanged: `ContinuousBatchingIOs.prepare_batch_tensors` and `get_model_kwargs`
over a real `PagedAttentionCache` with pages of 256 tokens, its default. Only these are timed; Foreword's time includes
state changes. input_ids, positions and query_start_loc must be equal. It has no speculative steps, hence no S5.
"""

from __future__ import annotations

from host import options
from peers.environments import run_inside


def main() -> None:
    args = options.parse("Host time to prepare a step: transformers' continuous batching and Foreword.", steps=150)
    run_inside(args.peers, "transformers", variables={"OMP_NUM_THREADS": "1"})
    from host import transformers_comparison  # transformers and Foreword are installed only inside the environment

    transformers_comparison.run(args)


if __name__ == "__main__":
    main()
