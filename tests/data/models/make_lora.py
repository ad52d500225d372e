"""Record lora.json: the logits that PEFT computes for adapters of tiny random models.

Needs torch, transformers, peft and safetensors, so it runs in an environment of its own:
    PYTHONPATH=tests:src python tests/data/models/make_lora.py
Neither weights nor adapters are recorded: `models.tiny.random_tensors` and `models.lora_files.random_factors` draw them
again from the names and shapes.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from peft import PeftModel

from models.lora_cases import CASES, write_case
from models.recorded import TINY, make

KEPT = 6


def record(case):
    with tempfile.TemporaryDirectory() as folder:
        base = make(Path(folder), case["model"])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, attn_implementation="eager", dtype=torch.float32
        )
        adapted = PeftModel.from_pretrained(model, write_case(Path(folder) / "adapter", case)).eval()
        with torch.no_grad():
            logits = adapted(torch.tensor([TINY[case["model"]]["token_ids"]])).logits[0]
    return [[round(value, 6) for value in row] for row in logits[-KEPT:].double().tolist()]


if __name__ == "__main__":
    recorded = {name: record(case) for name, case in CASES.items()}
    (Path(__file__).parent / "lora.json").write_text(json.dumps(recorded) + "\n")
