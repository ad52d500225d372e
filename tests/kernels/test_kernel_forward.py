"""The native executor against a plain forward pass in float64: every kind of layer, every instruction set here."""

import numpy as np
import pytest
from kernel_driver import Driver, step_of
from kernel_reference import SPECS, Reference, fp32_error, random_weights, relative_error, rope, tiny_spec

from foreword import _native
from foreword.batch import BlockOps
from foreword.engine.config import EngineConfig
from foreword.engine.pool import pool_size
from foreword.errors import ConfigError, PlanError
from foreword.executors.kinds import KINDS
from foreword.executors.native import NativeExecutor, kv_report
from foreword.executors.numpy import NumpyExecutor
from foreword.executors.options import NativeOptions
from foreword.models.spec import LayerSpec, MlaSpec
from foreword.scheduler import SchedulerConfig

LEVELS = _native.isa_levels()


def tokens_of(spec, count, seed=3):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("name", SPECS)
def test_chunks_and_decode_steps_give_the_logits_of_the_whole_sequence(name, isa):
    spec = SPECS[name]
    weights = random_weights(spec)
    tokens = tokens_of(spec, 90)
    want = Reference(spec, weights).logits(tokens)
    got = Driver(spec, weights, isa=isa).run_alone("a", tokens, [50, 1, 1, 7, 31])
    for logits, position in zip(got, (49, 50, 51, 58, 89), strict=True):
        assert relative_error(logits, want[position]) < fp32_error(spec)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", ["post_norms_alone", "parallel", "gated_delta", "beside", "latent", "gated_norms", "connections"]
)
def test_parts_of_a_long_prompt_give_its_logits(name):
    """Products of more than 512 tokens are computed in parts."""
    spec = SPECS[name]
    weights, tokens = random_weights(spec), tokens_of(spec, 530)
    want = Reference(spec, weights).logits(tokens)
    got = Driver(spec, weights, num_threads=3).run_alone("a", tokens, [528, 1, 1])
    for logits, position in zip(got, (527, 528, 529), strict=True):
        assert relative_error(logits, want[position]) < fp32_error(spec)


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 48])
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["gemma", "wide_values", "indexer"])
def test_any_block_size_holds_the_same_keys(name, block_size, kv_format):
    spec = SPECS[name]
    weights = random_weights(spec)
    tokens = tokens_of(spec, 70)

    def run(size):
        driver = Driver(spec, weights, block_size=size, num_blocks=600, kv_format=kv_format)
        return driver.run_alone("a", tokens, [40, 1, 29])

    for a, b in zip(run(block_size), run(32), strict=True):
        np.testing.assert_array_equal(a, b)


def test_decodes_chunks_and_several_requests_mix_in_one_step():
    spec = SPECS["llama"]
    weights = random_weights(spec)
    reference = Reference(spec, weights)
    driver = Driver(spec, weights)
    sequences = {name: tokens_of(spec, n, seed=n) for name, n in (("a", 40), ("b", 75), ("c", 20))}
    want = {name: reference.logits(tokens) for name, tokens in sequences.items()}
    for name, tokens in sequences.items():
        driver.add(name, tokens)
    done = dict.fromkeys(sequences, 0)
    for step in ({"a": 39, "b": 10}, {"a": 1, "b": 64, "c": 5}, {"c": 15, "b": 1}):
        got = driver.step(step)
        for name, count in step.items():
            done[name] += count
            assert relative_error(got[name], want[name][done[name] - 1]) < 1e-5


@pytest.mark.long
def test_long_context_is_merged_from_splits():
    spec = tiny_spec(layers=(LayerSpec(rope(16)), LayerSpec(rope(16), 700)), attn_softcap=None)
    weights = random_weights(spec)
    tokens = tokens_of(spec, 1500)
    want = Reference(spec, weights).logits(tokens)
    got = Driver(spec, weights).run_alone("a", tokens, [1400, 98, 1, 1])
    for logits, position in zip(got, (1399, 1497, 1498, 1499), strict=True):
        assert relative_error(logits, want[position]) < 1e-5


def test_padding_and_unwritten_slots_leave_the_cache_alone():
    spec = SPECS["llama"]
    weights = random_weights(spec)
    driver = Driver(spec, weights, num_blocks=8)
    driver.add("a", tokens_of(spec, 17))
    first = driver.step({"a": 16})["a"]
    core = driver.executor.core
    none = np.full(16, -1, np.int64)
    ids = np.zeros(16, np.int32)
    step_of(
        core,
        num_tokens=16,
        num_reqs=1,
        num_logits=1,
        input_ids=ids,
        positions=np.arange(16),
        query_start_loc=np.array([0, 16], np.int32),
        seq_lens=np.array([16], np.int32),
        idx_mapping=np.array([0], np.int32),
        logits_indices=np.array([15]),
        slot_mapping=[none],
        block_tables=[driver.states.block_tables[0].table],
    )
    again = driver.step({"a": 1})["a"]
    fresh = Driver(spec, weights, num_blocks=8)
    fresh.add("a", driver.states.token_ids[driver.states.row_of("a"), :17].tolist())
    np.testing.assert_array_equal(fresh.step({"a": 16})["a"], first)
    np.testing.assert_array_equal(fresh.step({"a": 1})["a"], again)


