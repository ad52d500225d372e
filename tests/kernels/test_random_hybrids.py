"""Drafts change no token of random models with recurrent layers, whatever else their engines do."""

from functools import partial
from random import Random

import pytest
from engine_rig import run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_adapters import random_adapter
from kernel_reference import random_weights, rope, tiny_spec

from drafters import Recalled
from foreword.batch import SamplingParams
from foreword.engine import Engine, engine_config
from foreword.engine.speculation import SpeculationConfig
from foreword.executors.pool import batch_groups
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import DecoderSpec, LayerSpec
from models.running import EXECUTORS

M, UNIT = 64, 4
ONE_THREAD = {"numpy": {}, "native": {"num_threads": 1}, "torch": {"num_threads": 1}}


def random_spec(random: Random) -> DecoderSpec:
    key_heads, per_key, kernel = random.randint(1, 3), random.randint(1, 3), random.randint(2, 4)
    sizes = key_heads * per_key, key_heads, random.choice([4, 10, 16]), random.choice([3, 12, 16])
    recurrent = random.choice(
        [
            RecurrentSpec("mamba2", *sizes, conv_kernel=kernel, conv_bias=random.random() < 0.5),
            RecurrentSpec("gated_delta", *sizes, conv_kernel=kernel, tiled=random.random() < 0.5),
            RecurrentSpec(
                "gated_delta",
                *sizes,
                conv_kernel=kernel,
                rank=random.choice([0, 5]),
                channel_decays=True,
                least_log=random.choice([None, -3.0]),
                sigmoid_gate=True,
            ),
            RecurrentSpec("short_conv", 1, 1, 0, 96, conv_kernel=kernel),
            RecurrentSpec("rg_lru", 1, 1, 1, 3 * sizes[3], conv_kernel=kernel, conv_bias=True, rank=sizes[3]),
            RecurrentSpec(
                "mamba1", 1, 1, *sizes[2:], conv_kernel=kernel, rank=3, inner_eps=random.choice([None, 1e-3])
            ),
        ]
    )
    kinds = [(LayerSpec(None, recurrent=recurrent),), (LayerSpec(rope(16)),), (LayerSpec(rope(16), 9),)]
    if random.random() < 0.2:
        mixed = RecurrentSpec(
            "mixed_qkv", 6, 2, 0, 16, kernel, conv_bias=True, in_bias=random.random() < 0.5, heads_kernel=key_heads
        )
        takes = LayerSpec(rope(16), random.choice([None, 9]), beside=True, takes_qkv=True, unit_qk_eps=1e-9)
        kinds[0] = LayerSpec(None, recurrent=mixed, has_mlp=False), takes
    layers = [kinds[0], *random.choices(kinds, k=random.randint(0, 3))]
    random.shuffle(layers)
    return tiny_spec(layers=tuple(layer for pair in layers for layer in pair), max_model_len=M)


class Case:
    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random, self.spec = kind, Random(seed), random_spec(Random(seed))
        self.weights, self.groups = random_weights(self.spec, seed), batch_groups(self.spec, UNIT)
        random = self.random
        stem = [random.randrange(301) for _ in range(30)]
        self.prompts = [[*stem[: random.randint(0, 30)], random.randrange(301)] for _ in range(4)]
        temperatures = (0.0, 0.8) if kind == "native" else (0.0,)  # others round differently in other batches
        self.params = [
            SamplingParams(temperature=random.choice(temperatures), seed=i, max_tokens=random.randint(1, 24))
            for i in range(4)
        ]
        self.num_states = random.choice([0, 1, 3, 16])
        self.adapters = [random.choice([None, "law"]) for _ in range(4)]

    def results(self, requests, num_blocks: int, drafter=None, **config) -> dict[int, list[int]]:
        engine = Engine(
            EXECUTORS[self.kind](
                self.spec,
                self.weights,
                num_blocks=num_blocks,
                block_size=UNIT,
                num_states=self.num_states,
                **ONE_THREAD[self.kind],
            ),
            vocab_size=self.spec.vocab_size,
            max_model_len=M,
            kv_groups=self.groups,
            num_blocks=num_blocks,
            num_states=self.num_states,
            config=engine_config({"max_num_seqs": 4, "block_size": UNIT, "watermark": 0.0, "check": "full"} | config),
            drafter=drafter,
            read_lora=lambda path: random_adapter(self.spec, 2, 1),
        )
        engine.load_lora("law", "law")
        for i in requests:
            engine.add_request(str(i), self.prompts[i], self.params[i], lora=self.adapters[i])
        found = {int(name): output.outputs[0].token_ids for name, output in run(engine).items()}
        engine.close()
        return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", EXECUTORS)
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32))
def test_drafts_change_no_token_of_random_models_and_traffic(kind, seed):
    case = Case(kind, seed)
    one = 1 + sum(1 if group.recurrent else M // UNIT + 1 for group in case.groups)
    alone: dict[int, list[int]] = {}
    for i in range(len(case.prompts)):
        alone |= case.results([i], one, prefix_caching=False)
    random = case.random
    wrong = random.choice([1, 2, 3, 5, 99])
    texts = [prompt + alone[i] for i, prompt in enumerate(case.prompts)]
    found = case.results(
        range(len(case.prompts)),
        one + random.choice([0, 3, 20, 100]),
        drafter=partial(Recalled, texts, is_wrong=lambda position: position % wrong == 0),
        speculation=SpeculationConfig(method="custom", num_tokens=random.randint(1, 5), adaptive=random.random() < 0.3),
        max_num_batched_tokens=random.choice([6, 16, 64]),
        prefix_caching=random.random() < 0.8,
        async_scheduling=random.random() < 0.5,
    )
    assert found == alone
