"""The benchmark of families compares each with a Llama that has as much to do."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from parts import families
from parts.family_shapes import COMMON, SHAPES

from foreword.bench.shapes import Shape
from foreword.models.spec import weight_names
from foreword.native import available


@pytest.mark.parametrize("family", SHAPES)
def test_the_llama_reads_as_many_weights_as_the_family(family: str):
    spec = families.read_spec(family)
    wanted = families.weights_read(spec, 1)
    assert families.weights_read(families.llama_like(spec), 1) == pytest.approx(wanted, rel=0.02)
    assert 5e7 < wanted < 1e8


def test_a_step_reads_the_experts_that_its_tokens_choose():
    spec = families.read_spec("Mixtral")  # 8 experts, 2 per token
    all_of_them = sum(np.prod(shape) for name, shape in weight_names(spec) if ".experts." in name)
    others = sum(np.prod(shape) for name, shape in weight_names(spec) if ".experts." not in name and len(shape) > 1)
    for tokens in (1, 2, 8):
        chance = 1 - (6 / 8) ** tokens  # that an expert is among the two of some token
        assert families.weights_read(spec, tokens) == pytest.approx(others + all_of_them * chance)


def test_a_step_reads_a_shared_block_once_per_layer_that_has_it():
    spec = families.read_spec("Zamba 2")
    shared = [spec.layers[i].aside.block for i in range(spec.num_layers) if spec.layers[i].aside]
    sizes = {name: np.prod(shape) for name, shape in weight_names(spec) if len(shape) > 1 and name != "embed"}
    read = sum(
        size * (shared.count(int(name.split(".")[1])) if name.startswith("blocks.") else 1)
        for name, size in sizes.items()
    )
    assert families.weights_read(spec, 1) - (spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0) == read


@pytest.mark.parametrize(("family", "per_token"), [
    ("Llama", 2 * 2 * COMMON["num_key_value_heads"] * COMMON["hidden_size"] // COMMON["num_attention_heads"]),
    ("DeepSeek V2", 2 * (256 + 32)),  # a latent vector and the part of the keys with rotary positions
])  # fmt: skip
def test_a_step_reads_the_keys_and_values_of_all_tokens_once(family: str, per_token: int):
    spec = families.read_spec(family)
    weights = families.random_weights(spec, "int8")
    shorter, longer = (families.step_bytes(spec, weights, "int8", Shape(8, 1, n)) for n in (99, 199))
    assert longer - shorter == 8 * 100 * spec.num_layers * per_token


def test_operations_of_a_prompt_are_counted_one_by_one():
    spec = families.read_spec("Mistral", num_hidden_layers=1, sliding_window=3)
    heads, dim = COMMON["num_attention_heads"], COMMON["hidden_size"] // COMMON["num_attention_heads"]
    pairs = [(query, key) for query in range(5) for key in range(5) if key <= query and query - key < 3]
    weights = sum(np.prod(shape) for _, shape in weight_names(spec) if len(shape) > 1)
    assert families.operations(spec, Shape(1, 5, 0)) == 5 * weights + 2 * heads * dim * len(pairs)


@pytest.mark.skipif(not available(), reason="the native module is not built")
@pytest.mark.parametrize("weight_format", families.FORMATS)
def test_steps_of_a_family_and_its_llama_are_measured(monkeypatch: pytest.MonkeyPatch, weight_format: families.Files):
    smaller: Mapping[str, Any] = {**COMMON, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                                  "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}  # fmt: skip
    monkeypatch.setattr(families, "COMMON", smaller)
    monkeypatch.setattr(families, "WORKS", {"decode 1": Shape(1, 1, 4), "prefill": Shape(1, 8, 0)})
    results = list(families.run(["Llama", "gpt-oss"], [weight_format], num_threads=1, repeats=1))
    assert [(r.family, r.work) for r in results] == [
        (family, work) for family in ("Llama", "gpt-oss") for work in families.WORKS
    ]
    assert all(r.ratio > 0 and r.tok_s > 0 for r in results)
    assert results[0].megabytes == results[0].llama_megabytes