def test_copied_block_gives_the_logits_of_the_original():
    spec = SPECS["llama"]
    weights = random_weights(spec)
    tokens = tokens_of(spec, 33)
    driver = Driver(spec, weights, kv_format="int8")
    *_, want = driver.run_alone("a", tokens, [32, 1])
    driver.add("b", tokens)
    a, b = driver.states.row_of("a"), driver.states.row_of("b")
    table = driver.states.block_tables[0].table
    driver.executor.copy_blocks(table[a, :2].copy(), table[b, :2].copy())
    driver.states.num_computed_tokens[b] = 32
    np.testing.assert_array_equal(driver.step({"b": 1})["b"], want)


def test_blocks_are_read_before_any_is_written():
    spec = SPECS["llama"]
    weights = random_weights(spec)
    tokens = tokens_of(spec, 33)
    driver = Driver(spec, weights, num_blocks=8)
    *_, want = driver.run_alone("a", tokens, [32, 1])
    table = driver.states.block_tables[0].table
    row = driver.states.row_of("a")
    x, y, spare = int(table[row, 0]), int(table[row, 1]), int(driver.free[0])
    copies = np.array([[x, y, x], [y, x, spare]], np.int32)
    driver.executor.copy_blocks(copies[0], copies[1])  # swaps the two
    table[row, :2] = y, x
    driver.states.num_computed_tokens[row] = 32
    np.testing.assert_array_equal(driver.step({"a": 1})["a"], want)
    with pytest.raises(ValueError, match="block = 8"):
        driver.executor.copy_blocks(np.array([8], np.int32), np.array([1], np.int32))


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("block_size", [16, 7])
def test_zeroed_blocks_are_as_those_never_written(block_size, kv_format):
    """With the keys and values of NumPy's cache, and with a cache in which nothing was written there."""
    spec = SPECS["llama"]
    weights = random_weights(spec)
    tokens = tokens_of(spec, 3 * block_size + 1)

    def run(zero, **options):
        driver = Driver(spec, weights, block_size=block_size, kv_format=kv_format, **options)
        driver.add("a", tokens)
        driver.step({"a": 3 * block_size})
        blocks = driver.states.block_tables[0].table[driver.states.row_of("a"), [0, 2]]
        if zero:
            driver.executor.apply_block_ops(BlockOps.of(zero=blocks.tolist()))
        return driver, blocks

    driver, blocks = run(True)
    other, same = run(False)
    np.testing.assert_array_equal(blocks, same)
    untouched = np.setdiff1d(np.arange(1, 400), other.states.block_tables[0].table[:, :4])[:2].astype(np.int32)
    other.executor.copy_blocks(untouched, blocks)
    got = driver.step({"a": 1})["a"]
    np.testing.assert_array_equal(got, other.step({"a": 1})["a"])
    if kv_format == "fp32":
        numpy, _ = run(True, executor=NumpyExecutor(spec, weights, num_blocks=400, block_size=block_size))
        assert relative_error(got, numpy.step({"a": 1})["a"]) < 1e-5


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [("input_ids", 3, 301), ("input_ids", 0, -1), ("slot_mapping", 2, 1 << 40), ("positions", 1, 7),
     ("seq_lens", 0, 9999), ("logits_indices", 0, 16), ("query_start_loc", 1, 17), ("block_table", 0, 400),
     ("idx_mapping", 0, 8)],
)  # fmt: skip
def test_input_out_of_range_is_refused_by_name(field, index, value):
    spec = SPECS["llama"]
    driver = Driver(spec, random_weights(spec))
    table = np.zeros((8, 128), np.int32)
    table[0, 0] = 1
    arrays = {
        "input_ids": np.zeros(16, np.int32),
        "positions": np.arange(16),
        "query_start_loc": np.array([0, 16], np.int32),
        "seq_lens": np.array([16], np.int32),
        "idx_mapping": np.array([0], np.int32),
        "logits_indices": np.array([15]),
        "slot_mapping": np.arange(16, 32),
        "block_table": table[0],
    }
    arrays[field][index] = value
    slots, _ = [arrays.pop("slot_mapping")], arrays.pop("block_table")
    with pytest.raises(ValueError, match="positions" if field == "seq_lens" else field):
        step_of(
            driver.executor.core,
            num_tokens=16,
            num_reqs=1,
            num_logits=1,
            slot_mapping=slots,
            block_tables=[table],
            **arrays,
        )


