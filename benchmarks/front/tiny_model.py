"""A model that computes next to nothing: one layer of zeros, and the same token for ever.

    python tiny_model.py SmolLM2-135M-Instruct.Q4_1.gguf DIRECTORY

Writes model.gguf, and the configuration and tokenizer that vLLM reads. Needs the packages gguf and tokenizers. The
tokenizer is the first part of that of the given file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY, WIDTH, CONTEXT = 4096, 32, 1024
WORD = "\u0120time"  # " time"


def main(source: str, destination: str) -> None:
    folder = Path(destination)
    folder.mkdir(parents=True, exist_ok=True)
    fields = gguf.GGUFReader(source).fields

    def value(name: str) -> object:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens = value("tokens")[:VOCABULARY]
    known = set(tokens)
    merges = [merge for merge in value("merges") if merge.replace(" ", "") in known]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model(value("model"))
    writer.add_tokenizer_pre(value("pre"))
    writer.add_token_list(tokens)
    writer.add_token_types(value("token_type")[:VOCABULARY])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(value("bos_token_id"))
    writer.add_eos_token_id(value("eos_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    output = np.zeros((VOCABULARY, WIDTH), np.float32)
    output[tokens.index(WORD)] = 1
    writer.add_tensor("token_embd.weight", np.ones((VOCABULARY, WIDTH), np.float32))
    writer.add_tensor("output.weight", output)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[value("eos_token_id")]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
