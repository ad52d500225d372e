"""Words of messages: advice about unknown names, such as what those of other systems are called here; plurals."""

from __future__ import annotations

from collections.abc import Callable, Iterable

SIMILAR = 0.66
"""Least similarity, of 1, of a name that is suggested. Below, names that share only some letters match."""
LONGEST = 80
"""Characters of a name that similar ones are looked for: the time grows with their square."""

_BY_NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    # vLLM; a row also has the names of the others for the same
    "gpu_memory_utilization": (("kv_cache_bytes",), "a number of bytes, not a share"),
    "num_gpu_blocks_override": (("num_blocks",), ""),
    "enable_prefix_caching": (("prefix_caching",), ""),
    "no_enable_prefix_caching": (("prefix_caching",), "False turns it off"),
    "enable_chunked_prefill": (("chunked_prefill",), ""),
    "scheduling_policy": (("policy",), ""),
    "speculative_config": (("speculation",), "with speculation_num_tokens and the like"),
    "speculative_model draft_model model_draft -md": (("speculation_model",), 'with speculation="draft_model"'),
    "num_speculative_tokens draft draft_n draft_max": (("speculation_num_tokens",), ""),
    "prompt_lookup_min ngram_prompt_lookup_min": (("speculation_min_match",), ""),
    "prompt_lookup_max ngram_prompt_lookup_max": (("speculation_max_match",), ""),
    "kv_cache_dtype": (("kv_format",), ""),
    "quantization": (("weight_format",), "quantised files are read as they are"),
    "long_prefill_token_threshold": (("long_prefill_threshold",), ""),
    "tensor_parallel tp": (("tensor_parallel_size",), ""),
    "pipeline_parallel_size": ((), "A model is divided by tensor_parallel_size, not by layers; leave it out."),
    "data_parallel_size": (("replicas",), "of foreword serve"),
    "load_format": ((), "The format is found in the model's files; leave it out."),
    "tokenizer tokenizer_mode": ((), "The tokenizer is read from the model's files; leave it out."),
    "decode_context_parallel_size": (("context_parallel_size",), ""),
    "max_lora_rank": ((), "The rank of an adapter needs no setting; leave it out."),
    "max_loras max_cpu_loras": (("lora_bytes",), "a number of bytes, not of adapters"),
    "enable_lora": ((), "Adapters need no switch; leave it out."),
    "lora_modules lora adapters": (("adapter", "loras"), ""),
    "adapter": (("loras",), "a dictionary of paths by name"),
    "enforce_eager": ((), "Nothing is captured or compiled unless compile is given; leave it out."),
    "trust_remote_code": ((), "Code of a model's directory is never run; leave it out."),
    "disable_log_requests": (("access_log",), "off unless it is given"),
    "disable_log_stats": ((), "Nothing is logged periodically; /metrics has the numbers. Leave it out."),
    "swap_space": ((), "Preempted requests are computed again, or read back with host_cache_bytes; leave it out."),
    "distributed_executor_backend": (("executor",), ""),
    "vllm_xargs": (("extra_args",), ""),
    "override_generation_config": (("generation_config",), '"ignore" leaves the file out; values belong to requests'),
    "guided_json": (("structured_outputs", "response_format"), 'as {"json": schema}'),
    "guided_regex": (("structured_outputs",), 'as {"regex": pattern}'),
    "guided_choice": (("structured_outputs",), 'as {"choice": […]}'),
    "guided_grammar grammar": (("structured_outputs",), 'as {"grammar": text}'),
    "response_format": (("structured_outputs",), 'as {"json": schema}'),
    "use_beam_search": ((), "There is no beam search; best_of draws candidates. Leave it out."),
    "length_penalty early_stopping num_beams": ((), "There is no beam search; leave it out."),
    # `foreword explain`, llama.cpp, Ollama
    "budget n_batch batch_size ubatch_size num_batch": (("max_num_batched_tokens",), ""),
    "n_predict predict -n num_predict max_new_tokens": (("max_tokens",), ""),
    "ctx_size n_ctx -c": (("max_model_len",), "tokens of one request"),
    "n_threads threads -t num_thread": (("num_threads",), ""),
    "parallel n_parallel -np": (("max_num_seqs",), ""),
    "cache_type_k cache_type_v": (("kv_format",), "keys and values have one format"),
    "n_gpu_layers gpu_layers -ngl num_gpu": (
        (),
        'A model is on one device: executor="device" or "torch". Leave it out.',
    ),
    "mlock": ((), "Packed weights stay in memory; leave it out."),
    "no_mmap": ((), "Weights are packed while they are read; leave it out."),
    "flash_attn -fa": ((), "Attention never stores all scores; leave it out."),
    "rope_freq_base rope_scaling": ((), "It is read from the model's files; leave it out."),
    "repeat_penalty": (("repetition_penalty",), ""),
    "temp": (("temperature",), ""),
    "tfs_z": ((), "There is no tail-free sampling; min_p serves the same purpose. Leave it out."),
    "mirostat": ((), "There is no mirostat; min_p or top_n_sigma serve the same purpose. Leave it out."),
    "json_schema": (("json", "structured_outputs", "response_format"), ""),
    "cache_prompt": (("prefix_caching",), "a setting of the engine, on unless it is turned off"),
    "num_ctx": (("max_model_len",), "a setting of the engine"),
    "num_keep": ((), "A prompt is never cut in the middle; truncate_prompt_tokens keeps its end. Leave it out."),
    "keep_alive": (("model_keep_alive",), "of foreword serve with several models"),
    "penalize_newline": ((), "Penalties treat all tokens alike; logit_bias changes one. Leave it out."),
    # transformers
    "max_length": (("max_tokens", "max_model_len"), ""),
    "do_sample": (("temperature",), "0 is greedy"),
    "num_return_sequences": (("n",), ""),
    "no_repeat_ngram_size": (("dry_multiplier",), "a penalty of repetitions by their length"),
    "torch_dtype": (("dtype",), ""),
    "float32": (("fp32",), ""),
    "float16 half": (("fp16",), ""),
    "bfloat16": (("bf16",), ""),
    "device_map": (("device",), ""),
}
OTHERS = {name: row for names, row in _BY_NAMES.items() for name in names.split()}
"""Name in another system → what it is called here, the first known one, and a remark; without a name all of the advice.
"""


