"""A model family: Llama under another ``model_type``, with the tensors and the logits recorded for it."""

import json
from pathlib import Path

from foreword import LLM, SamplingParams
from models.recorded import TINY, make
from recipes.recipe import Change, Edit, Recipe, after, new

TEST = "tests/models/test_dummy_family.py"
FAMILIES = "src/foreword/models/families/__init__.py"
KEYS = "tests/models/test_model_keys.py::test_the_reference_of_every_family_is_recorded"
LOGITS = "tests/models/test_families.py"
FILE = '''"""Llama by another name."""

from foreword.models.config import Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, Family, decoder, num_layers, rope
from foreword.models.keys import table
from foreword.models.spec import DecoderSpec, LayerSpec


def dummy(config: Config) -> DecoderSpec:
    return decoder(config, "llama", (LayerSpec(rope(config)),) * num_layers(config))


FAMILIES = {"dummy": Family("Dummy", dummy, table((*DECODER, HIDDEN_ACT)))}
'''


def recorded(key: str, source: str, **changes: object) -> Change:
    """Add what a script would record, which is that of another family."""

    def change(content: str) -> str:
        record = json.loads(content)
        found = record[key][source]
        record[key]["dummy"] = {
            name: value | changes.get(name, {}) if name in changes else value for name, value in found.items()
        }
        return json.dumps(record)

    return change


RECIPE = Recipe(
    heading="A model family",
    test=TEST,
    edits=(
        Edit("src/foreword/models/families/dummy.py", new(FILE), TEST),
        Edit(
            FAMILIES,
            after("from collections.abc import Mapping\n\n", "from foreword.models.families import dummy\n"),
            TEST,
        ),
        Edit(FAMILIES, after("\nFAMILIES: Mapping[str, Family] = {\n", "    **dummy.FAMILIES,\n"), TEST),
        Edit(
            "tests/data/models/make_tiny.py",
            after("\nMODELS = {\n", '    "dummy": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),\n'),
            f"{LOGITS}::test_the_recorded_models_are_those_of_the_script",
        ),
        Edit(
            "tests/data/models/tiny.json",
            recorded("models", "llama3", config={"model_type": "dummy"}),
            f"{LOGITS}::test_every_family_has_recorded_logits",
        ),
        Edit("tests/data/models/reference_keys.json", recorded("families", "llama"), KEYS),
    ),
    proofs=(f"{LOGITS}::test_logits_equal_those_of_transformers[dummy-numpy]", "tests/models/test_model_keys.py"),
    not_followed={"tests/models/gguf_models.py": "the dummy has no name in GGUF files"},
)


def test_a_directory_of_the_family_is_loaded_and_computes(tmp_path):
    ids = TINY["dummy"]["token_ids"][:9]
    texts = []
    for name in ("dummy", "llama3"):
        with LLM(str(make(tmp_path, name))) as llm:
            assert llm.engine.executor.spec.architecture == "llama"
            (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=6))
            texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert "| Dummy | `dummy` | – | 1 |" in page
