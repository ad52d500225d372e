"""The native encoder against NumPy on long texts, with and without windows, on every instruction set."""

import numpy as np
import pytest

from foreword import PoolingParams
from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.executors.encoder import EncoderLayers
from foreword.executors.functions import FloatWeights
from foreword.executors.options import NativeOptions
from foreword.models.encoder_spec import EncoderLayerSpec, EncoderSpec, encoder_weight_names
from foreword.models.pooling import PoolingSpec
from foreword.models.spec import RopeSpec
from foreword.models.weights import float_tensor
from foreword.native import available

pytestmark = pytest.mark.skipif(not available(), reason="the native module is not built")

ROPE = RopeSpec((1.0, 0.3, 0.1, 0.03, 0.01), 1.1)
NO_LOGITS = np.zeros(0, np.int64)


def make_spec(**changes) -> EncoderSpec:
    values = {
        "architecture": "test", "vocab_size": 50, "hidden_size": 40, "intermediate_size": 70, "num_heads": 4,
        "head_dim": 10, "max_model_len": 1300, "norm_eps": 1e-5, "layers": (EncoderLayerSpec(),) * 2,
    }  # fmt: skip
    return EncoderSpec(**{**values, **changes})


SPECS = {
    "after": make_spec(num_positions=1300, num_token_types=2),
    "before": make_spec(
        norms_before=True, gated=True, biases=False, activation="gelu_tanh",
        layers=(EncoderLayerSpec(ROPE, None, False), EncoderLayerSpec(ROPE, 100), EncoderLayerSpec(None, 0)),
    ),
    "distances": make_spec(
        num_positions=1300, relative_buckets=32, layers=(EncoderLayerSpec(), EncoderLayerSpec(ROPE, 100))
    ),
}  # fmt: skip


def weights_of(spec):
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in encoder_weight_names(spec):
        values = random.standard_normal(shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        if name.endswith("_bounds"):  # the inputs of each product have their own
            values = np.abs(values) * 2 * [-1, 1, -1, 1] + [-0.3, 0.3, -0.3, 0.3]
        weights[name] = float_tensor((values + name.endswith("_norm")).astype(np.float32))
    return weights


def batch_of(lengths, first_text_lens):
    """A step of whole texts."""
    states = RequestStates(max_num_reqs=8, max_model_len=1300, vocab_size=50, kv_groups=[KVGroup(1300)])
    random = np.random.default_rng(1)
    for i, (length, first) in enumerate(zip(lengths, first_text_lens, strict=True)):
        params = PoolingParams(first_text_len=first)
        states.add_request(
            NewRequest(str(i), random.integers(0, 50, length).tolist(), [[i + 1]], pooling_params=params)
        )
    buffers = InputBuffers.for_states(states, 4096)
    return prepare_inputs(states, {str(i): length for i, length in enumerate(lengths)}, buffers)


@pytest.mark.parametrize("name", SPECS)
def test_long_texts_equal_numpy_on_every_instruction_set(name):
    from foreword.executors.encoder import EncoderExecutor
    from foreword.executors.native_encoder import NativeEncoderExecutor
    from foreword.native import native

    spec, weights = SPECS[name], weights_of(SPECS[name])
    batch = batch_of([1300, 1, 97, 600, 16], [700, None, 3, None, 16])
    reference = EncoderExecutor(spec, weights, PoolingSpec())
    reference.compute(batch, NO_LOGITS)
    want = reference.hidden_states(np.arange(batch.num_tokens))
    for isa in native.isa_levels():
        for threads in (1, 3):
            executor = NativeEncoderExecutor(
                spec, weights, PoolingSpec(), weight_format="fp32", isa=isa, num_threads=threads
            )
            executor.compute(batch, NO_LOGITS)
            got = executor.hidden_states(np.arange(batch.num_tokens))
            np.testing.assert_allclose(got, want, atol=2e-4, err_msg=f"{isa}, {threads} threads")


@pytest.mark.parametrize("bounded", [False, True])
def test_rows_with_norms_of_heads_and_branches_and_bounds_of_products_equal_numpy(bounded):
    from foreword.executors.native_encoder import native_encoder
    from foreword.native import native

    spec = make_spec(
        vocab_size=0, norms_before=True, gated=True, biases=False, rms_norm=True, post_norms=True, qk_norm=True,
        unit_v=True, bounded=bounded, num_kv_heads=2, scale=0.7, has_final_norm=False,
        layers=(EncoderLayerSpec(ROPE), EncoderLayerSpec(ROPE, 100), EncoderLayerSpec()),
    )  # fmt: skip
    weights, lengths = weights_of(spec), [700, 1, 97, 16]
    if bounded:
        same = ("layers.1.q_bounds", "layers.1.k_bounds", "layers.1.v_bounds", "layers.1.gate_bounds")
        weights |= dict.fromkeys((*same, "layers.1.up_bounds"), weights[same[0]])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(length) for length in lengths])
    x = np.random.default_rng(2).standard_normal((starts[-1], spec.hidden_size), np.float32)
    want = EncoderLayers(spec, FloatWeights(weights)).run(x, positions, starts)
    for isa in native.isa_levels():
        for threads in (1, 3):
            options = NativeOptions(weight_format="fp32", num_threads=threads)
            got = native_encoder(spec, weights, options, isa=isa).core.encode(
                num_tokens=len(x), num_reqs=len(lengths), input_ids=None, positions=positions,
                query_start_loc=starts.astype(np.int32), token_types=None, x=x,
            )  # fmt: skip
            np.testing.assert_allclose(got, want, atol=1e-3, err_msg=f"{isa}, {threads} threads")


@pytest.mark.parametrize("name", SPECS)
def test_long_texts_equal_numpy_in_torch(name):
    pytest.importorskip("torch", reason="needs the extra foreword[torch]")
    from foreword.executors.encoder import EncoderExecutor
    from foreword.executors.torch.encoder import TorchEncoderExecutor

    spec, weights = SPECS[name], weights_of(SPECS[name])
    batch = batch_of([1300, 1, 97, 600, 16], [700, None, 3, None, 16])
    want, got = (
        executor.encode(batch)
        for executor in (
            EncoderExecutor(spec, weights, PoolingSpec()),
            TorchEncoderExecutor(spec, weights, PoolingSpec(), dtype="fp32", num_threads=1),
        )
    )
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_a_text_does_not_depend_on_the_texts_beside_it():
    from foreword.executors.native_encoder import NativeEncoderExecutor

    spec = SPECS["before"]
    executor = NativeEncoderExecutor(spec, weights_of(spec), PoolingSpec(), num_threads=2)
    first = batch_of([513], [None])
    executor.compute(first, NO_LOGITS)
    alone = executor.hidden_states(np.arange(513)).copy()
    both = batch_of([513, 700], [None, None])
    executor.compute(both, NO_LOGITS)
    np.testing.assert_array_equal(executor.hidden_states(np.arange(513)), alone)
