"""The known embedding model against vectors recorded from transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from foreword import LLM
from models.running import FLOATS

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "models" / "all-minilm-l6-v2.json").read_text())
pytestmark = pytest.mark.model


@pytest.mark.parametrize("executor", FLOATS)
def test_sentences_have_the_recorded_tokens_and_vectors(minilm_path, executor):
    with LLM(str(minilm_path.parent), executor=executor) as llm:
        outputs = llm.encode(GOLDEN["sentences"])
        assert [output.prompt_token_ids for output in outputs] == GOLDEN["input_ids"]
        for output, want in zip(outputs, np.array(GOLDEN["embeddings"]), strict=True):
            assert output.outputs.data @ want / np.linalg.norm(want) >= 0.99999
        related, unrelated = llm.score(GOLDEN["sentences"][0], [GOLDEN["sentences"][1], GOLDEN["sentences"][3]])
        assert related.outputs.score > 0.7 > 0.2 > unrelated.outputs.score
