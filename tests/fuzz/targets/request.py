"""Requests with values of any Python type, checked by an engine, then served for two steps.

An input is the number of values to replace, as a byte, then the seed of the choice. The check must change nothing.
"""

import importlib.util
import math
from collections import UserDict, UserList
from decimal import Decimal
from fractions import Fraction
from functools import cache
from random import Random

import numpy as np

from foreword.batch import KVGroup, SamplingParams
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, EngineConfig
from foreword.executors import Capability
from foreword.scheduler import SchedulerConfig
from fuzz.target import Target

PROMPT = {"request_id": "new", "prompt": [1, 2, 3], "prompt_text": None}
OPTIONS = {"priority": 0, "lora": None, "cache_salt": None, "grammar": None, "stream": False}
PARAMS = {name: getattr(SamplingParams(), name) for name in SamplingParams.__dataclass_fields__}
MIXED = {
    "prompt_embeds": np.ones((3, 4), np.float32), "prompt_token_ids": [1, 2, 3],
    "prompt_is_token_ids": [True, False, True], "mrope_positions": np.zeros((3, 3), int), "mrope_delta": 0,
}  # fmt: skip
VALID = {**PROMPT, **OPTIONS, **PARAMS, **MIXED}
REPLACED = list(VALID)


class Raises:
    """An object whose special methods raise."""

    def fail(self, *arguments):
        raise RuntimeError("this object cannot be used")

    __len__ = __iter__ = __index__ = __int__ = __float__ = __getitem__ = __contains__ = __bool__ = fail
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __array__ = fail
    __hash__ = object.__hash__


class RaisesRepr(Raises):
    __repr__ = Raises.fail


class Endless:
    def __iter__(self):
        return self

    def __next__(self):
        return 1


def values(rng):
    """New values of many types; some are valid for some fields."""
    numbers = (0, 1, -1, 2, 5, 63, 64, 2**31 - 1, 2**31, 2**63, 10**400, -(10**30), 0.0, 0.5, -0.0, 1.0, 1e308, 5e-324)
    number = rng.choice((*numbers, math.nan, math.inf, -math.inf, True, False))
    token = rng.choice((0, 1, 5, 63, 64, -1))
    simple = (None, number, token, "", "x", "\0", "\ud800", "stop", "é🙂" * 50, b"", b"abc", 1j, bytearray(b"ab"))
    inner = rng.choice(simple[:-1])
    arrays = (
        *(np.float32(0.5), np.int64(3), np.bool_(True), np.float64("nan"), np.uint64(2**64 - 1), np.str_("x")),
        *(np.array([1, 2]), np.array(3), np.zeros((2, 2)), np.zeros(0, np.int32), np.array([1, "x", None], object)),
        *(np.full((3, 4), number if isinstance(number, float) else 0.5), np.zeros((3, 1), int), np.ones(3, bool)),
        *(np.array([0.5, math.nan]), np.ma.masked_array([1, 2], [True, False]), np.datetime64("2020-01-01")),
    )
    made = (
        *([inner], (inner,), [inner] * 3, [[inner]], [[1, 2], [inner]], [token, token], [[token]], [[]], [1, [2]]),
        *({inner}, frozenset((1, 2)), {inner: 1}, {token: number}, {1: inner}, {}, {"a": inner}, {"x": [inner]}),
        *((i for i in (1, 2)), iter([inner]), range(3), range(10**12), map(int, "12"), memoryview(b"ab"), Endless),
        *(UserDict({token: 0.5}), UserList([token]), Decimal("0.5"), Fraction(1, 2), Decimal("nan"), slice(3), ...),
        *(int, object(), Raises(), [Raises()], {1: Raises()}, RaisesRepr(), lambda: 1, SamplingParams, print),
    )
    return rng.choice((simple, arrays, made, tensors()))


@cache
def tensors():
    if importlib.util.find_spec("torch") is None:
        return (None,)
    import torch

    return torch.tensor(0.5), torch.tensor(3), torch.tensor([1, 2]), torch.tensor(math.nan), torch.int32, torch.zeros(0)


class ReadsAll(NothingModel):
    capabilities = NothingModel.capabilities | {Capability.PROMPT_EMBEDS, Capability.MROPE}
    hidden_size, mrope_dims = 4, 3


def engine():
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
    made = Engine(
        ReadsAll(16, 64), vocab_size=64, max_model_len=48, kv_groups=[KVGroup(4)], num_blocks=60, config=config
    )
    made.add_request("other", [1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
    return made


def state(made):
    states = made.states
    columns = [*states.columns.values(), *states.sampling.arrays(), states.token_ids, states.block_tables[0].table]
    return [column.tobytes() for column in columns], states.req_ids, len(made.scheduler.waiting)


def valid():
    return [b"\0"]


def mutate(rng, data):
    return bytes([rng.randint(1, 3)]) + rng.randbytes(6)


def read(data, folder):
    rng = Random(data)
    given = dict(VALID)
    for _ in range(data[0] if data else 0):
        given[rng.choice(REPLACED)] = rng.choice(values(rng))
    made = engine()
    before = state(made)
    try:
        params = SamplingParams(**{name: given[name] for name in PARAMS})
        prompt = {name: given[name] for name in MIXED} if rng.random() < 0.4 else given["prompt"]
        group = made.check(given["request_id"], prompt, params, prompt_text=given["prompt_text"],
                           **{name: given[name] for name in OPTIONS})  # fmt: skip
    finally:
        assert state(made) == before
    made.add(group)
    made.step()
    made.step()
    made.abort(group.request_id)
    assert made.states.req_ids == ("other",)


TARGET = Target(valid, read, mutate)
