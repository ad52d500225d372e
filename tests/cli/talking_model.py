"""A tiny random model that writes lower-case letters, with a chat template, as a directory that commands can load."""

import json
from pathlib import Path

import numpy as np

from computing import replace_compute
from foreword import LLM
from foreword.models.safetensors import read_directory
from models.lora_files import random_factors, write_peft
from models.tiny import random_tensors, write_safetensors

SIZE, INNER, HEADS, LAYERS = 16, 24, 2, 2
ROLES = ("system", "user", "assistant")
SPECIAL = [*(f"<|{role}|>" for role in ROLES), "<|end|>"]
VOCAB = 256 + len(SPECIAL)
END = VOCAB - 1
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def write_talking_model(folder: Path, max_model_len: int = 1 << 17) -> Path:
    """Token i is byte i; the last ones are special. Greedy answers never end by themselves."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": SIZE,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": max_model_len, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": END, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (VOCAB, SIZE), "model.norm.weight": (SIZE,), "lm_head.weight": (VOCAB, SIZE)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (SIZE, SIZE) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INNER, SIZE) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (SIZE, INNER)}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (SIZE,) for name in ("input", "post_attention")}
    tensors = random_tensors(shapes, seed=5)
    head = tensors["lm_head.weight"]
    letters = np.arange(ord("a"), ord("z") + 1)
    head[np.setdiff1d(np.arange(VOCAB), letters)] = 0  # a logit of 0, less than that of some letter
    head[letters] *= 8
    write_safetensors(folder / "model.safetensors", tensors)
    hidden = [byte for byte in range(256) if byte not in PRINTABLE]
    names = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 256 + i, "content": text, **plain} for i, text in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
    }  # fmt: skip
    settings = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_adapter(folder: Path, model: Path, seed: int = 1) -> Path:
    """An adapter of a model, as a PEFT directory."""
    shapes = {name: tensor.shape for name, tensor in read_directory(model).items()}
    return write_peft(folder, random_factors(shapes, seed=seed), lora_alpha=16)


def failing_llm(model: str, **options) -> LLM:
    """The model, whose logits are not numbers for prompts that contain a "!"."""
    llm = LLM(model, executor="numpy", **options)
    compute = llm.engine.executor.compute

    def broken(batch, logits_indices):
        logits = compute(batch, logits_indices)
        for i, b in enumerate(np.searchsorted(batch.query_start_loc[1:], logits_indices, side="right").tolist()):
            if (
                ord("!")
                in batch.states.token_ids[batch.idx_mapping[b], : batch.states.prompt_len[batch.idx_mapping[b]]]
            ):
                logits[i, 3] = np.nan
        return logits

    replace_compute(llm.engine.executor, broken)
    return llm
