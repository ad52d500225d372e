"""Native passes over rows of logits, compared with the lines of NumPy that define it, bit by bit."""

import numpy as np
import pytest

from foreword.native import available, native
from foreword.vllm import sampling, verification

if not available():
    pytest.skip("the native module is not built", allow_module_level=True)

ROWS = 9


def logits_of(rng, vocab_size, padding=5):
    """Rows of logits with -∞, NaNs, both zeros and equal numbers, in a wider array."""
    wide = rng.normal(0, 3, (ROWS, vocab_size + padding)).astype(np.float32)
    wide[rng.random(wide.shape) < 0.1] = -np.inf
    wide[1] = np.where(rng.random(wide.shape[1]) < 0.3, np.nan, wide[1])
    wide[2] = rng.choice(np.array([0.0, -0.0], np.float32), wide.shape[1])
    wide[3] = -np.inf
    wide[4] = rng.choice(np.array([1.5, 2.5], np.float32), wide.shape[1])
    return wide


def both(function, arguments, monkeypatch):
    """The arguments as native code leaves them, and as the lines of NumPy do."""
    results = []
    for is_native in (True, False):
        own = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
        monkeypatch.setattr(sampling, "available", lambda is_native=is_native: is_native)
        with np.errstate(all="ignore"):
            function(**own)
        results.append(own)
    return results


def assert_equal(results):
    of_native, of_numpy = results
    for name, value in of_native.items():
        if isinstance(value, np.ndarray):
            bits = np.dtype(f"u{value.itemsize}")
            differ = value.view(bits) != of_numpy[name].view(bits)
            differ &= (value != 0) | (of_numpy[name] != 0)  # which of two zeros is the largest is not defined
            assert not differ.any(), f"{name}{np.argwhere(differ)[0].tolist()}"


