"""Record what this package reads of vLLM in each of its releases, from the wheels and without installing them.

    python -m vllm_compat record 0.32.0 0.33.0     read these releases into releases.json
    python -m vllm_compat check                    compare the newest release with the last recorded one; status 1 if
                                                   anything differs

`make vllm-compat` does the second. The page docs/vllm-compatibility.md is made from releases.json by `make pages`.
"""
