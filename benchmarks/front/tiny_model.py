"""A GGUF file of a model that computes next to nothing: one layer of zeros, and the same token for ever.

    python tiny_model.py SmolLM2-135M-Instruct.Q4_1.gguf tiny.gguf

Needs the package gguf. The tokenizer is the first part of that of the given file.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

VOCABULARY, WIDTH, CONTEXT = 4096, 32, 1024
WORD = "\u0120time"  # " time"


def main(source: str, destination: str) -> None:
    fields = gguf.GGUFReader(source).fields

    def value(name: str) -> object:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens = value("tokens")[:VOCABULARY]
    known = set(tokens)
    writer = gguf.GGUFWriter(destination, "llama")
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
    writer.add_token_merges([merge for merge in value("merges") if merge.replace(" ", "") in known])
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


if __name__ == "__main__":
    main(*sys.argv[1:])
