"""The functions in place of vLLM's kernels, against what its own kernels made of recorded launches."""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ConfigError
from foreword.native import available
from foreword.vllm import sampling, verification
from foreword.vllm.kernels import KERNELS, check_arguments
from foreword.vllm.sampling import as_float32, gumbel_noise, hash32, vocabulary_noise
from foreword.vllm.vectors import Vector, golden_vectors, memory_of
from foreword.vllm.verification import gather_draft_sampled_kernel, philox_uniforms

VECTORS: dict[str, list[Vector]] = defaultdict(list)
for vector in golden_vectors():
    VECTORS[vector.kernel].append(vector)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_function_gives_the_bits_of_vllms_kernel(kernel):
    assert VECTORS[kernel], "no golden vector"
    assert [line for vector in VECTORS[kernel] for line in vector.differences(KERNELS[kernel])] == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_function_that_does_nothing_differs_from_vllms_kernel(kernel):
    assert any(vector.differences(lambda grid, **arguments: None) for vector in VECTORS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_array_that_vllms_kernel_does_not_change_must_stay(kernel):
    vector = VECTORS[kernel][0]
    kept = next(
        n for n, a in memory_of(vector.arguments).items() if n not in vector.results and a.size and "." not in n
    )

    def careless(grid, **arguments):
        KERNELS[kernel](grid, **arguments)
        arguments[kept].reshape(-1).view(np.uint8)[0] ^= 1

    assert vector.differences(careless)[0].startswith(f"{kernel}: {kept}[")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_launches_of_vllm_have_arguments_that_the_function_knows(kernel):
    check_arguments(kernel, VECTORS[kernel][0].arguments)


def test_the_page_for_plugin_authors_shows_a_call_that_runs_and_names_every_kernel():
    page = (Path(__file__).parents[2] / "docs" / "vllm-kernels.md").read_text(encoding="utf-8")
    exec(next(code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "assert pos" in code), {})
    listed = set(re.findall(r"`(\w+)`", page.split("| module | kernels |")[1].split("\n\n")[0]))
    assert listed == {name.rpartition(".")[2].removesuffix("_kernel") for name in KERNELS}


def test_another_version_of_a_kernel_is_refused_with_what_is_new_and_gone():
    kernel = "vllm.v1.worker.gpu.input_batch._expand_idx_mapping_kernel"
    names = ["idx_mapping_ptr", "expanded_idx_mapping_ptr", "expanded_local_pos_ptr", "other", "BLOCK_SIZE"]
    with pytest.raises(ConfigError, match=r"_expand.*new: \['other'\], gone: \['cu_num_logits_ptr'\]"):
        check_arguments(kernel, names)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("spec_decode.rejection_sampler_utils._rejection_kernel", {"USE_BLOCK_VERIFICATION": True}),
        ("spec_decode.rejection_sampler_utils._rejection_kernel", {"FLY_WINDOW_SIZE": 2}),
        ("spec_decode.rejection_sampler_utils._resample_kernel", {"WATERMARK": True}),
        ("sample.gumbel._gumbel_sample_kernel", {"logits_cache_ptr": np.zeros((1, 1, 4), np.float32)}),
    ],
)
def test_what_a_function_does_not_do_is_refused_by_name(name, change):
    kernel = f"vllm.v1.worker.gpu.{name}"
    vector = VECTORS[kernel][0]
    with pytest.raises(ConfigError, match=next(iter(change))):
        KERNELS[kernel](vector.grid, **{**vector.arguments, **change})


def test_bfloat16_as_its_bits_is_read_exactly():
    values = np.array([1.5, -0.0, np.inf, -(2.0**-120)], np.float32)
    np.testing.assert_array_equal(as_float32((values.view(np.uint32) >> 16).astype(np.uint16)), values)


