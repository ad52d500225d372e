"""Record encoder_lora.json: the vectors that PEFT computes for adapters of tiny random encoders.

Needs torch, transformers, peft and safetensors, so it runs in an environment of its own:
    PYTHONPATH=tests:src python tests/data/models/make_encoder_lora.py
Neither weights nor adapters are recorded: `models.tiny.random_tensors` and `models.lora_files.random_factors` draw them
again from the names and shapes.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from peft import PeftModel

from models.encoder_lora_cases import CASES, write_case
from models.pooling_models import POOLING, make_pooling


def record(case):
    with tempfile.TemporaryDirectory() as folder:
        base = make_pooling(Path(folder), case[0])
        model = transformers.AutoModel.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
        adapted = PeftModel.from_pretrained(model, write_case(Path(folder) / "adapter", case)).eval()
        with torch.no_grad():
            texts = [torch.tensor([text["token_ids"]]) for text in POOLING[case[0]]["texts"]]
            vectors = [adapted(ids).last_hidden_state[0].mean(0) for ids in texts]
    return [[round(value, 6) for value in vector.double().tolist()] for vector in vectors]


if __name__ == "__main__":
    recorded = {name: record(case) for name, case in CASES.items()}
    (Path(__file__).parent / "encoder_lora.json").write_text(json.dumps(recorded) + "\n")
