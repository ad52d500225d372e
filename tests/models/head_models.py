"""Tiny models with a head for further tokens (MTP), and what such a head computes, over whole texts."""

from pathlib import Path

import numpy as np

from foreword.batch import InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.executors.functions import rms_norm
from foreword.executors.inputs import StepInputs
from foreword.executors.numpy import NumpyExecutor
from foreword.executors.pool import batch_groups
from foreword.models.loader import load_model
from models import gguf_models
from models.recorded import TINY
from models.tiny import random_tensors, write_model

IN_GGUF = {
    "qwen3-next": {"rope.dimension_count": 4}, "qwen3_5": {"rope.dimension_count": 8}, "deepseek-v3": {},
    "qwen3_5-moe": {"rope.dimension_count": 8}, "glm4-moe": {"rope.dimension_count": 6},
    "bailing-hybrid": {}, "deepseek-v32": {}, "glm-moe-dsa": {},
}  # fmt: skip
"""Metadata of the GGUF files of the families with a head."""


def head_shapes(name: str) -> dict[str, list[int]]:
    """Return the last layer with attention of a recorded model as its head; with an indexer, if some have one."""
    shapes = TINY[name]["shapes"]
    hidden = shapes["model.norm.weight"][0]
    numbers = [int(n.split(".")[2]) for n in shapes if ".self_attn." in n or ".attention.kv_b" in n]
    numbers = [int(n.split(".")[2]) for n in shapes if ".indexer." in n] or numbers
    prefix, own = f"model.layers.{max(numbers)}.", "mtp.layers.0."
    norms = ["mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"]
    projection, copies = "mtp.fc", {}
    if name in ("deepseek-v3", "glm4-moe", "bailing-hybrid", "deepseek-v32", "glm-moe-dsa"):
        own = f"model.layers.{TINY[name]['config']['num_hidden_layers']}."
        last = "final_layernorm" if name == "bailing-hybrid" else "shared_head.norm"
        norms, projection = [f"{own}{n}" for n in (last, "enorm", "hnorm")], f"{own}eh_proj"
        copies = {f"{own}{n}.weight": shapes["lm_head.weight"] for n in ("embed_tokens", "shared_head.head")}
    layer = {own + n.removeprefix(prefix): shape for n, shape in shapes.items() if n.startswith(prefix)}
    more = {f"{n}.weight": [hidden] for n in norms} | {f"{projection}.weight": [hidden, 2 * hidden]}
    return layer | more | copies


def with_head(folder: Path, name: str, drop: str = "", form: str = "safetensors"):
    config, shapes = TINY[name]["config"], TINY[name]["shapes"]
    if name == "qwen3-next":  # GGUF files have experts in every layer
        config, shapes = config | {"mlp_only_layers": []}, gguf_models.experts_everywhere(TINY[name], 3)
    shapes = shapes | head_shapes(name)
    shapes.pop(drop, None)
    tensors = random_tensors(shapes)
    if form == "safetensors":
        return load_model(write_model(folder / name, config, tensors))
    architecture = gguf_models.architecture_of(config)
    more = dict(IN_GGUF[name]) | {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    typed = {f"{architecture}.{key}": ("u32", value) for key, value in more.items()}
    return load_model(gguf_models.write(folder / f"{name}.gguf", config, tensors, typed))


def whole(spec, weights, tokens, given=None):
    """The logits and the hidden states of a whole text, in one step of the oracle."""
    groups = batch_groups(spec, 16)
    states = RequestStates(max_num_reqs=1, max_model_len=64, vocab_size=spec.vocab_size, kv_groups=groups)
    blocks = [list(range(1 + 4 * g, 5 + 4 * g))[: table.width] for g, table in enumerate(states.block_tables)]
    states.add_request(NewRequest("a", [*tokens, 0], blocks))
    executor = NumpyExecutor(spec, weights, num_blocks=1 + 4 * len(groups), block_size=16)
    executor.given = None if given is None else StepInputs((np.arange(len(tokens)), given))
    batch = prepare_inputs(states, {"a": len(tokens)}, InputBuffers.for_states(states, 64))
    every = np.arange(len(tokens))
    return executor.compute(batch, every), executor.hidden_states(every)


def head_logits(model, known: list[int], hidden):
    """The logits of a head after known tokens, from the hidden states of all but the last; its own hidden states."""
    head, spec = model.head(), model.spec
    embed = head.weights["embed"].dequantize()
    e = rms_norm(embed[known[1:]], spec.norm_eps) * head.token_norm.dequantize()
    h = rms_norm(hidden, spec.norm_eps) * head.hidden_norm.dequantize()
    x = np.concatenate([e, h], axis=1) @ head.projection.dequantize().T
    return whole(head.spec, head.weights, known[1:], x)


def drafts_of(model, tokens: list[int], count: int) -> list[int]:
    """Return what the head drafts after known tokens."""
    _, hidden = whole(model.spec, model.weights, tokens[:-1])
    known, drafts = list(tokens), []
    while len(drafts) < count:
        logits, own = head_logits(model, known, hidden)
        drafts.append(int(logits[-1].argmax()))
        known.append(drafts[-1])
        hidden = np.concatenate([hidden, own[-1:]])
    return drafts
