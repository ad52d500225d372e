"""Parts that users plug into `LLM`: an executor, a policy, a logits processor, an observer and a drafter.

Each is given as an object, as module:name, or by the name that an installed package announces.
"""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from foreword import LLM, AsyncLLM, SamplingParams
from foreword.engine import EngineObserver
from foreword.errors import ConfigError, PlanError, RequestError
from foreword.executors import HostExecutor
from foreword.executors.native import NativeExecutor
from foreword.executors.numpy import NumpyExecutor
from foreword.models.loader import load_model
from foreword.native import available
from models.recorded import make

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def model(tmp_path) -> str:
    return str(make(tmp_path / "model", "llama3"))


@pytest.fixture
def example(monkeypatch):
    """Import an example by its name, as a user does who has it beside his program."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = [path.stem for path in EXAMPLES.glob("own_*.py")]
    yield import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def announced(tmp_path, monkeypatch):
    """Install a package that announces an entry point "mine" in a group."""

    def announce(group: str, target: str) -> None:
        info = tmp_path / "site" / "own_plugin-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[foreword.{group}]\nmine = {target}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    return announce


@pytest.fixture(params=["object", "text", "name"])
def plugged(request, example, announced):
    """Return what plugs a part of an example in: the part itself, module:name, or the name of an entry point."""

    def plug(group: str, module: str, name: str):
        part, text = getattr(example(module), name), f"{module}:{name}"
        announced(group, text)
        return {"object": part, "text": text, "name": "mine"}[request.param]

    return plug


def tokens(model: str, params: SamplingParams = GREEDY, **options) -> list[list[int]]:
    """The tokens of all prompts on an LLM with these options."""
    with LLM(model, block_size=4, **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, progress=False)]


def test_the_example_of_an_executor_has_at_most_40_lines():
    assert len((EXAMPLES / "own_executor.py").read_text().splitlines()) <= 40


def test_an_executor_of_ones_own_runs_under_the_engine(model, plugged):
    with LLM(model, executor="numpy") as llm:
        embedding = llm.model.weights["embed"].dequantize()
    expected = []
    for prompt in PROMPTS:
        known = list(prompt)
        for _ in range(6):
            known.append(int((embedding[known].mean(0) @ embedding.T).argmax()))
        expected.append(known[len(prompt) :])
    executor = plugged("executors", "own_executor", "Averages")
    assert tokens(model, executor=executor, max_num_batched_tokens=4) == expected


def test_an_executor_that_exists_is_used_and_closed(model):
    class Constant(HostExecutor):
        closed = False

        def compute(self, batch, logits_indices):
            logits = np.zeros((len(logits_indices), batch.states.vocab_size), np.float32)
            logits[:, 3] = 1
            return logits

        def copy_blocks(self, sources, destinations):
            pass

        def close(self):
            self.closed = True

    executor = Constant()
    assert tokens(model, executor=executor, num_blocks=64) == [[3] * 6] * 3
    assert executor.closed


def test_a_policy_of_ones_own_orders_requests(model, plugged):
    policy = plugged("policies", "own_policy", "longest_first")
    with LLM(model, policy=policy, max_num_seqs=1) as llm:
        ended = [output.prompt_index for output in llm.stream(PROMPTS, GREEDY) if output.finished]
    assert ended == [2, 0, 1]


def test_a_logits_processor_of_ones_own_changes_the_requests_that_ask_for_it(model, plugged):
    processor = plugged("logits_processors", "own_processor", "Avoid")
    plain = tokens(model)
    avoid = {"avoid": plain[0]}
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, extra_args=avoid), GREEDY, GREEDY]
    with LLM(model, block_size=4, logits_processors=[processor]) as llm:
        changed = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, progress=False)]
    assert not set(changed[0]) & set(plain[0])
    assert changed[1:] == plain[1:]


@pytest.mark.parametrize("avoid", ["x", [10**6], [[5]], 3])
def test_an_argument_that_a_logits_processor_refuses_ends_its_request_alone(model, example, avoid):
    wrong = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, extra_args={"avoid": avoid})
    with LLM(model, block_size=4, logits_processors=[example("own_processor").Avoid]) as llm:
        outputs = llm.generate(PROMPTS, [GREEDY, wrong, GREEDY], progress=False)
    plain = tokens(model)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "avoid is not a list of token ids" in str(outputs[1].error)
    assert [list(outputs[i].outputs[0].token_ids) for i in (0, 2)] == [plain[0], plain[2]]


def test_an_observer_of_ones_own_sees_every_step(model, plugged, capsys):
    observer = plugged("observers", "own_observer", "Sizes")
    tokens(model, observers=[observer if isinstance(observer, str) else observer()])
    assert capsys.readouterr().err.splitlines() == [
        "step 1: 3 requests, 9 tokens",
        *(f"step {number}: 3 requests, 3 tokens" for number in range(2, 7)),
    ]


def test_a_drafter_of_ones_own_saves_steps_and_changes_no_token(model, example):
    class Count(EngineObserver):
        steps = 0

        def step_planned(self, plan, batch):
            self.steps += 1

    expected, count = tokens(model), Count()
    remembered = example("own_drafter").Remembered
    drafter = {"drafter": lambda states: remembered(states, expected)}
    assert tokens(model, observers=[count], **drafter) == expected
    assert count.steps < 6


def test_a_drafter_is_found_like_the_others(model, plugged):
    assert tokens(model, drafter=plugged("drafters", "own_drafter", "Remembered")) == tokens(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"executor": "no_such:Thing"},
            r"executor='no_such:Thing': .*cannot be imported .*; add the folder .* to PYTHONPATH",
        ),
        ({"executor": "nativ"}, r"executor='nativ': must be one of 'auto', 'native'.*foreword\.executors"),
        ({"executor": 3}, "executor=3: must be one of"),
        ({"policy": "fcsf"}, r"policy='fcsf': must be one of 'fcfs', .*foreword\.policies"),
        ({"policy": 3}, "policy=3: must be one of"),
        ({"logits_processors": "no_such:Thing"}, r"logits_processors='no_such:Thing': expected a list"),
        ({"logits_processors": ["no_such"]}, r"logits_processors='no_such': .*foreword\.logits_processors"),
        ({"observers": [3]}, "observers=3: must be EngineObservers"),
        ({"observers": 3}, "observers=3: expected a list"),
        ({"drafter": "json:no_such"}, "drafter='json:no_such': cannot be imported"),
    ],
)
def test_what_is_no_plug_in_is_refused_by_name(model, options, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM(model, **options)


class Halved:
    relative_cost = 0.0
    propose = staticmethod(lambda rows, most: np.full((len(rows), 2), 0.5))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": ".relative:name"}, r"policy='\.relative:name': .*cannot be imported \(TypeError"),
        ({"policy": "broken_plug_in:name"}, r"cannot be imported \(ZeroDivisionError: division by zero\)"),
        ({"executor": "os:getcwd"}, r"executor=<built-in function getcwd>: cannot be made \(TypeError"),
        ({"executor": lambda spec, weights, size: None}, "makes None, expected one of type Executor"),
        ({"executor": lambda spec, weights, size: HostExecutor}, "HostExecutor'>, expected one of type Executor"),
        ({"observers": ["json:loads"]}, r"observers=<function loads .*: cannot be made \(TypeError"),
        ({"logits_processors": [abs]}, r"logits_processors=<built-in function abs>: cannot be made \(TypeError"),
        ({"logits_processors": [lambda states: 3]}, "makes 3, expected one of type LogitsProcessor"),
        ({"logits_processors": [lambda states: Mute()]}, "its rows must be RowValues, its extra_args a frozenset"),
        ({"drafter": lambda states: None}, "makes None, expected one of type Drafter"),
    ],
)
def test_a_plug_in_that_fails_or_makes_something_else_is_one_sentence(model, tmp_path, monkeypatch, options, reason):
    (tmp_path / "broken_plug_in.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=reason):
        LLM(model, **options)


class Mute:
    rows, extra_args = (), "avoid"

    def update(self, change): ...

    def apply(self, logits, at): ...


def test_drafts_that_are_no_token_ids_are_refused(model):
    with LLM(model, drafter=lambda states: Halved()) as llm, pytest.raises(PlanError, match=r"Halved.propose .*int32"):
        llm.generate(PROMPTS, GREEDY, progress=False)


@pytest.mark.parametrize("key", [lambda request: None, lambda request: [0], lambda: (0,), lambda request: ("x",)])
def test_a_key_that_is_no_tuple_of_integers_is_an_error_of_its_request_alone(model, key):
    def policy(request):
        return (request.arrival,) if len(request.prompt) > 1 else key(request)

    with LLM(model, policy=policy) as llm:
        with pytest.raises(RequestError, match=r"policy = 'policy': .*Let it return a tuple of integers"):
            llm.generate(PROMPTS, GREEDY, progress=False)
        assert llm.generate(PROMPTS[0], GREEDY, progress=False)[0].error is None


def test_the_key_of_a_request_is_made_once_so_that_a_policy_cannot_fail_while_requests_run(model):
    seen = set()

    def policy(request):
        assert request.request_id not in seen
        seen.add(request.request_id)
        return (request.arrival,)

    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    sizes = {"block_size": 4, "max_model_len": 16, "num_blocks": 7, "watermark": 0.0, "reserve_full_prompt": False}
    with LLM(model, policy=policy, **sizes) as llm:
        outputs = llm.generate(PROMPTS, params, progress=False)
        assert max(output.metrics.num_preemptions for output in outputs)
        assert [output.error for output in outputs] == [None] * 3


@pytest.mark.parametrize("executor", [NumpyExecutor, NativeExecutor] if available() else [NumpyExecutor])
def test_an_executor_whose_pool_is_not_the_engines_is_refused(model, executor):
    loaded = load_model(model)
    own = executor(loaded.decoder.for_length(64), loaded.weights, num_blocks=9, block_size=16)
    for options in ({}, {"num_blocks": 9, "block_size": 8}):
        with pytest.raises(ConfigError, match=r"its pool has 9 blocks of 16 tokens, .*num_blocks=9, block_size=16"):
            LLM(model, executor=own, **options)
    with LLM(model, executor=own, num_blocks=9) as llm:
        assert llm.generate(PROMPTS[0], GREEDY, progress=False)[0].error is None


@pytest.mark.parametrize("policy", ["fcfs", "fair", lambda request: (-len(request.prompt), request.arrival)])
def test_a_priority_is_honoured_by_every_policy(model, policy):
    with LLM(model, executor="numpy", policy=policy, max_num_seqs=1) as llm:
        for name, priority in (("last", 2), ("first", -1), ("second", 0)):
            llm.engine.add_request(name, [1, 2], GREEDY, priority=priority)
        ended = []
        while llm.engine.has_work:
            ended += [output.request_id for output in llm.engine.step()]
    assert ended == ["first", "second", "last"]


def test_the_online_interface_takes_the_same_options(model, example):
    llm = AsyncLLM(model, executor=example("own_executor").Averages, policy="priority")
    assert type(llm.engine.executor).__name__ == "Averages"
    assert llm.engine.scheduler.policy.name == "priority"
