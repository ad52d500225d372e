"""The worked examples of the systems' own documents, on every backend."""

import json
from pathlib import Path

import numpy as np
import pytest
from batch_rig import every_backend, states_of

from foreword.batch import InputBuffers, KVGroup, NewRequest, prepare_inputs

CASES = json.loads((Path(__file__).parents[1] / "data" / "worked_examples.json").read_text())["cases"]


@pytest.mark.smoke
@every_backend
@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_every_figure_of_the_documents_comes_out(case, backend):
    states = states_of(
        KVGroup(case["block_size"]),
        rows=case["max_num_reqs"],
        length=case["max_model_len"],
        vocab_size=32000,
        null_block=-1 if [0] in case["block_table"] else 0,
    )
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=case["max_num_batched_tokens"])
    for i, (prompt, outputs) in enumerate(zip(case["prompts"], case["outputs"], strict=True)):
        states.add_request(
            NewRequest(
                str(i),
                prompt,
                [case["block_table"][i]],
                output_token_ids=outputs,
                num_computed_tokens=case["num_computed_tokens"][i],
            )
        )
    batch = prepare_inputs(states, case["num_scheduled_tokens"], buffers, backend=backend)
    explained = batch.explain()
    for name, expected in case["expected"].items():
        if name == "cu_seqlens_k":
            got = batch.to_flash_attn().cu_seqlens_k
        elif name == "block_table_padded_minus_one_width":
            got = batch.to_flash_attn().block_table.shape[1]
        elif hasattr(explained, name):
            got = getattr(explained, name)
        else:
            got = getattr(batch, name)
        got = got[0] if isinstance(got, tuple) else got
        assert np.array_equal(got, expected), name
    assert batch.attention_state.name == case["attention_state"]
    mask = batch.attention_mask()
    if "attention_mask_shape" in case:
        assert list(mask.shape) == case["attention_mask_shape"]
