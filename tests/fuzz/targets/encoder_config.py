"""config.json of encoders and classifiers, with the weights and the tokenizer that belong to it."""

from foreword.models.families import ENCODER_FAMILIES
from fuzz.targets.config import target
from models.pooling_models import POOLING, make_pooling

HOSTILE = (
    {"vocab_size": 2**28}, {"num_hidden_layers": 4096}, {"num_hidden_layers": 2**70}, {"pad_token_id": 2**40},
    {"pad_token_id": -7}, {"max_position_embeddings": 2**28}, {"num_labels": 2**40, "id2label": None},
    {"id2label": {"0": "\ud800"}}, {"id2label": {}}, {"id2label": [1]}, {"type_vocab_size": 0},
    {"local_attention": 1}, {"layer_types": ["\ud800"] * 4}, {"architectures": [None, 7]}, {"layer_norm_eps": 1e308},
    {"sentence_transformers": {"activation_fn": ["x"]}}, {"rope_parameters": {"full_attention": 3}},
)  # fmt: skip


assert {tiny["config"]["model_type"] for tiny in POOLING.values()} > set(ENCODER_FAMILIES) - {"xlm-roberta"}
NAMES = ("bert", "roberta-classifier", "modernbert-classifier", "qwen2-classifier")
TARGET = target(POOLING, make_pooling, NAMES, HOSTILE)