def arguments_of(kernel, rng, vocab_size):
    requests = 6
    rows = rng.integers(0, requests, ROWS).astype(np.int32)
    logits, padded = logits_of(rng, vocab_size), vocab_size + 5
    shared = {"grid": (ROWS,), "logits_ptr": logits, "logits_stride": padded, "vocab_size": vocab_size}
    blocks, block_size = -(-vocab_size // 32), 32
    with_rows = shared | {"expanded_idx_mapping_ptr": rows, "BLOCK_SIZE": block_size}
    bits = rng.integers(-(2**31), 2**31, (requests + ROWS, -(-vocab_size // 32) + 1)).astype(np.int32)
    match kernel:
        case "temperature":
            return with_rows | {"temperature_ptr": rng.choice([0, 0.3, 1, 1.7], requests).astype(np.float32)}
        case "min_p":
            return with_rows | {"min_p_ptr": rng.choice([0, 1e-4, 0.05, 0.3], requests).astype(np.float32)}
        case "penalties":
            return with_rows | {
                "token_ids_ptr": rng.choice([-1, 0, vocab_size - 1, vocab_size], ROWS),
                "expanded_local_pos_ptr": np.minimum(rng.integers(0, 4, ROWS), np.arange(ROWS)).astype(np.int32),
                "repetition_penalty_ptr": rng.choice([1, 0.7, 1.3], requests).astype(np.float32),
                "frequency_penalty_ptr": rng.choice([0, 0.3, -0.4], requests).astype(np.float32),
                "presence_penalty_ptr": rng.choice([0, 0.2], requests).astype(np.float32),
                "prompt_bin_mask_ptr": bits,
                "prompt_bin_mask_stride": bits.shape[1],
                "output_bin_counts_ptr": rng.choice([0, 0, 0, 1, 7], (requests, padded)).astype(np.int32),
                "output_bin_counts_stride": padded,
            }
        case "grammar":
            return shared | {
                "logits_indices_ptr": (np.arange(ROWS) * 2 + rng.integers(0, 2, ROWS)).astype(np.int32),
                "cu_num_logits_ptr": np.arange(ROWS + 1, dtype=np.int32),
                "bitmask_ptr": bits,
                "bitmask_stride": bits.shape[1],
                "MASK_STRIDE": 2,
                "BLOCK_SIZE": block_size,
            }
        case "gumbel":
            return (
                with_rows
                | dict.fromkeys(("logits_cache_ptr", "logits_cache_col_ptr", "logits_cache_source_ptr"))
                | dict.fromkeys(("logits_cache_stride_0", "logits_cache_stride_1", "logits_cache_source_stride"), 0)
                | {
                    "grid": (ROWS, blocks),
                    "local_argmax_ptr": np.full((ROWS, blocks + 1), -7),
                    "local_argmax_stride": blocks + 1,
                    "local_max_ptr": np.full((ROWS, blocks + 1), -7, np.float32),
                    "local_max_stride": blocks + 1,
                    "expanded_idx_mapping_ptr": np.where(rng.random(ROWS) < 0.2, -1, rows),
                    "seeds_ptr": rng.integers(-(2**63), 2**63, requests),
                    "pos_ptr": rng.integers(0, 2**20, ROWS),
                    "temp_ptr": rng.choice([0, 0.7, 1], requests).astype(np.float32),
                    "IS_DRAFTING": False,
                    "APPLY_TEMPERATURE": bool(rng.integers(0, 2)),
                    "USE_FP64": False,
                    "PER_TOKEN_COL": False,
                }
            )
        case "log_softmax":
            ids = rng.integers(0, vocab_size, (ROWS, 3))
            return shared | {
                "output_ptr": np.zeros((ROWS, 3), np.float32),
                "topk_ids_ptr": ids,
                "topk_ids_stride": 3,
                "topk": 3,
                "BLOCK_SIZE": block_size,
                "TOPK_BLOCK_SIZE": 4,
            }
        case _:
            stats = {f"target_local_{name}": np.full((ROWS, blocks), -7, np.float32) for name in ("max", "sumexp")}
            stats |= {f"draft_local_{name}": np.full((ROWS, blocks), -7, np.float32) for name in ("max", "sumexp")}
            stats["target_local_argmax"] = np.full((ROWS, blocks), -7)
            return (
                {f"{name}_ptr": array for name, array in stats.items()}
                | {f"{name}_stride": blocks for name in stats}
                | {
                    "grid": (ROWS, blocks),
                    "target_logits_ptr": logits,
                    "target_logits_stride": padded,
                    "draft_logits_ptr": rng.normal(0, 3, (requests, 3, padded)).astype(np.float32),
                    "draft_logits_stride_0": 3 * padded,
                    "draft_logits_stride_1": padded,
                    "expanded_idx_mapping_ptr": rows,
                    "expanded_local_pos_ptr": (np.arange(ROWS) % 3).astype(np.int32),
                    "temp_ptr": rng.choice([0, 0.7, 1], requests).astype(np.float32),
                    "vocab_size": vocab_size,
                    "num_speculative_steps": 3,
                    "BLOCK_SIZE": block_size,
                    "HAS_DRAFT_LOGITS": True,
                }
            )


KERNELS = {
    "temperature": sampling.temperature_kernel,
    "min_p": sampling.min_p_kernel,
    "penalties": sampling.penalties_kernel,
    "grammar": sampling.apply_grammar_bitmask_kernel,
    "gumbel": sampling.gumbel_sample_kernel,
    "log_softmax": sampling.topk_log_softmax_kernel,
    "stats": verification.compute_local_logits_stats_kernel,
}


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 37, 200, 5003])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_native_code_gives_the_bits_of_numpy(kernel, vocab_size, monkeypatch):
    changed = False
    for seed in range(4):
        arguments = arguments_of(kernel, np.random.default_rng(seed), vocab_size)
        results = both(KERNELS[kernel], arguments, monkeypatch)
        assert_equal(results)
        arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        changed |= any(value.tobytes() != results[0][name].tobytes() for name, value in arrays.items())
    assert changed or (kernel, vocab_size) == ("min_p", 1)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_a_grammar_masks_logits_of_two_bytes_as_numpy_does(dtype, monkeypatch):
    arguments = arguments_of("grammar", np.random.default_rng(0), 37)
    values = arguments["logits_ptr"]
    arguments["logits_ptr"] = (
        (values.view(np.uint32) >> 16).astype(dtype) if dtype == np.uint16 else values.astype(dtype)
    )
    assert_equal(both(sampling.apply_grammar_bitmask_kernel, arguments, monkeypatch))


def of_other_types(kernel, arguments):
    """The arguments with one array of another type, for each array whose values that type can have."""
    names = {
        "temperature": ("logits_ptr", "temperature_ptr"),
        "min_p": ("logits_ptr", "min_p_ptr"),
        "penalties": ("logits_ptr", "repetition_penalty_ptr", "output_bin_counts_ptr"),
        "grammar": ("logits_ptr",),
        "gumbel": ("local_argmax_ptr", "local_max_ptr", "temp_ptr"),
        "log_softmax": ("output_ptr",),
        "stats": ("target_local_argmax_ptr", "target_local_max_ptr"),
    }[kernel]
    for name in names:
        others = (np.float16, np.float64) if arguments[name].dtype == np.float32 else (np.int16, np.int32, np.int64)
        for dtype in others:
            if dtype != arguments[name].dtype:
                yield arguments | {name: arguments[name].astype(dtype)}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_arrays_of_types_that_native_code_does_not_take_are_written_as_numpy_does(kernel, monkeypatch):
    for arguments in of_other_types(kernel, arguments_of(kernel, np.random.default_rng(3), 37)):
        assert_equal(both(KERNELS[kernel], arguments, monkeypatch))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
def test_logits_without_a_penalty_stay(num_tokens):
    arguments = arguments_of("penalties", np.random.default_rng(0), 37) | {"grid": (num_tokens,)}
    for name, neutral in (("repetition", 1), ("frequency", 0), ("presence", 0)):
        arguments[f"{name}_penalty_ptr"] = np.full(6, neutral, np.float32)
    before = arguments["logits_ptr"].copy()
    sampling.penalties_kernel(**arguments)
    np.testing.assert_array_equal(arguments["logits_ptr"], before)


def test_native_functions_refuse_to_write_arrays_of_other_types():
    """A converted one would be a copy that the caller does not see."""
    ints, ones, wide = np.zeros(1, np.int64), np.ones(1, np.float32), np.ones((1, 4))
    narrow, flat = wide.astype(np.float32), np.ones(4, np.float32)
    words, index = np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int64)
    calls = [
        (native.divide_rows, (wide, 4, ints, ones)),
        (native.mask_below_largest, (wide, 4, ints, ones)),
        (native.penalise_rows, (wide, 4, ints, ints, narrow, words, words, ints, ints)),
        (native.mask_refused_rows, (index, 4, ints, words, ints, 1)),
        (native.add_logit_rows, (narrow, ints, ones, words)),
        (native.block_argmax, (narrow, 4, 1, ints, words, narrow)),
        (native.block_argmax, (narrow, 4, 1, ints, index, narrow.astype(np.float16))),
        (native.below_largest, (flat, False, np.ones(1), narrow)),
        (native.below_largest, (flat, False, ones, wide)),
        (native.noise_uniform32, (ints, ints, wide, narrow)),
        (native.noise_uniform32, (ints, ints, narrow, wide)),
        (native.noise_select, (narrow, wide)),
        (native.noise_uniform64, (ints, ints, narrow)),
        (native.philox_uniforms, (ints, ints, np.ones(1))),
    ]
    for function, arguments in calls:
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\): incompatible"):
            function(*arguments)


