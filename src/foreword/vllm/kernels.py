"""The functions of this package by the names of vLLM's kernels. The module needs only NumPy and does not import vLLM.

A platform plugin takes functions from `KERNELS`, or calls `foreword.vllm.registration.register`, which replaces the
kernels of vLLM's modules. `foreword.vllm.vectors` has inputs and results of vLLM's own kernels to test them with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping

from foreword.errors import ConfigError
from foreword.vllm import inputs, recurrent, sampling, thinking, verification

PACKAGE = "vllm.v1.worker.gpu"

_FUNCTIONS: dict[str, tuple[Callable[..., None], ...]] = {
    "buffer_utils": (inputs.apply_write_kernel,),
    "block_table": (inputs.gather_block_tables_kernel, inputs.compute_slot_mappings_kernel),
    "cp_utils": (inputs.dcp_local_seq_lens_kernel,),
    "input_batch": (
        inputs.prepare_prefill_inputs_kernel,
        inputs.prepare_pos_seq_lens_kernel,
        inputs.combine_sampled_and_draft_tokens_kernel,
        inputs.expand_idx_mapping_kernel,
        inputs.get_num_sampled_and_rejected_kernel,
        inputs.post_update_kernel,
        inputs.post_update_num_computed_tokens_kernel,
    ),
    "metrics.logits": (sampling.num_nans_kernel,),
    "mm.rope": (inputs.prepare_rope_positions_kernel,),
    "model_states.mamba_hybrid": (inputs.scatter_num_accepted_kernel, inputs.fill_num_accepted_kernel),
    "model_states.prompt_embeds": (inputs.apply_prompt_embeds_kernel,),
    "sample.bad_words": (sampling.bad_words_kernel,),
    "sample.gumbel": (sampling.temperature_kernel, sampling.gumbel_sample_kernel),
    "sample.logit_bias": (sampling.bias_kernel,),
    "sample.logprob": (sampling.topk_log_softmax_kernel, sampling.ranks_kernel, sampling.fill_logprob_token_ids_kernel),
    "sample.min_p": (sampling.min_p_kernel,),
    "sample.penalties": (sampling.penalties_kernel, sampling.bincount_kernel),
    "sample.prompt_logprob": (sampling.prompt_logprobs_token_ids_kernel,),
    "sample.thinking_budget": (thinking.update_committed_marker_cache_kernel, thinking.thinking_budget_kernel),
    "spec_decode.ngram.speculator": (verification.ngram_scan_kernel, verification.ngram_finalize_kernel),
    "spec_decode.rejection_sampler": (verification.flatten_sampled_kernel, verification.gather_draft_sampled_kernel),
    "spec_decode.rejection_sampler_utils": (
        verification.compute_local_logits_stats_kernel,
        verification.rejection_kernel,
        verification.resample_kernel,
        verification.insert_resampled_kernel,
    ),
    "structured_outputs": (sampling.apply_grammar_bitmask_kernel,),
}

KERNELS: Mapping[str, Callable[..., None]] = {
    f"{PACKAGE}.{module}._{function.__name__}": function
    for module, functions in _FUNCTIONS.items()
    for function in functions
} | {
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": inputs.zero_kv_blocks_kernel,
    **{
        f"vllm.v1.worker.mamba_utils.{function.__name__}": function
        for function in (
            recurrent.preprocess_mamba_align_fused_kernel,
            recurrent.precopy_mamba_align_fused_kernel,
            recurrent.postprocess_mamba_fused_kernel,
            recurrent.get_aligned_state_indices_multi_group_kernel,
        )
    },
}
"""Full name of a kernel of vLLM → its function: ``function(grid, **arguments)`` with the names of its arguments."""


def check_arguments(kernel: str, names: Iterable[str]) -> None:
    """Raise ConfigError if the function of a kernel does not have exactly the arguments ``names``, optional ones aside.

    A kernel of another version of vLLM is refused here before it runs.
    """
    parameters = dict(inspect.signature(KERNELS[kernel]).parameters)
    del parameters["grid"]
    unknown = [name for name in names if parameters.pop(name, None) is None]
    missing = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if unknown or missing:
        raise ConfigError(
            f"{kernel}: this version of vLLM has other arguments than 0.32 and 0.33 (new: {unknown}, gone: {missing}); "
            "use one of those versions"
        )
