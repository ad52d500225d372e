"""`foreword embed`."""

import json

import numpy as np
from typer.testing import CliRunner

from foreword import LLM, PoolingParams
from foreword.cli.app import app
from models.pooling_models import make_pooling


def test_each_text_or_line_has_a_vector(tmp_path):
    folder = str(make_pooling(tmp_path, "bert"))
    texts = ["\u0104", "\u0105\u0106", "\u0107" * 40]
    params = PoolingParams(dimensions=7, truncate_prompt_tokens=-1)
    with LLM(folder) as llm:
        want = llm.embed(texts, params)
    options = ["--model", folder, "--dimensions", "7", "--truncate"]
    runner = CliRunner()
    for result in (runner.invoke(app, ["embed", *options, *texts]),
                   runner.invoke(app, ["embed", *options], input="\n".join(texts))):  # fmt: skip
        lines = [json.loads(line) for line in result.output.splitlines()]
        assert [line["text"] for line in lines] == texts
        np.testing.assert_allclose([line["embedding"] for line in lines], want, atol=1e-6)