def test_drafts_of_a_step_that_began_within_the_prefill_are_placeholders():
    draft_sampled, pos = np.zeros(6, np.int32), np.zeros(6, np.int64)
    gather_draft_sampled_kernel(
        (1,),
        draft_sampled_ptr=draft_sampled,
        pos_ptr=pos,
        input_ids_ptr=np.arange(10, 16, dtype=np.int32),
        positions_ptr=np.array([4, 5, 6, 5, 6, 7]),
        logits_indices_ptr=np.arange(6),
        expanded_idx_mapping_ptr=np.array([1, 1, 1, 0, 0, 0], np.int32),
        expanded_local_pos_ptr=np.array([0, 1, 2, 0, 1, 2], np.int32),
        prefill_len_ptr=np.array([5, 5], np.int32),
        num_logits=6,
        BLOCK_SIZE=1024,
    )
    assert draft_sampled.tolist() == [10, -1, -1, 13, 14, 15]
    assert pos.tolist() == [4, 5, 6, 5, 6, 7]


def murmur3(data: bytes, seed: int) -> int:
    """MurmurHash3 x86 32 of whole words, as its author describes it, on Python's integers."""
    h, mask = seed, 0xFFFFFFFF
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) * 0x1B873593 & mask
        h ^= k
        h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 7), (2**62 + 12345, 2**31 + 5)])
def test_the_hash_of_the_noise_is_murmur3_of_seed_position_and_token(seed, position):
    tokens = np.array([0, 1, 99999], np.uint32)
    expected = [
        murmur3(
            seed.to_bytes(8, "little", signed=True) + position.to_bytes(4, "little") + int(t).to_bytes(4, "little"), 0
        )
        for t in tokens
    ]
    assert hash32(np.array([seed]), np.array([position]), tokens).tolist() == [expected]


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 49_157])
def test_the_noise_of_native_code_has_the_bits_of_numpys(fp64, vocab_size):
    rng = np.random.default_rng(vocab_size)
    seeds, positions = rng.integers(-(2**63), 2**63, 12), rng.integers(0, 2**32, 12)
    noise = vocabulary_noise(seeds[::2], positions[::2], vocab_size, fp64)
    expected = gumbel_noise(seeds[::2], positions[::2], np.arange(vocab_size), fp64)
    assert (noise.dtype, noise.tobytes()) == (expected.dtype, expected.tobytes())


@pytest.mark.parametrize("kernel", [name for name, f in KERNELS.items() if f.__module__.endswith(("sampling", "tion"))])
def test_a_function_without_native_code_gives_the_bits_of_vllms_kernel_too(kernel, monkeypatch):
    for module in (sampling, verification):
        monkeypatch.setattr(module, "available", lambda: False)
    assert [line for vector in VECTORS[kernel] for line in vector.differences(KERNELS[kernel])] == []


@pytest.mark.parametrize("fp64", [False, True])
def test_the_noise_is_gumbel_distributed(fp64):
    noise = gumbel_noise(np.array([7, 8]), np.array([3, 4]), np.arange(100_000), fp64).reshape(-1)
    points = np.array([-1.0, 0.0, 1.0, 3.0])
    found = (noise[:, None] <= points).mean(axis=0)
    np.testing.assert_allclose(found, np.exp(-np.exp(-points)), atol=0.005)


def philox(seed: int, position: int) -> int:
    """The first word of Philox 4x32 after ten rounds, on Python's integers."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = position & mask, position >> 32 & mask, 0, 0
    k0, k1 = seed & mask, seed >> 32 & mask
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0


@pytest.mark.parametrize("is_native", [available(), False])
def test_the_uniform_numbers_of_verification_are_those_of_philox(is_native, monkeypatch):
    monkeypatch.setattr(verification, "available", lambda: is_native)
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(-(2**63), 2**63, 200), rng.integers(0, 2**40, 200)
    words = [philox(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
    positive = np.array([word if word < 2**31 else 2**32 - 1 - word for word in words])
    found = philox_uniforms(seeds, positions)
    np.testing.assert_array_equal(found, positive.astype(np.float32) * np.float32(4.6566127342e-10))


def test_the_uniform_numbers_of_verification_are_spread_over_0_to_1():
    values = philox_uniforms(np.repeat([0, -5], 2000), np.tile(np.arange(2000), 2))
    assert values.min() > 0
    assert values.max() < 1
    np.testing.assert_allclose(np.quantile(values, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.03)
