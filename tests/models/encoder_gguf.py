"""Write encoders as GGUF files, as llama.cpp's converter does: names, metadata, and vocabularies."""

import json
from pathlib import Path

import numpy as np

from foreword.models.quants import Quant
from models.gguf_writer import write

_BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "encoder.layer.{i}.attention.self.query": "blk.{i}.attn_q",
    "encoder.layer.{i}.attention.self.key": "blk.{i}.attn_k",
    "encoder.layer.{i}.attention.self.value": "blk.{i}.attn_v",
    "encoder.layer.{i}.attention.self.qkv": "blk.{i}.attn_qkv",
    "encoder.layer.{i}.attention.output.dense": "blk.{i}.attn_output",
    "encoder.layer.{i}.attention.output.LayerNorm": "blk.{i}.attn_output_norm",
    "encoder.layer.{i}.intermediate.dense": "blk.{i}.ffn_up",
    "encoder.layer.{i}.output.dense": "blk.{i}.ffn_down",
    "encoder.layer.{i}.output.LayerNorm": "blk.{i}.layer_output_norm",
}
_NOMIC = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
    "encoder.layers.{i}.attn.Wqkv": "blk.{i}.attn_qkv",
    "encoder.layers.{i}.attn.out_proj": "blk.{i}.attn_output",
    "encoder.layers.{i}.norm1": "blk.{i}.attn_output_norm",
    "encoder.layers.{i}.mlp.fc11": "blk.{i}.ffn_up",
    "encoder.layers.{i}.mlp.fc12": "blk.{i}.ffn_gate",
    "encoder.layers.{i}.mlp.fc2": "blk.{i}.ffn_down",
    "encoder.layers.{i}.norm2": "blk.{i}.layer_output_norm",
}
_JINA = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
    "encoder.layers.{i}.mixer.Wqkv": "blk.{i}.attn_qkv",
    "encoder.layers.{i}.mixer.out_proj": "blk.{i}.attn_output",
    "encoder.layers.{i}.norm1": "blk.{i}.attn_output_norm",
    "encoder.layers.{i}.mlp.fc1": "blk.{i}.ffn_up",
    "encoder.layers.{i}.mlp.fc2": "blk.{i}.ffn_down",
    "encoder.layers.{i}.norm2": "blk.{i}.layer_output_norm",
}
_DISTIL = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    **{f"transformer.layer.{{i}}.attention.{name}_lin": f"blk.{{i}}.attn_{name}" for name in "qkv"},
    "transformer.layer.{i}.attention.out_lin": "blk.{i}.attn_output",
    "transformer.layer.{i}.sa_layer_norm": "blk.{i}.attn_output_norm",
    "transformer.layer.{i}.ffn.lin1": "blk.{i}.ffn_up",
    "transformer.layer.{i}.ffn.lin2": "blk.{i}.ffn_down",
    "transformer.layer.{i}.output_layer_norm": "blk.{i}.layer_output_norm",
}
_MODERN = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm",
    "layers.{i}.attn.Wqkv": "blk.{i}.attn_qkv",
    "layers.{i}.attn.Wo": "blk.{i}.attn_output",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
    "layers.{i}.mlp.Wi": "blk.{i}.ffn_up",
    "layers.{i}.mlp.Wo": "blk.{i}.ffn_down",
    "final_norm": "output_norm",
}
_ARCHITECTURES = {
    "bert": ("bert", _BERT, "bert."),
    "roberta": ("bert", _BERT, "roberta."),
    "xlm-roberta": ("bert", _BERT, "roberta."),
    "distilbert": ("bert", _DISTIL, "distilbert."),
    "jina_embeddings_v3": ("jina-bert-v3", _JINA, "roberta."),
    "nomic_bert": ("nomic-bert", _NOMIC, "nomic_bert."),
    "modernbert": ("modern-bert", _MODERN, "model."),
}


