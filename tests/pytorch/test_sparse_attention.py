"""Attention to the keys that an indexer chooses: in torch against NumPy, and against dense attention in float64."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.errors import ConfigError
from foreword.executors.numpy import NumpyExecutor
from foreword.executors.torch import attention
from foreword.executors.torch.attention import AttentionCall, GatheredAttention
from foreword.executors.torch.cache import KVLayer, PagedCache
from foreword.executors.torch.executor import TorchExecutor, cache_layers
from foreword.executors.torch.parallel import ParallelExecutor
from foreword.models.loader import load_model
from foreword.models.spec import IndexerSpec, LayerSpec, MlaSpec
from kernels.kernel_reference import random_weights, rope, tiny_spec
from kernels.kernel_traffic import BLOCK_SIZE, assert_traffic_changes_nothing, engine
from models.recorded import TINY, make
from models.running import all_logits, in_chunks
from pytorch.test_attention import BLOCK, LENGTHS, PLANS

SPARSE = [name for name, tiny in TINY.items() if "index_topk" in tiny["config"]]
LAYER = LayerSpec(rope(8))
SPEC = tiny_spec(
    num_kv_heads=1,
    head_dim=28,
    mla=MlaSpec(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=18),
    indexer=IndexerSpec(num_heads=5, head_dim=36, topk=9, norm_eps=1e-4),
    layers=(LAYER, replace(LAYER, takes_chosen=True), LayerSpec(None), LayerSpec(None, takes_chosen=True)),
)
"""Heads of the indexer are wider than those of attention, and some layers are not rotated."""
WEIGHTS = random_weights(SPEC)
FEW_AT_ONCE = {"QUERIES_AT_ONCE": 8, "KEYS_AT_ONCE": 48, "PRODUCTS_AT_ONCE": 700}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=[{}, FEW_AT_ONCE], ids=["as it is", "few at once"])
def at_once(request, monkeypatch):
    """The numbers of what is computed at once: the usual ones, and small ones."""
    for name, number in request.param.items():
        monkeypatch.setattr(attention, name, number)


def expected(q, k, of_index, topk):
    """The last queries of one request: q [N, H, D], k of all tokens so far [S, D]; of_index: their queries, weights and
    keys, in integers.
    """
    index_q, weights, index_k = of_index
    first, out = len(k) - len(q), np.zeros(q.shape)
    for i in range(len(q)):
        past = k[: first + i + 1]
        products = np.maximum(index_q[i] @ index_k[: len(past)].T, 0)
        best = np.argsort(-(weights[i] @ products), kind="stable")[:topk]
        scores = np.exp(q[i] @ past[best].T)
        out[i] = scores @ past[best] / scores.sum(-1, keepdims=True)
    return out


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("topk", [1, 6, 20])
def test_steps_equal_attention_to_the_best_keys_and_of_equal_scores_to_the_first(topk, dtype, error):
    """Scores are small integers, so that many are equal. Of two layers, the second takes what the first chose."""
    rng, heads, dim, index_heads, index_dim = np.random.default_rng(0), 4, 8, 3, 5
    states = RequestStates(max_num_reqs=8, max_model_len=128, vocab_size=10, kv_groups=[KVGroup(BLOCK)])
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=128)
    layers = [KVLayer(0, 0, 1, dim, dim, True, index_dim), KVLayer(0, 1, 1, dim, dim, True)]
    cache = PagedCache(layers, num_blocks=64, block_size=BLOCK, dtype=dtype)
    for keys in (*cache.keys, cache.index_keys[0]):
        keys[1:] = torch.nan  # what requests before left
    paged, free = GatheredAttention(cache), rng.permutation(np.arange(1, 64)).tolist()
    past_k = [{name: np.zeros((0, dim)) for name in LENGTHS} for _ in layers]
    past_index = {name: np.zeros((0, index_dim)) for name in LENGTHS}
    for plan in PLANS:
        for name in plan:
            if name not in states:
                blocks = [[free.pop() for _ in range(-(-LENGTHS[name] // BLOCK))]]
                states.add_request(NewRequest(name, prompt_token_ids=[1] * LENGTHS[name], block_ids=blocks))
        batch = prepare_inputs(states, plan, buffers, check="full")
        paged.begin(batch)
        shapes = (index_heads, index_dim), (index_heads,), (index_dim,)
        of_index = [rng.integers(-1, 2, (batch.num_tokens, *shape)) for shape in shapes]
        index_q, weights, index_k = (torch.tensor(x, dtype=dtype) for x in of_index)
        for i, layer in enumerate(layers):
            shapes = (batch.num_tokens, heads, dim), (batch.num_tokens, 1, dim)
            q, k = (torch.tensor(rng.standard_normal(shape), dtype=dtype) for shape in shapes)
            paged.write(i, k, k)
            if layer.index_dim:
                paged.choose(i, index_k, index_q, weights, topk)
            out = paged.attend(AttentionCall(i, 1.0, is_chosen=True), q)
            for b, name in enumerate(batch.req_ids):
                own = slice(*batch.query_start_loc[b : b + 2])
                past_k[i][name] = np.concatenate([past_k[i][name], k[own, 0].double().numpy()])
                if layer.index_dim:
                    past_index[name] = np.concatenate([past_index[name], of_index[2][own]])
                index = of_index[0][own], of_index[1][own], past_index[name]
                want = expected(q[own].double().numpy(), past_k[i][name], index, topk)
                np.testing.assert_allclose(out[own].double().numpy(), want, atol=error, rtol=error)
        states.commit(batch, {})


def mixed_texts(vocab_size):
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, n).tolist() for n in (33, 6, 21, 47)]


def assert_equals_numpy(model):
    texts = mixed_texts(model.spec.vocab_size)
    for sizes, block_size in (([11, 1, 4], 4), ([1, 30], 16)):
        want, got = (
            all_logits(model, texts, in_chunks(texts, sizes), executor, block_size) for executor in ("numpy", "torch")
        )
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.usefixtures("at_once")
def test_requests_in_chunks_get_the_logits_of_numpy():
    assert_equals_numpy(SimpleNamespace(spec=SPEC, weights=WEIGHTS))


@pytest.mark.parametrize("name", SPARSE)
def test_requests_of_each_family_get_the_logits_of_numpy(tmp_path, name):
    assert_equals_numpy(load_model(make(tmp_path, name)))


def test_requests_that_share_blocks_get_the_tokens_that_numpy_gives_each_alone():
    sizes = {"num_blocks": 40, "block_size": BLOCK_SIZE}
    crowd = engine(TorchExecutor(SPEC, WEIGHTS, dtype="fp32", num_threads=1, **sizes), SPEC, num_blocks=40)
    alone = engine(NumpyExecutor(SPEC, WEIGHTS, **sizes), SPEC, num_blocks=40, prefix_caching=False)
    assert_traffic_changes_nothing(crowd, alone, SPEC.vocab_size)


def test_requests_of_at_most_as_many_tokens_as_keys_are_chosen_need_no_scores(monkeypatch):
    texts = mixed_texts(SPEC.vocab_size)
    chunks = [*in_chunks(texts, [11, 1, 4])]
    most = max(map(len, texts))
    exact, fewer = (
        SimpleNamespace(spec=replace(SPEC, indexer=replace(SPEC.indexer, topk=topk)), weights=WEIGHTS)
        for topk in (most, most - 1)
    )
    monkeypatch.delattr(attention, "_index_scores")
    want, got = (all_logits(exact, texts, chunks, executor) for executor in ("numpy", "torch"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    with pytest.raises(NameError, match="_index_scores"):
        all_logits(fewer, texts, chunks, "torch")


def test_blocks_have_the_keys_of_indexers():
    layers, _ = cache_layers(SPEC)
    assert [layer.index_dim for layer in layers] == [36, 0, 36, 0]
    cache = PagedCache(layers, num_blocks=5, block_size=BLOCK, dtype=torch.float32)
    assert cache.block_bytes == 4 * BLOCK * (4 * 28 + 2 * 36)
    for number, (keys, index) in enumerate(zip(cache.keys, cache.index_keys, strict=True)):
        keys[1], index[1] = number + 1, number + 11
    cache.copy_blocks(np.array([1], np.int32), np.array([3], np.int32))
    data = np.zeros((1, cache.block_bytes), np.uint8)
    cache.read_blocks(np.array([3], np.int32), data)
    cache.write_blocks(np.array([4], np.int32), data)
    cache.zero_blocks(np.array([1], np.int32))
    for number, (keys, index) in enumerate(zip(cache.keys, cache.index_keys, strict=True)):
        assert not keys[1].any()
        assert not index[1].any()
        for block in (3, 4):
            assert (keys[block] == number + 1).all()
            assert (index[block] == number + 11).all()


def test_ranks_are_refused():
    sizes = {"num_blocks": 8, "block_size": BLOCK_SIZE}
    with pytest.raises(ConfigError, match="context_parallel_size=2: tiny has indexers that choose among all keys"):
        ParallelExecutor(SPEC, WEIGHTS, context_parallel_size=2, **sizes)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: must divide .* 1 key heads; use one of 1"):
        ParallelExecutor(SPEC, WEIGHTS, tensor_parallel_size=2, **sizes)
