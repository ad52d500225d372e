"""The modules that an import loads, in a process of its own. Import times follow from it; times themselves are never
asserted.
"""

import subprocess
import sys

import pytest

HEAVY = {"asyncio", "http", "jinja2", "llguidance", "numpy", "rich", "tokenizers", "torch", "transformers", "typer"}
"""Packages that take 10 ms or more to import."""

HELP = "from foreword.cli.app import app; app(['--help'], standalone_mode=False)"

BUDGETS = {
    "import foreword": set(),
    "import foreword; foreword.__version__, foreword.__all__": set(),
    "import foreword.errors": set(),
    "import foreword.check_options, foreword.sglang, foreword.vllm.check_plugin": set(),
    "import foreword.messages": set(),
    "import foreword.batch": {"numpy"},
    "import foreword.vllm.kernels, foreword.vllm.vectors": {"numpy"},
    "from foreword import SamplingParams": {"numpy"},
    "from foreword import LLM": {"numpy", "tokenizers", "http"},
    "import foreword.server.run, foreword.server.context, foreword.server.listener": {
        "asyncio",
        "http",
        "numpy",
        "tokenizers",
    },
    HELP: {"typer"},
}
"""Statement → those of the heavy packages that it may load."""


ON_USE = {
    "foreword.engine.chat",
    "foreword.engine.pooling",
    "foreword.engine.transcription",
    "foreword.insight",
    "foreword.messages",
    "foreword.models.fetch",
    "foreword.models.hub",
    "foreword.models.quantized",
    "foreword.sampling.generation_rules",
    "foreword.structured.backend",
}
"""Modules that the completion of a text from a GGUF file does not need."""

OF_PYTHON = {"_hashlib", "importlib.metadata", "logging", "shutil", "statistics", "tempfile"}
"""Modules that take 0.5 to 4 MB of memory with those that they load, such as OpenSSL."""

OF_BATCH = tuple(
    f"foreword.{name}"
    for name in ("batch", "arrays", "declared", "errors", "integers", "names", "native", "_native", "schemas", "seeds")
)
"""What the batch package is made of."""


def loaded_by(statement: str) -> set[str]:
    """The modules that a statement loads in a new process."""
    code = f"import sys; before = set(sys.modules)\n{statement}\nprint('loaded', *sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("statement", BUDGETS)
def test_an_import_loads_only_the_heavy_packages_that_it_needs(statement):
    packages = {name.partition(".")[0] for name in loaded_by(statement)}
    assert packages & HEAVY <= BUDGETS[statement]


@pytest.mark.parametrize(
    ("statement", "modules"),
    [
        ("import foreword", {"foreword"}),
        (
            HELP,
            {
                "foreword",
                "foreword.cli",
                "foreword.cli.app",
                "foreword.cli.examples",
                "foreword.collector",
                "foreword.errors",
                "foreword.names",
            },
        ),
    ],
)
def test_modules_of_the_package_that_are_loaded(statement, modules):
    assert {name for name in loaded_by(statement) if name.partition(".")[0] == "foreword"} == modules


def test_the_batch_package_loads_numpy_and_what_it_is_made_of():
    loaded = loaded_by("import foreword.batch")
    of_numpy = loaded_by("import numpy")  # old versions of it load modules of Cython
    assert {name.partition(".")[0] for name in loaded - of_numpy} - set(sys.stdlib_module_names) <= {
        "foreword",
        "numpy",
    }
    assert all(name.startswith(OF_BATCH) for name in loaded if name.startswith("foreword."))
    assert "foreword.batch.proof.spec" not in loaded, "the specification is loaded only where it is checked"


def test_a_start_loads_no_module_that_only_other_requests_or_models_need():
    loaded = loaded_by("from foreword import LLM")
    assert loaded & ON_USE == set()
    assert (loaded - loaded_by("import numpy, tokenizers")) & OF_PYTHON == set()
