"""An executor: the NumPy executor with an option."""

from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError
from recipes.recipe import Edit, Recipe, after, before, new

TEST = "tests/server/test_dummy_executor.py"
LOGITS = "tests/models/test_families.py::test_logits_equal_those_of_transformers[llama3-dummy]"
KINDS, RUNNING = "src/foreword/executors/kinds.py", "tests/models/running.py"
FILE = '''"""An executor with a number."""

from typing import Any

from foreword.executors.numpy import NumpyExecutor
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Weights


class DummyExecutor(NumpyExecutor):
    """The NumPy executor. dummy_number: any."""

    def __init__(self, spec: DecoderSpec, weights: Weights, *, dummy_number: int = 3, **options: Any) -> None:
        super().__init__(spec, weights, **options)
        self.dummy_number = dummy_number
'''
OPTIONS = '''@dataclass(frozen=True, kw_only=True)
class DummyOptions(ExecutorOptions):
    """Options of the dummy executor."""

    dummy_number: int = setting(3, "A number.", least=1, most=9, value_name="N", decoders_only=True)


'''
KIND = '''class DummyKind(ExecutorKind[DummyOptions]):
    """The dummy."""

    name, options = "dummy", DummyOptions

    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: DummyOptions
    ) -> Executor:
        from foreword.executors.dummy import DummyExecutor

        return DummyExecutor(spec, weights, num_blocks=size.num_blocks, block_size=size.block_size, pooling=pooling,
                             **options.values())


'''
RECIPE = Recipe(
    heading="An executor",
    test=TEST,
    edits=(
        Edit("src/foreword/executors/dummy.py", new(FILE), TEST),
        Edit(
            "src/foreword/executors/options.py",
            before("@dataclass(frozen=True, kw_only=True)\nclass DeviceOptions", OPTIONS),
            TEST,
        ),
        Edit(
            KINDS, after("from foreword.executors.options import (\n    DeviceOptions,\n", "    DummyOptions,\n"), TEST
        ),
        Edit(KINDS, before("ExecutorFactory = Callable[", KIND), TEST),
        Edit(KINDS, after("\n_KINDS: tuple[ExecutorKind[Any], ...] = (", "DummyKind(), "), TEST),
        Edit(RUNNING, after("import numpy as np\n", "\nfrom foreword.executors.dummy import DummyExecutor\n"), LOGITS),
        Edit(RUNNING, after("\nEXECUTORS = {", '"dummy": DummyExecutor, '), LOGITS),
    ),
    proofs=("tests/engine/test_executors.py",),
)


def test_the_executor_is_chosen_by_name_and_its_option_is_checked(talker):
    with LLM(str(talker), executor="dummy", dummy_number=9) as llm:
        assert type(llm.engine.executor).__name__ == "DummyExecutor"
        assert llm.engine.executor.dummy_number == 9
        tokens = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids
    with LLM(str(talker), executor="numpy") as llm:
        assert llm.generate("Hi", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids == tokens
    with pytest.raises(ConfigError, match="dummy_number=10: must be from 1 to 9"):
        LLM(str(talker), executor="dummy", dummy_number=10)
    with pytest.raises(ConfigError, match="dummy_number"):
        LLM(str(talker), executor="numpy", dummy_number=9)
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert "## Executor dummy" in page
    assert "| `dummy_number` | integer, 1 to 9 | `3` | A number. |" in page