def test_bad_block_id_is_a_plan_error():
    spec = SPECS["llama"]
    driver = Driver(spec, random_weights(spec), num_blocks=8)
    driver.add("a", tokens_of(spec, 20))
    driver.states.block_tables[0].table[driver.states.row_of("a"), 1] = 99
    with pytest.raises(PlanError, match="slot_mapping"):
        driver.step({"a": 20})


def test_unknown_formats_and_levels_are_refused_by_name(monkeypatch):
    spec = SPECS["llama"]
    weights = random_weights(spec)
    with pytest.raises(ConfigError, match="int3"):
        Driver(spec, weights, weight_format="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fp4"):
        Driver(spec, weights, kv_format="fp4")  # type: ignore[arg-type]
    monkeypatch.setenv("FOREWORD_ISA", "riscv")
    with pytest.raises(ConfigError, match="riscv"):
        Driver(spec, weights)


def test_variables_choose_level_and_threads(monkeypatch):
    spec = SPECS["llama"]
    monkeypatch.setenv("FOREWORD_ISA", "scalar")
    monkeypatch.setenv("FOREWORD_NUM_THREADS", "3")
    executor = NativeExecutor(spec, random_weights(spec), num_blocks=8, block_size=16)
    assert (executor.isa, executor.num_threads) == ("scalar", 3)


def test_report_counts_blocks_and_requests_before_memory_is_taken():
    spec = tiny_spec(max_model_len=8192, num_heads=8, num_kv_heads=8, head_dim=64, layers=(LayerSpec(rope(16)),) * 32)
    assert kv_report(spec, num_blocks=2049, block_size=16) == "KV 2.0 GiB = 2,049 blocks of 16 tokens: 4 requests of 8k"
    sliding = tiny_spec(max_model_len=1000, layers=(LayerSpec(rope(16), 100), LayerSpec(rope(16))))
    assert kv_report(sliding, num_blocks=71, block_size=16).endswith("part of one request of 1,000 tokens")
    assert kv_report(sliding, num_blocks=72, block_size=16).endswith("1 request of 1,000 tokens")


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8"])
def test_the_head_of_latent_attention_is_stored_once(kv_format):
    """In bytes per block, in the plan of the pool, and in the arrays of the NumPy executor."""
    mla = MlaSpec(q_rank=24, kv_rank=40, nope_dim=12, rope_dim=8, value_dim=18)
    spec = tiny_spec(num_kv_heads=1, head_dim=48, mla=mla, layers=(LayerSpec(rope(8)),) * 2)
    weights = random_weights(spec)
    native = NativeExecutor(spec, weights, num_blocks=4, block_size=16, kv_format=kv_format)
    of_token = 48 * {"fp32": 4, "bf16": 2, "int8": 1}[kv_format] + (4 if kv_format == "int8" else 0)
    assert native.block_bytes == spec.num_slots * 16 * of_token
    if kv_format == "fp32":
        numpy = NumpyExecutor(spec, weights, num_blocks=4, block_size=16)
        assert numpy.block_bytes == native.block_bytes
    kind = KINDS["native"]
    planned = kind.bytes_per_value(spec, weights, NativeOptions(kv_format=kv_format)) * 16 * spec.token_size
    assert spec.num_slots * planned == native.block_bytes


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8"])
def test_values_of_another_size_than_keys_take_as_much_memory_as_they_have_numbers(kv_format):
    spec = tiny_spec(value_dim=48)
    weights, options = random_weights(spec), NativeOptions(kv_format=kv_format)
    native = NativeExecutor(spec, weights, num_blocks=4, block_size=16, kv_format=kv_format)
    of_head = (16 + 48) * {"fp32": 4, "bf16": 2, "int8": 1}[kv_format] + (8 if kv_format == "int8" else 0)
    assert native.block_bytes == spec.num_slots * 16 * spec.num_kv_heads * of_head
    planned = KINDS["native"].bytes_per_value(spec, weights, options) * 16 * spec.token_size
    assert spec.num_slots * planned == native.block_bytes
    if kv_format == "fp32":
        assert NumpyExecutor(spec, weights, num_blocks=4, block_size=16).block_bytes == native.block_bytes


@pytest.mark.parametrize("head_dim", [16, 20, 64])
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8"])
def test_a_pool_within_kv_cache_bytes_has_as_many_blocks_as_fit(kv_format, head_dim):
    spec = tiny_spec(num_kv_heads=2, head_dim=head_dim)
    weights, options = random_weights(spec), NativeOptions(kv_format=kv_format)
    scheduler = SchedulerConfig(max_num_seqs=500)
    config = EngineConfig(kv_cache_bytes=1_000_000, max_model_len=128, scheduler=scheduler)
    size = pool_size(spec, config, bytes_per_value=KINDS["native"].bytes_per_value(spec, weights, options))
    pool = NativeExecutor(spec, weights, num_blocks=size.num_blocks, block_size=16, kv_format=kv_format)
    assert pool.block_bytes == size.block_bytes
    assert size.num_bytes <= 1_000_000 < size.num_bytes + size.block_bytes
