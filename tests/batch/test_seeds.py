"""A request without a seed gets one per admission, which is the same for every way to admit it."""

from types import SimpleNamespace

import numpy as np
import pytest
from batch_rig import states_of
from test_vllm_apply import cached_data, new_data, output

from foreword.batch import KVGroup, NewRequest, NewRequests, RequestError, RequestStates, SamplingParams
from foreword.batch.adapters import vllm_front
from foreword.batch.adapters.vllm import apply
from foreword.batch.adapters.vllm_preempted import preempt, resume

R, VOCAB = 40, 50
BASES = pytest.mark.parametrize("base", [0, 11, -5, 2**63 - 1])


def seed_of(base: int, admission: int) -> int:
    """The admission-th output of SplitMix64 from ``base``, as an int64; ``base`` itself for the first admission."""
    if admission == 0:
        return base
    x = (base + admission * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def make(base: int = 0, core: bool = True) -> RequestStates:
    states = states_of(KVGroup(8), rows=R, length=8, native=core)
    states.sampling.base_seed = base
    return states


def columns(ids: list[str], **sampling) -> NewRequests:
    N = len(ids)
    return NewRequests(
        req_ids=ids, token_ids=np.ones(2 * N, np.int32), num_tokens=np.full(N, 2, np.int32),
        block_ids=[np.arange(1, N + 1, dtype=np.int32)], num_blocks=[np.ones(N, np.int32)], sampling=sampling or None,
    )  # fmt: skip


def admit(states: RequestStates, way: str, ids: list[str]) -> None:
    """Random sampling without a seed."""
    match way:
        case "one":
            for rid in ids:
                states.add_request(NewRequest(rid, [1, 2], [[1]], sampling_params=SamplingParams(temperature=0.5)))
        case "columns":
            states.add_requests(columns(ids, temperature=np.full(len(ids), 0.5, np.float32)))
        case "converted columns":  # values that native code does not take as they are
            states.add_requests(columns(ids, temperature=np.full(len(ids), 0.5, np.float64)))
        case "vllm":
            params = SimpleNamespace(temperature=0.5, seed=None)
            apply(states, output([new_data(rid, [1, 2], ([1],), sampling_params=params) for rid in ids]))
        case "vllm, rare parameters":  # native code leaves these to Python
            params = SimpleNamespace(temperature=0.5, logit_bias={3: 1.0})
            apply(states, output([new_data(rid, [1, 2], ([1],), sampling_params=params) for rid in ids]))


WAYS = ["one", "columns", "converted columns", "vllm", "vllm, rare parameters"]


def seeds(states: RequestStates, ids: list[str]) -> list[int]:
    return [int(states.sampling.seed[states.row_of(rid)]) for rid in ids]


@BASES
@pytest.mark.parametrize("core", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("way", WAYS)
def test_each_admission_without_a_seed_has_its_own(way, core, base, monkeypatch):
    if not core:
        monkeypatch.setattr(vllm_front, "native_core", lambda *_: None)
    states, ids = make(base, core), [f"r{i}" for i in range(R)]
    admit(states, way, ids[:15])
    admit(states, way, ids[15:])
    assert seeds(states, ids) == [seed_of(base, n) for n in range(R)]
    assert len(set(seeds(states, ids))) == R
    for rid in ids[:5]:
        states.remove_request(rid)
    admit(states, way, ["again"])
    assert seeds(states, ["again"]) == [seed_of(base, R)]


@pytest.mark.parametrize("core", [True, False], ids=["native", "python"])
def test_every_way_to_admit_counts_on(core, monkeypatch):
    if not core:
        monkeypatch.setattr(vllm_front, "native_core", lambda *_: None)
    states, ids = make(7, core), []
    for i in range(10):
        new = [f"{i}.{j}" for j in range(1 + i % 3)]
        admit(states, WAYS[i % len(WAYS)], new)
        ids += new
    assert seeds(states, ids) == [seed_of(7, n) for n in range(len(ids))]


@pytest.mark.parametrize("core", [True, False], ids=["native", "python"])
def test_a_seed_that_is_given_holds_and_its_request_counts(core):
    states = make(7, core)
    states.add_request(NewRequest("a", [1], [[1]], sampling_params=SamplingParams(seed=99)))
    states.add_request(NewRequest("greedy", [1], [[1]]))
    admit(states, "one", ["b"])
    given = {"temperature": np.full(2, 0.5, np.float32), "seed": np.array([5, -6])}
    states.add_requests(columns(["c", "d"], **given))
    params = SimpleNamespace(temperature=0.5, seed=12)
    apply(states, output([new_data("e", [1], ([1],), sampling_params=params)]))
    states.add_requests(columns(["plain", "too"]))
    admit(states, "columns", ["f"])
    assert seeds(states, ["a", "b", "c", "d", "e", "f"]) == [99, seed_of(7, 2), 5, -6, 12, seed_of(7, 8)]
    assert seeds(states, ["greedy", "plain", "too"]) == [0, 0, 0]


@pytest.mark.parametrize("core", [True, False], ids=["native", "python"])
def test_admissions_that_are_refused_do_not_count(core):
    states = make(7, core)
    admit(states, "one", ["a"])
    with pytest.raises(RequestError):
        states.add_requests(columns(["b", "c", "a"], temperature=np.ones(3, np.float32)))
    with pytest.raises(RequestError):
        states.add_request(NewRequest("b", [VOCAB], [[1]]))
    admit(states, "one", ["b"])
    assert seeds(states, ["a", "b"]) == [seed_of(7, 0), seed_of(7, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_a_preempted_request_draws_with_its_seed_when_it_comes_back(way):
    states = make(7)
    admit(states, way, ["x", "a", "b"])
    before = seeds(states, ["a", "b"])
    kept = preempt(states, "a")
    admit(states, "one", ["new"])
    row = resume(states, kept, [[3]], 0)
    assert states.sampling.seed[row] == before[0] == seed_of(7, 1)
    apply(states, output(preempted=["b"]))
    admit(states, "vllm", ["newer"])
    apply(states, output(cached=cached_data([("b", ([4],), 0, 0)], resumed=["b"])))
    assert seeds(states, ["a", "b"]) == before
    assert len(set(seeds(states, ["x", "a", "b", "new", "newer"]))) == 5


@pytest.mark.parametrize("given", [None, 12])
def test_a_request_resumed_as_a_new_one_draws_with_its_seed(given):
    """The newer runner sends a preempted request again, with its outputs."""
    states, params = make(7), SimpleNamespace(temperature=0.5, seed=given)
    apply(states, output([new_data(rid, [1, 2], ([1],), sampling_params=params) for rid in ("x", "a", "b")]))
    before = seeds(states, ["a", "b"])
    apply(states, output(preempted=["a"], finished=["b"]))
    again = [new_data(rid, [1, 2], ([3],), sampling_params=params, prefill_token_ids=[1, 2, 9]) for rid in ("a", "b")]
    apply(states, output(again))
    assert seeds(states, ["a"]) == before[:1]
    assert seeds(states, ["b"]) == [given or seed_of(7, 4)]  # another request of this name
