"""FOREWORD_CHECK: its form, its entry point, and which vLLM it accepts. No vLLM is needed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from foreword.check_options import CheckOptions
from foreword.errors import ConfigError
from foreword.vllm.window import HOOKS, MODULES, check_parallel, check_version, generation_of, unknown_fields


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", None),
        ("", None),
        ("full", CheckOptions()),
        ("host", CheckOptions("host")),
        ("tensors,sample:10,raise", CheckOptions("tensors", every=10, raises=True)),
        ("full, first:0", CheckOptions(first=0)),
        ("record:steps.jsonl:1MB,report:r", CheckOptions(record="steps.jsonl:1MB", report=Path("r"))),
    ],
)
def test_the_variable_is_read_as_its_form_says(text, expected):
    assert CheckOptions.of(text) == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("fast", "'fast' is unknown"),
        ("full,host", "'host' is given twice"),
        ("off,full", "'off' is unknown"),
        ("full,sample:0", "sample:0"),
        ("full,sample:x", "sample:x"),
        ("full,first:-1", "first:-1"),
        ("full,raise:2", "'raise:2' is unknown"),
        ("record:", "record needs the name of a file"),
        ("full,,raise", "'' is unknown"),
    ],
)
def test_another_value_is_refused_by_name(text, names):
    with pytest.raises(ConfigError) as refused:
        CheckOptions.of(text)
    assert names in str(refused.value)


@pytest.mark.parametrize("module", ["foreword.vllm.check_plugin", "foreword.sglang"])
@pytest.mark.parametrize("value", [None, "off", ""])
def test_the_entry_points_import_nothing_when_they_are_off(value, module):
    code = (
        f"import sys; from {module} import plugin; plugin();"
        "print(sorted(m for m in ('numpy', 'torch', 'vllm', 'foreword.batch', 'foreword.shadow') if m in sys.modules))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)} | ({} if value is None else {"FOREWORD_CHECK": value})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


def test_known_versions_are_accepted_and_others_refused():
    for version in ("0.32.0", "0.32.0+cpu", "0.33.1", "0.33"):
        check_version(version)
    for version in ("0.31.9", "0.34.0", "1.32.0", "0.330.0", "dev"):
        with pytest.raises(ConfigError, match="versions that are known"):
            check_version(version)


def runner(generation, **others):
    """A class whose methods have the known parameters, in the module of a generation."""
    methods = {}
    for name, parameters in HOOKS[generation].items():
        exec(f"def {name}({', '.join(parameters)}, *args, **kwargs): pass", {}, methods)
    base = type("GPUModelRunner", (), {"__module__": MODULES[generation]} | methods | others)
    return type("CPUModelRunner", (base,), {"__module__": "a.platform"})


def test_the_generation_of_a_runner_is_found_on_any_platform():
    assert {generation_of(runner(generation)) for generation in HOOKS} == HOOKS.keys()


def test_a_missing_hook_and_one_with_other_parameters_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"_update_states has the parameters \(\)"):
        generation_of(runner("first", _update_states=None))
    with pytest.raises(ConfigError, match=r"prepare_attn has the parameters \('self', 'batch'\)"):
        generation_of(runner("second", prepare_attn=lambda self, batch: None))
    with pytest.raises(ConfigError, match="is not one of those known"):
        generation_of(type("Runner", (), {}))


def test_unknown_fields_of_a_decision_are_named():
    assert unknown_fields(["num_scheduled_tokens", "new_of_034", "skip_drafts"]) == ["new_of_034"]


def test_pipeline_and_context_parallel_engines_are_refused():
    check_parallel(SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1))
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        check_parallel(SimpleNamespace(pipeline_parallel_size=2))
