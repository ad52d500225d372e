"""Facts that the interpreter cannot show: capture beside another thread, graphs of a whole model, and numbers of the
GPU.
"""

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from device_place import ON_GPU

from cli.talking_model import write_talking_model
from foreword import LLM, SamplingParams
from foreword.executors.device import DeviceExecutor

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU, and TESTS_ON_GPU=1")
RECORDED = Path(__file__).parents[1] / "data" / "models" / "smollm2.json"
SMALL = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def answers(model: str, prompts, **options) -> list[list[int]]:
    with LLM(model, executor="device", **options) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, DeviceExecutor)
        assert executor._graphs
        assert None not in executor._graphs.values()
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


def test_graphs_are_captured_while_another_thread_uses_the_gpu(tmp_path):
    model, prompts = str(write_talking_model(tmp_path / "talking")), ["a cat", "the dog and", "so"]
    want = answers(model, prompts, **SMALL)
    stop, sums = threading.Event(), []

    def work():
        while not stop.is_set():
            sums.append(float((torch.ones(1 << 16, device="cuda") * 2).sum()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = answers(model, prompts, **SMALL)
    finally:
        stop.set()
        thread.join()
    assert found == want
    assert set(sums) == {float(2 << 16)}


def test_two_engines_on_one_gpu_do_not_share_anything(tmp_path):
    model, prompts = str(write_talking_model(tmp_path / "talking")), ["a cat", "the dog and", "so"]
    want = answers(model, prompts, **SMALL)
    with LLM(model, executor="device", **SMALL) as one, LLM(model, executor="device", **SMALL) as two:
        found = [[], []]

        def generate(i, llm):
            for _ in range(5):
                found[i].append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY)])

        threads = [threading.Thread(target=generate, args=(i, llm)) for i, llm in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [[want] * 5] * 2


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "close_call"),
    [
        ({"dtype": "fp32"}, 0.001),
        ({"dtype": "fp32", "async_scheduling": False, "max_graph_tokens": 0, "num_splits": 4}, 0.001),
        ({"dtype": "fp16"}, 0.05),
        ({"dtype": "bf16"}, 0.3),
        ({"dtype": "fp16", "token_table": "host"}, 0.05),
        ({"dtype": "bf16", "kv_format": "fp8"}, 0.8),
    ],
)
def test_the_default_model_chooses_the_tokens_of_transformers(smollm2_path, options, close_call):
    """Up to the first token whose choice is closer than rounding. close_call: between the two best logits."""
    results, same = json.loads(RECORDED.read_text())["results"], 0
    with LLM(str(smollm2_path), executor="device", max_model_len=1024, **options) as llm:
        prompts = [{"prompt_token_ids": result["prompt_ids"]} for result in results]
        params = SamplingParams(temperature=0, max_tokens=max(len(r["output_ids"]) for r in results), ignore_eos=True)
        outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    for result, tokens in zip(results, outputs, strict=True):
        margins = result["top1_top2_logit_margin"]
        sure = next((i for i, margin in enumerate(margins) if margin <= close_call), len(margins))
        assert tokens[:sure] == result["output_ids"][:sure]
        same += sure
    assert same > 10
