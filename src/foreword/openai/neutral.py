"""Fields of bodies that are not supported, with the values that have no effect and are therefore accepted.

The names are those that clients send by default: the official clients, LiteLLM, LangChain, Open WebUI,
SillyTavern, Zed, and clients of vLLM, llama.cpp and text-generation-webui with these servers' defaults. The first value
of a field is the one that errors recommend. A field that is null counts as absent everywhere.
"""

from __future__ import annotations

from foreword.fields import Neutral

_OF_OPENAI: Neutral = {"prompt_cache_retention": ("in-memory", "in_memory"), "service_tier": ("auto", "default")}

OF_SAMPLERS: Neutral = {
    # vLLM
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    # llama.cpp, text-generation-webui, SillyTavern
    "add_bos_token": (True,),
    "ban_eos_token": (False,),
    "banned_strings": ([],),
    "banned_tokens": ("", []),
    "cache_prompt": (True,),
    "custom_token_bans": ("",),
    "do_sample": (True,),
    "dynamic_temperature": (False,),
    "dynatemp_exponent": (1.0,),
    "dynatemp_range": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "grammar": ("",),
    "grammar_string": ("",),
    "guidance_scale": (1.0,),
    "id_slot": (-1,),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_keep": (0,),
    "n_probs": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repeat_penalty": (1.0,),
    "return_progress": (False,),
    "smoothing_factor": (0,),
    "temperature_last": (False,),
    "tfs": (1.0,),
    "tfs_z": (1.0,),
    "timings_per_token": (False,),
    "top_a": (0,),
    "typ_p": (1.0,),
    "typical": (1.0,),
}
"""Parameters of other samplers, turned off."""

GENERATION: Neutral = {**OF_SAMPLERS, **_OF_OPENAI, "store": (False,)}

CHAT: Neutral = {
    **GENERATION,
    "suffix": ("",),
    "add_special_tokens": (False,),  # the chat template writes them
    "audio": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION: Neutral = {**GENERATION, "add_special_tokens": (True,)}

STREAM_OPTIONS: Neutral = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

RESPONSES: Neutral = {
    **OF_SAMPLERS,
    **_OF_OPENAI,
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "best_of": (1,),
    "context_management": (),
    "conversation": (),
    "image": (),
    # A reasoning item has its text, so it can be given back as it is.
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_cache_options": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

REASONING: Neutral = {
    "context": (),
    "generate_summary": ("auto",),
    "mode": (),
    "summary": ("auto",),  # an item has all of its reasoning
}

TEXT_OF_RESPONSES: Neutral = {"verbosity": ("medium",)}

POOLING: Neutral = {"add_special_tokens": (True,), "service_tier": _OF_OPENAI["service_tier"]}

MESSAGES: Neutral = {
    **OF_SAMPLERS,
    "best_of": (1,),
    "container": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "n": (1,),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "stop": (),
    "user_profile_id": (),
    "workspace_id": (),
}

TOOL_OF_MESSAGES: Neutral = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),
    "input_examples": ([],),
    "strict": (False,),
}
