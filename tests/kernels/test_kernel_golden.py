"""The default model through the native executor, against what transformers recorded in float32."""

import json
from pathlib import Path

import numpy as np
import pytest
from kernel_driver import Driver, step_of

from foreword.batch import prepare_inputs
from foreword.models.loader import load_model

RECORDED = Path(__file__).parents[1] / "data" / "models"
CLOSE_CALL = 0.05  # between the two best logits: either may win by rounding

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path)


def test_default_formats_choose_the_recorded_tokens(model):
    driver = Driver(model.spec, model.weights, weight_format="auto", kv_format="bf16", max_num_reqs=5)
    results = json.loads((RECORDED / "smollm2.json").read_text())["results"]
    for i, result in enumerate(results):
        prompt, output = result["prompt_ids"], result["output_ids"]
        chunks = [len(prompt), *[1] * (len(output) - 1)]
        logits = driver.run_alone(str(i), prompt + output[:-1], chunks)
        for row, token, margin in zip(logits, output, result["top1_top2_logit_margin"], strict=True):
            assert margin <= CLOSE_CALL or int(row.argmax()) == token, (i, margin)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("weight_format", "kv_format", "bound"),
    [("auto", "fp32", 0.0005), ("auto", "bf16", 0.003), ("bf16", "bf16", 0.005), ("int8", "bf16", 0.008),
     ("q4", "bf16", 0.008), ("auto", "int8", 0.008)],
)  # fmt: skip
def test_perplexity_stays_with_float32(model, weight_format, kv_format, bound):
    """bound: of the change in the mean negative log-likelihood over 599 tokens of documentation."""
    recorded = json.loads((RECORDED / "smollm2_long1200.json").read_text())
    tokens = recorded["prompt_ids"][:600]
    want = np.array(recorded["prompt_logprobs"][: len(tokens) - 1])
    driver = Driver(model.spec, model.weights, weight_format=weight_format, kv_format=kv_format)
    driver.add("a", tokens)
    batch = prepare_inputs(driver.states, {"a": len(tokens)}, driver.buffers, gather_block_tables=False)
    logits = step_of(
        driver.executor.core,
        num_tokens=len(tokens),
        num_reqs=1,
        num_logits=len(tokens) - 1,
        input_ids=batch.input_ids,
        positions=batch.positions,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        idx_mapping=batch.idx_mapping,
        logits_indices=np.arange(len(tokens) - 1),
        slot_mapping=list(batch.slot_mapping),
        block_tables=[table.table for table in driver.states.block_tables],
    )
    top = logits.max(1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(1, dtype=np.float64))
    got = logits[np.arange(len(tokens) - 1), tokens[1:]] - total
    change = float(want.mean() - got.mean())
    assert abs(change) < bound