def plain_name(name: str) -> str:
    """Return a name as settings have it, from one as a command line may have it: "--Max-Num-Seqs", ``max_num_seqs``."""
    return name.lstrip("-").replace("-", "_").lower()


def nearest(name: str, known: Iterable[str], least: float = SIMILAR) -> str | None:
    """Return the known name that is most similar, None if none is similar enough."""
    from difflib import get_close_matches  # here: it is slow to import, and only errors need it

    if len(name) > LONGEST:
        return None
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=least)), None)


def advice(
    name: str,
    known: Iterable[str],
    otherwise: str,
    *,
    of_requests: Iterable[str] = (),
    form: Callable[[str], str] = str,
) -> str:
    """Return a sentence that says what to use instead of an unknown name.

    of_requests: names that are no options, but parameters of a request. otherwise: the advice if nothing is similar.
    form: writes a known name as users do.
    """
    if len(name) > LONGEST:
        return otherwise
    known, of_requests = set(known), set(of_requests)
    plain = plain_name(name)
    names, remark = OTHERS.get(name) or OTHERS.get(plain, ((), ""))
    there = next((one for one in names if one in known | of_requests), None)
    if there is None and not names and remark:
        return remark
    said = there is not None
    there = there or (plain if plain in of_requests else nearest(plain, known) or nearest(plain, of_requests))
    if there is None:
        return otherwise
    written = repr(form(there))
    found = f"Here it is {written}{f' ({remark})' if remark else ''}." if said else f"Did you mean {written}?"
    if there in known:
        return found
    return f"{'' if there == plain else f'{found} '}It is a parameter of a request: pass SamplingParams({there}=…)."


def counted(count: int, noun: str) -> str:
    """Return a number and its noun: "1 request", "3 requests"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
