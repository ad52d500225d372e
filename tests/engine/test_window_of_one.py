"""Models whose layers all see one token: a hit of the prefix cache has no block that would keep its path."""

from random import Random

from foreword import LLM, SamplingParams
from models.recorded import TINY
from models.tiny import random_tensors, write_model


def test_shared_prompts_in_a_small_pool_give_the_tokens_of_each_alone(tmp_path):
    recorded = TINY["mistral"]
    config = {**recorded["config"], "sliding_window": 1}
    model = write_model(tmp_path / "model", config, random_tensors(recorded["shapes"]))
    sizes = {"block_size": 4, "max_model_len": 64, "num_threads": 1}
    small = {**sizes, "num_blocks": 6, "max_num_seqs": 8, "watermark": 0.0, "max_num_batched_tokens": 8}
    with LLM(str(model), **sizes, prefix_caching=False) as alone:
        for seed in range(4):
            random = Random(seed)
            stem = [random.randrange(3, 48) for _ in range(30)]
            prompts = [[*stem[: random.randint(0, 30)], random.randrange(3, 48)] for _ in range(6)]
            params = [
                SamplingParams(temperature=0.0, max_tokens=random.randint(1, 28), ignore_eos=True) for _ in prompts
            ]
            expected = [
                alone.generate([one], how)[0].outputs[0].token_ids for one, how in zip(prompts, params, strict=True)
            ]
            with LLM(str(model), **small) as llm:
                for _ in range(3):
                    found = llm.generate(prompts, params)
                    assert [one.outputs[0].token_ids for one in found] == expected
