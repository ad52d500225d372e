"""Adapters in the native executor: against merged weights in float64, and equal bits alone and in a crowd."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from kernel_adapters import merged, random_adapter
from kernel_driver import Driver
from kernel_reference import SPECS, Reference, float_tensor, fp32_error, random_weights, relative_error

from foreword import _native
from foreword.errors import PlanError
from foreword.models.lora import MAX_RANK, LoraAdapter, LoraPair

LEVELS = _native.isa_levels()
FORMATS = ["fp32", "auto", "bf16", "int8", "q4"]
RANKS = (1, 8, 17, 64, MAX_RANK)


def tokens_of(name: str) -> list[int]:
    return np.random.default_rng(3).integers(0, SPECS[name].vocab_size, 90).tolist()


@cache
def logits_of_merged_weights(name: str, rank: int) -> np.ndarray:
    spec = SPECS[name]
    return Reference(spec, merged(random_weights(spec), random_adapter(spec, rank, rank))).logits(tokens_of(name))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "odd_sizes", "qkv_bias", "gemma", "moe", "mamba2", "mamba1", "rg_lru", "gated_delta", "short_conv"),
        "mixed_qkv",
        *("scaled_state_biases", "latent", "indexer", "latent_of_one_product", "latent_experts", "own_inputs", "aside"),
        *("chunks", "late_experts", "biased_experts", "parallel_experts", "sinks", "dense_head", "gated_norms"),
        *("gated_norms_of_heads", "connections"),
    ],
)
def test_chunks_and_decode_steps_give_the_logits_of_merged_weights(name, isa):
    spec = SPECS[name]
    weights, tokens = random_weights(spec), tokens_of(name)
    for rank in RANKS:
        adapter, want = random_adapter(spec, rank, rank), logits_of_merged_weights(name, rank)
        driver = Driver(spec, weights, isa=isa)
        driver.executor.load_lora(7, adapter)
        got = driver.run_alone("a", tokens, [50, 1, 1, 7, 31], lora_id=7)
        for logits, position in zip(got, (49, 50, 51, 58, 89), strict=True):
            assert relative_error(logits, want[position]) < 1.5 * fp32_error(spec)  # the changes are rounded, too


class Crowd:
    """Requests of several adapters, and of none, in the same steps."""

    spec = SPECS["llama"]
    weights = random_weights(spec)

    def __init__(self, name="llama", **options):
        if name != "llama":
            self.spec, self.weights = SPECS[name], random_weights(SPECS[name])
        self.options, rng = options, np.random.default_rng(6)
        self.adapters = [random_adapter(self.spec, rank, i) for i, rank in enumerate(RANKS)]
        self.adapters.append(random_adapter(self.spec, 4, 9, ("k", "down")))
        self.work = {str(i): (rng.integers(0, self.spec.vocab_size, 60).tolist(), i % 7) for i in range(12)}

    def driver(self, **options):
        driver = Driver(self.spec, self.weights, max_num_reqs=12, **{**self.options, **options})
        for i, adapter in enumerate(self.adapters):
            driver.executor.load_lora(i + 1, adapter)
        return driver

    def together(self, **options):
        crowd = self.driver(**options)
        for name, (tokens, lora_id) in self.work.items():
            crowd.add(name, tokens, lora_id)
        crowd.step({name: 3 + 4 * int(name) for name in self.work})
        crowd.step(dict.fromkeys(self.work, 1))
        return crowd.step({name: 56 - 4 * int(name) for name in reversed(self.work)})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gated_delta", "mamba1", "rg_lru", "aside", "latent", "latent_experts", "own_inputs", "moe"),
        *("mixed_qkv", "indexer", "chunks", "late_experts", "sinks", "dense_head", "gated_norms"),
        "connections",
    ],
)
def test_other_requests_and_chunks_do_not_change_a_bit(name, weight_format, isa):
    crowd = Crowd(name, weight_format=weight_format, isa=isa)
    together = crowd.together()
    for name, (tokens, lora_id) in crowd.work.items():
        alone = crowd.driver().run_alone(name, tokens, [30, 1, 29], lora_id)[-1]
        np.testing.assert_array_equal(together[name], alone)
    assert len({logits.tobytes() for logits in together.values()}) == len(together)


@pytest.mark.parametrize("num_threads", [1, 3, 7])
@pytest.mark.parametrize("weight_format", ["fp32", "auto"])
@pytest.mark.parametrize(
    "name", ["llama", "gated_delta", "mamba1", "aside", "latent", "indexer", "latent_experts", "own_inputs", "moe"]
)
def test_threads_do_not_change_a_bit(name, weight_format, num_threads):
    crowd = Crowd(name, weight_format=weight_format)
    want = crowd.together()
    got = crowd.together(num_threads=num_threads)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_request_without_an_adapter_has_the_bits_of_a_batch_without(weight_format):
    crowd = Crowd(weight_format=weight_format)
    plain = Driver(crowd.spec, crowd.weights, weight_format=weight_format)
    tokens, lora_id = crowd.work["7"]
    assert lora_id == 0
    np.testing.assert_array_equal(crowd.together()["7"], plain.run_alone("a", tokens, [60])[-1])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize(("weight_format", "bound"), [("fp32", 1e-5), ("bf16", 0.055), ("int8", 0.06)])
def test_factors_of_any_size_keep_the_precision_of_their_format(weight_format, bound, scale, isa):
    """In a model whose layers are their adapters alone: the weights that they change are zeros.

    The bounds of 8-bit factors are 1.5 times the largest error of all levels: 0.035 in bf16, 0.040 in int8.
    """
    spec, tokens = Crowd.spec, Crowd(isa=isa).work["0"][0]
    for rank in (5, 16, 64, MAX_RANK):
        exact = random_adapter(spec, rank, rank)
        weights = {
            name: float_tensor(weight.dequantize() * (name not in exact.pairs))
            for name, weight in Crowd.weights.items()
        }
        pairs = {
            name: LoraPair(float_tensor(p.a.dequantize() * scale), float_tensor(p.b.dequantize() / scale), p.scale)
            for name, p in exact.pairs.items()
        }
        want = Reference(spec, merged(weights, exact)).logits(tokens)[-1]
        driver = Driver(spec, weights, weight_format=weight_format, isa=isa)
        driver.executor.load_lora(1, LoraAdapter(Path("scaled"), pairs))
        assert relative_error(driver.run_alone("a", tokens, [59, 1], 1)[-1], want) < bound


def test_a_number_without_an_adapter_is_refused_and_harms_nothing():
    crowd = Crowd()
    want = crowd.together()
    driver = crowd.driver()
    driver.add("wrong", [1, 2, 3], 99)
    with pytest.raises(PlanError, match=r"lora_ids\[0\] = 99 is not the number of an adapter"):
        driver.step({"wrong": 3})
    driver.states.remove_request("wrong")
    tokens, lora_id = crowd.work["3"]
    np.testing.assert_array_equal(driver.run_alone("3", tokens, [60], lora_id)[-1], want["3"])
    driver.executor.drop_lora(2)
    driver.add("dropped", [1, 2, 3], 2)
    with pytest.raises(PlanError, match="= 2 is not the number"):
        driver.step({"dropped": 3})


def test_factors_that_do_not_fit_are_refused():
    core = Driver(Crowd.spec, Crowd.weights).executor.core
    hidden = Crowd.spec.hidden_size

    def add(matrix=0, a=(4, hidden), b=(96, 4), lora_id=1):
        return core.add_lora(lora_id, [(matrix, np.ones(a, np.float32), np.ones(b, np.float32), 1.0)], [])

    assert add() > 0
    most = MAX_RANK + 1
    for wrong in (
        {"matrix": -1}, {"matrix": 10**6}, {"a": (4, hidden - 1)}, {"a": (most, hidden), "b": (96, most)},
        {"a": (0, hidden), "b": (96, 0)}, {"b": (95, 4)}, {"b": (96, 5)}, {"lora_id": 0}, {"lora_id": -3},
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            add(**wrong)
    core.drop_lora(12345)
