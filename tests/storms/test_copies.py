"""Errors, parameters and outputs pass between processes: pickled, copied and copied in depth they are the same."""

import copy
import pickle
import pkgutil
from collections.abc import Callable
from importlib import import_module

import pytest
from scenes import PLAIN, run

import foreword
from foreword import errors
from foreword.batch import SamplingParams
from foreword.batch.step.tensors import StaleBatchError
from foreword.executors.pooling import BadHiddenStatesError
from foreword.media.encoder import PlaceError
from foreword.openai.batch_file import LineError
from foreword.sampling import BadLogitsError, NoTokenLeftError
from foreword.shadow import Finding, FindingError

ERRORS: list[errors.ForewordError] = [
    errors.ForewordError("something"),
    errors.ConfigError("num_blocks=1: must be at least 2"),
    errors.RequestError("a", "top_p", 2.0, "must be > 0 and ≤ 1", "Use 1.0 for no limit."),
    errors.RequestError(None, "prompts", object, "must be a text", "Pass one."),
    errors.ContextLengthError(
        "a", "prompt", "9 tokens", "is too long", "Shorten it.", num_tokens=9, longest=7, max_model_len=8
    ),
    errors.ModelOutputError("a", "logits", float("inf"), "must be finite", "Use another model."),
    errors.UnknownAdapterError("a", "model", "x", "is not loaded", "Load it"),
    PlaceError(None, "messages[0]", "<image>", "has a placeholder", "Leave <image> out."),
    errors.CapacityError("3 blocks wanted, 2 of 8 are free"),
    errors.PlanError("wrong", step=3, request="a", tensor="positions", index=(1, 2), expected=[1], got="x"),
    errors.PlanError("wrong"),
    errors.ModelError("model.gguf: ends early"),
    errors.UnsupportedModelError("architecture 'x'"),
    errors.EngineError("the engine was closed"),
    errors.StepError(ValueError("a step")),
    BadLogitsError("a", 3),
    NoTokenLeftError("a", 3),
    BadHiddenStatesError("a", 3),
    StaleBatchError("step 3 is committed"),
    LineError("invalid_json", "line 3: expected a JSON object", "a"),
    FindingError(Finding(3, "slot_mapping", 0, (1,), "a", 36, 37, 1, "runner")),
]
WAYS: dict[str, Callable[[object], object]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
ways = pytest.mark.parametrize("way", sorted(WAYS))


def subclasses(base: type) -> set[type]:
    return {base}.union(*(subclasses(cls) for cls in base.__subclasses__()))


@ways
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_stays_the_same(error: errors.ForewordError, way: str):
    other = WAYS[way](error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_every_error_class_is_tried():
    for module in pkgutil.walk_packages(foreword.__path__, "foreword."):
        if not module.name.endswith("__main__"):
            try:
                import_module(module.name)
            except ModuleNotFoundError as error:
                if str(error.name).startswith("foreword"):  # else a package of an extra
                    raise
    known = {cls for cls in subclasses(errors.ForewordError) if cls.__module__.startswith("foreword")}
    assert {type(error) for error in ERRORS} == known


@ways
def test_an_output_and_its_parameters_stay_the_same(way: str):
    engine = PLAIN.engine()
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, n=2, seed=1, stop=("ab",), logit_bias={3: 1.0})
    engine.add_request("x", [1, 2, 3], params, stream=True)
    early = engine.step()[0]
    final = run(engine)["x"]
    for value in (params, early, final, *final.outputs, final.metrics):
        assert WAYS[way](value) == value
