"""Record pooling.json: what transformers computes for tiny random encoders, classifiers and decoders without logits.

Needs torch, transformers and safetensors, so it runs in an environment of its own:
    PYTHONPATH=tests python tests/data/models/make_pooling.py [NAME...]
Models that are not named keep their record, unless none is named.
Weights are not recorded: `models.tiny.random_tensors` draws them again from the names and shapes.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open

from models.tiny import random_tensors, write_model

LENGTHS, FIRST = (13, 5), 4  # tokens of the texts, and of the first of a pair
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 24, "pad_token_id": 0,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2}
DISTIL = {"vocab_size": 48, "dim": 32, "hidden_dim": 40, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 24}
MODERN = {**SIZES, "num_hidden_layers": 4, "local_attention": 6, "bos_token_id": 1, "eos_token_id": 2,
          "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
THREE, ONE = {"num_labels": 3}, {"num_labels": 1}

MODELS = {
    "bert": transformers.BertModel(transformers.BertConfig(**SIZES)),
    "bert-relu": transformers.BertModel(transformers.BertConfig(**SIZES, hidden_act="relu")),
    "roberta": transformers.RobertaModel(transformers.RobertaConfig(**{**SIZES, "pad_token_id": 1})),
    "nomic-bert": transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES)),
    "gte": transformers.GteModel(transformers.GteConfig(**SIZES)),
    "jina-embeddings-v3": transformers.JinaEmbeddingsV3Model(transformers.JinaEmbeddingsV3Config(**SIZES)),
    "distilbert": transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)),
    "electra": transformers.ElectraModel(transformers.ElectraConfig(**SIZES, embedding_size=32)),
    "mpnet": transformers.MPNetModel(transformers.MPNetConfig(**SIZES)),
    "eurobert": transformers.EuroBertModel(transformers.EuroBertConfig(**DECODER)),
    "embedding-gemma2": transformers.EmbeddingGemma2TextModel(
        transformers.EmbeddingGemma2TextConfig(
            **DECODER, head_dim=8, sliding_window=3, layer_types=["sliding_attention"] * 2 + ["full_attention"],
            hidden_size_per_layer_input=12, embedding_dim=20, global_head_dim=16, num_global_key_value_heads=1,
        )
    ),
    "modernbert": transformers.ModernBertModel(transformers.ModernBertConfig(**MODERN)),
    "qwen3": transformers.Qwen3Model(transformers.Qwen3Config(**DECODER, head_dim=12)),
    "qwen2-bidirectional": transformers.Qwen2Model(transformers.Qwen2Config(**DECODER, is_causal=False)),
    "gemma3-bidirectional": transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            **DECODER, head_dim=8, sliding_window=6, use_bidirectional_attention=True, query_pre_attn_scalar=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "embedding-gemma-bidirectional": transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            **{**DECODER, "num_hidden_layers": 6}, head_dim=8, sliding_window=6, use_bidirectional_attention=True,
            query_pre_attn_scalar=8,
        )
    ),
    "bert-classifier": transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **THREE)),
    "bert-cross-encoder": transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **ONE)),
    "roberta-classifier": transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**{**SIZES, "pad_token_id": 1}, **THREE)
    ),
    "nomic-bert-classifier": transformers.NomicBertForSequenceClassification(
        transformers.NomicBertConfig(**SIZES, **THREE)
    ),
    "gte-cross-encoder": transformers.GteForSequenceClassification(transformers.GteConfig(**SIZES, **ONE)),
    "jina-embeddings-v3-classifier": transformers.JinaEmbeddingsV3ForSequenceClassification(
        transformers.JinaEmbeddingsV3Config(**SIZES, **THREE)
    ),
    "distilbert-classifier": transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(**DISTIL, **THREE)
    ),
    "electra-cross-encoder": transformers.ElectraForSequenceClassification(
        transformers.ElectraConfig(**SIZES, **ONE, embedding_size=32)
    ),
    "mpnet-classifier": transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SIZES, **THREE)),
    **{
        f"eurobert-classifier-{pooling}": transformers.EuroBertForSequenceClassification(
            transformers.EuroBertConfig(**DECODER, **THREE, classifier_pooling=pooling)
        )
        for pooling in ("bos", "mean", "late")
    },
    "modernbert-classifier": transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(**MODERN, **THREE, classifier_pooling="mean")
    ),
    "qwen2-classifier": transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**DECODER, **THREE)),
    "qwen3-reranker": transformers.Qwen3ForSequenceClassification(
        transformers.Qwen3Config(**DECODER, **ONE, head_dim=12)
    ),
}  # fmt: skip


def numbers(array):
    return [float(f"{x:.7g}") for x in np.asarray(array).ravel()]


def record(model, folder):
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    written = json.loads((folder / "config.json").read_text())
    write_model(folder, written, random_tensors(shapes))
    model = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    random = np.random.default_rng(1)
    texts = []
    for length in LENGTHS:
        ids = torch.tensor(random.integers(3, 48, length)[None])
        types = (torch.arange(length) >= FIRST).long()[None]
        with torch.no_grad():
            if "Classification" in type(model).__name__:
                text = {"logits": numbers(model(ids).logits)}
                if written.get("type_vocab_size", 0) > 1:
                    text["pair_logits"] = numbers(model(ids, token_type_ids=types).logits)
            else:
                hidden = model(ids).last_hidden_state[0].numpy()
                text = {name: numbers(row) for name, row in
                        (("cls", hidden[0]), ("last", hidden[-1]), ("mean", hidden.mean(0)))}  # fmt: skip
        texts.append({"token_ids": ids[0].tolist(), **text})
    return {"config": written, "shapes": shapes, "texts": texts}


def main():
    here = Path(__file__).parent / "pooling.json"
    old, recorded = json.loads(here.read_text())["models"], {}
    for name, model in MODELS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            recorded[name] = old[name]
            continue
        with tempfile.TemporaryDirectory() as folder:
            recorded[name] = record(model, Path(folder))
        print(name, len(recorded[name]["shapes"]), "tensors")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items())
    text = f'{{"transformers": "{transformers.__version__}", "first": {FIRST}, "models": {{\n{lines}\n}}}}\n'
    here.write_text(text)


if __name__ == "__main__":
    main()