def write_encoder_gguf(path, config, tensors, vocabulary, *, pooling=None, encode=None, fuse=False, **more):
    """The file of an encoder. config, tensors: of its directory, the latter float32 by name. vocabulary: metadata, see
    `word_pieces` and `unigrams`. encode: what stores a matrix, as (format, bytes); None: in F32. fuse: whether queries,
    keys and values are one tensor. more: metadata behind the architecture's name.
    """
    kind = config["model_type"]
    architecture, names, prefix = _ARCHITECTURES[kind]
    if kind == "distilbert":
        names_of_sizes = ("hidden_size", "dim"), ("intermediate_size", "hidden_dim"), ("num_hidden_layers", "n_layers")
        config = {name: config[own] for name, own in (*names_of_sizes, ("num_attention_heads", "n_heads"))} | config
    skipped = config["pad_token_id"] + 1 if "roberta" in kind else 0
    rope = config.get("rope_parameters") or {}
    values = {
        "context_length": ("u32", config["max_position_embeddings"] - skipped),
        "embedding_length": ("u32", config["hidden_size"]),
        "feed_forward_length": ("u32", config["intermediate_size"]),
        "block_count": ("u32", config["num_hidden_layers"]),
        "attention.head_count": ("u32", config["num_attention_heads"]),
        "attention.layer_norm_epsilon": ("f32", config.get("layer_norm_eps", config.get("norm_eps", 1e-12))),
        "attention.causal": ("bool", False),
    }
    if pooling is not None:
        values["pooling_type"] = ("u32", pooling)
    if kind in ("nomic_bert", "jina_embeddings_v3"):
        values["rope.freq_base"] = ("f32", rope["rope_theta"])
    if kind == "modernbert":
        values |= {
            "attention.sliding_window": ("u32", config["local_attention"]),
            "rope.freq_base": ("f32", rope["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": ("f32", rope["sliding_attention"]["rope_theta"]),
            "rope.scaling.type": ("str", "none"),
        }
    metadata = {"general.architecture": ("str", architecture), **vocabulary}
    if "type_vocab_size" in config:
        metadata["tokenizer.ggml.token_type_count"] = ("u32", config["type_vocab_size"])
    metadata |= {f"{architecture}.{key}": value for key, value in {**values, **more}.items()}
    stored = {}
    for name, value in _joined(tensors, prefix, fuse=fuse).items():
        module, _, part = name.rpartition(".")
        layer = next((text for text in module.split(".") if text.isdecimal()), "")
        template = ".".join("{i}" if text.isdecimal() else text for text in module.split("."))
        if template not in names:
            continue  # the pooler, and heads of masked language models
        if name == "embeddings.position_embeddings.weight":
            value = value[skipped:]
        own = f"{names[template].format(i=layer)}.{part}"
        is_matrix = value.ndim == 2 and encode is not None and "position" not in own and "types" not in own
        quant, data = encode(value) if is_matrix else (Quant.F32, value.astype("<f4").view(np.uint8))
        stored[own] = (quant, value.shape, data.reshape(-1))
    write(Path(path), metadata, stored)
    return path


def _joined(tensors, prefix, *, fuse):
    """The tensors without the prefix of classifiers; fuse: with queries, keys and values joined."""
    plain = {name.removeprefix(prefix): value for name, value in tensors.items()}
    if fuse:
        for name in [name for name in plain if "attention.self.query." in name]:
            parts = [plain.pop(name.replace("query", part)) for part in ("query", "key", "value")]
            plain[name.replace("query", "qkv")] = np.concatenate(parts)
    return plain


def _special(tokens, types, ids):
    named = {f"tokenizer.ggml.{name}_token_id": ("u32", i) for name, i in ids.items() if i is not None}
    return {"tokenizer.ggml.tokens": ("[str]", tokens), "tokenizer.ggml.token_type": ("[i32]", types), **named}


def word_pieces(tokenizer_json):
    """The metadata of a vocabulary of BERT, from its tokenizer.json: ##x is x, and x is ▁x, but for [X]."""
    given = json.loads(Path(tokenizer_json).read_text())
    special = {token["content"] for token in given["added_tokens"]}
    vocabulary = given["model"]["vocab"]
    texts = sorted(vocabulary, key=vocabulary.get)

    def stored(text):
        if text[0] == "[" and text[-1] == "]":
            return text
        return text[2:] if text.startswith("##") else f"▁{text}"

    types = [3 if text in special else 1 for text in texts]
    ids = {"unknown": vocabulary["[UNK]"], "seperator": vocabulary["[SEP]"], "padding": vocabulary["[PAD]"]}
    ids |= {"cls": vocabulary["[CLS]"], "mask": vocabulary.get("[MASK]"), "bos": vocabulary["[CLS]"]}
    return {"tokenizer.ggml.model": ("str", "bert"), **_special([*map(stored, texts)], types, ids)}


def unigrams(tokenizer_json):
    """The metadata of a vocabulary of XLM-RoBERTa, from its tokenizer.json."""
    given = json.loads(Path(tokenizer_json).read_text())
    special = {token["content"] for token in given["added_tokens"]}
    texts, scores = zip(*given["model"]["vocab"], strict=True)
    types = [3 if text in special else 1 for text in texts]
    ids = {"bos": texts.index("<s>"), "eos": texts.index("</s>"), "unknown": given["model"]["unk_id"]}
    base = {"tokenizer.ggml.model": ("str", "t5"), "tokenizer.ggml.scores": ("[f32]", list(scores))}
    return {**base, **_special(list(texts), types, ids)}


def bytes_of(vocabulary, **ids):
    """The metadata of a byte-level vocabulary of single letters, whose last token is that of the only merge."""
    vocabulary = [*vocabulary[:-1], vocabulary[4] + vocabulary[5]]
    special = set(ids.values())
    types = [3 if i in special else 1 for i in range(len(vocabulary))]
    base = {"tokenizer.ggml.model": ("str", "gpt2"), "tokenizer.ggml.pre": ("str", "gpt-2")}
    return {
        **base,
        "tokenizer.ggml.merges": ("[str]", [f"{vocabulary[4]} {vocabulary[5]}"]),
        **_special(vocabulary, types, ids),
    }