def block_argmax(values, block_size, num_blocks, rows):
    native.block_argmax(values, block_size, num_blocks, rows, np.zeros((1, 4), np.int64), np.zeros((1, 4), np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, rows: native.divide_rows(a, 5, rows, np.ones(1, np.float32)), "a row has too few entries"),
        (lambda a, rows: native.divide_rows(a, 4, rows + 2, np.ones(1, np.float32)), "there is no row 2"),
        (lambda a, rows: native.divide_rows(a, 4, rows, np.ones(2, np.float32)), "as many entries as rows"),
        (lambda a, rows: native.divide_rows(a.T, 1, rows, np.ones(1, np.float32)), "one after another"),
        (lambda a, rows: native.divide_rows(a, -1, rows, np.ones(1, np.float32)), "size of a row is below 0"),
        (lambda a, rows: native.mask_below_largest(a, -1, rows, np.ones(1, np.float32)), "size of a row is below 0"),
        (lambda a, rows: block_argmax(a[:1], 0, 2, rows), "block_size: expected a number from 1"),
        (lambda a, rows: block_argmax(a[:1], 2**62, 2, rows), "block_size: expected a number from 1"),
        (lambda a, rows: block_argmax(a[:1], 2, -2, rows), "size of a row is below 0"),
    ],
)
def test_rows_that_are_not_there_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((2, 4), np.float32), np.zeros(1, np.int64))
