"""Convert vLLM's per-request objects to the types of this package: requests, sampling, pooling, LoRA, multimodal
features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from foreword.batch.values.pooling import PoolingParams
from foreword.batch.values.requests import LoraRequest, MultiModalFeature, NewRequest
from foreword.batch.values.sampling_params import SamplingParams
from foreword.batch.values.structured_outputs import KINDS, StructuredOutputs

_SAME = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "seed",
    "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens",
    "include_stop_str_in_output", "allowed_token_ids", "logit_bias", "bad_words_token_ids",
)  # fmt: skip


def new_request(data: Any, *, with_params: bool = True, bidirectional: Collection[str] = ()) -> NewRequest:
    """Convert NewRequestData to NewRequest. If prefill_token_ids is longer than the prompt, the rest are outputs.

    with_params: whether to take its sampling parameters. bidirectional: modalities whose embedded positions see each
    other.
    """
    features = [_feature(f) for f in data.mm_features or ()]
    prompt, known = data.prompt_token_ids, getattr(data, "prefill_token_ids", None)
    embeds = None if data.prompt_embeds is None else np.asarray(data.prompt_embeds)
    prompt_len = len(prompt) if prompt is not None else 0 if embeds is None else len(embeds)
    mask = getattr(data, "prompt_is_token_ids", None) if embeds is not None and prompt is not None else None
    return NewRequest(
        data.req_id,
        prompt,
        data.block_ids,
        () if known is None else known[prompt_len:],
        data.num_computed_tokens,
        sampling_params(data.sampling_params) if with_params else None,
        0,
        embeds,
        prompt_is_token_id=None if mask is None else np.asarray(mask, np.bool_),
        mm_features=features,
        bidirectional_ranges=[r for f in features if f.modality in bidirectional for r in f.embedded_ranges],
        pooling_params=_pooling(data.pooling_params),
        lora_request=_lora(data.lora_request),
    )


def sampling_params(params: Any) -> SamplingParams | None:
    """Convert vLLM's SamplingParams (or ours, or any object with some of the names) to ours; absent names keep our
    defaults.
    """
    if params is None or isinstance(params, SamplingParams):
        return params
    values = {name: value for name in _SAME if (value := getattr(params, name, None)) is not None}
    values["max_tokens"] = getattr(params, "max_tokens", None)
    values["top_k"] = max(getattr(params, "top_k", 0) or 0, 0)  # earlier versions use −1 for all tokens, later ones 0
    values["structured_outputs"] = _structured_outputs(getattr(params, "structured_outputs", None))
    values["stop"] = getattr(params, "stop", None) or ()
    values["stop_token_ids"] = tuple(getattr(params, "stop_token_ids", None) or ())
    return SamplingParams(**values)


def _structured_outputs(params: Any) -> Any:
    """Return vLLM's StructuredOutputsParams as a mapping of its kind. Options of its grammar do not change a step."""
    if params is None or isinstance(params, Mapping | StructuredOutputs):
        return params
    return {name: value for name in KINDS if (value := getattr(params, name, None)) is not None}


def _lora(request: Any) -> LoraRequest | None:
    if request is None or isinstance(request, LoraRequest):
        return request
    name, path = getattr(request, "lora_name", ""), getattr(request, "lora_path", "")
    return LoraRequest(int(request.lora_int_id), str(name), str(path))


def _pooling(params: Any) -> PoolingParams | None:
    if params is None or isinstance(params, PoolingParams):
        return params
    return PoolingParams(
        task=getattr(params, "task", None) or "embed",
        dimensions=getattr(params, "dimensions", None),
        normalize=bool(getattr(params, "normalize", True)),
    )


def _feature(spec: Any) -> MultiModalFeature:
    if isinstance(spec, MultiModalFeature):
        return spec
    place = spec.mm_position
    mask = None if getattr(place, "is_embed", None) is None else np.asarray(place.is_embed, np.bool_)
    return MultiModalFeature(
        spec.identifier, int(place.offset), int(place.length), mask, getattr(spec, "modality", "image")
    )
