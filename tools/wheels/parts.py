"""Write the list of parts (SBOM) of a release, as CycloneDX: what an installation with every extra of the server has,
and what the wheel itself contains that others wrote.

python parts.py FOLDER                with cyclonedx-bom and nanobind in the environment
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import nanobind
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

EXTRAS = "serve,hub,templates,events"
ROBIN_MAP = Path(nanobind.include_dir()).parent / "ext/robin_map/include/tsl/robin_growth_policy.h"
GGUF = "0.19.0"
"""The version of the package gguf that the codebooks of foreword/models/codebooks.py were compared with."""


def write(folder: Path) -> None:
    """Write a list for the wheel of this machine, and one for that of the layer."""
    for wheel in sorted(folder.glob("*x86_64.whl")):
        name, _, rest = wheel.name.partition("-")
        target = folder / f"{name}-{rest.partition('-')[0]}.cdx.json"
        if target.exists():
            continue
        wanted = str(wheel) if name == "foreword_batch" else f"{wheel}[{EXTRAS}]"
        listed = json.loads(installed(wanted))
        (whole,) = (part for part in listed["components"] if part["name"].replace("-", "_") == name)
        del whole["externalReferences"]  # the path of the wheel on this machine
        whole["components"] = contained(wheel)
        text = json.dumps(listed, indent=2) + "\n"
        if fault := JsonStrictValidator(SchemaVersion.from_version(listed["specVersion"])).validate_str(text):
            sys.exit(f"{target.name}: {fault}")
        target.write_text(text)


def installed(wanted: str) -> str:
    """Return the list of what an installation of a wheel brings."""
    with tempfile.TemporaryDirectory() as environment:
        venv.create(environment, with_pip=True)
        other = Path(environment, "bin", "python")
        pip = [other, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", wanted], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "pip", "setuptools"], check=True)
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--output-format",
                   "JSON", other]  # fmt: skip
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def contained(wheel: Path) -> list[dict[str, Any]]:
    """Return what THIRD_PARTY_NOTICES.md names and a wheel contains, with the versions of this environment."""
    version = importlib.metadata.version("nanobind")
    robin_map = ".".join(re.findall(r"#define TSL_RH_VERSION_\w+ (\d+)", ROBIN_MAP.read_text()))
    parts = [
        part("nanobind", version, "BSD-3-Clause", f"pkg:pypi/nanobind@{version}"),
        part("robin-map", robin_map, "MIT", f"pkg:github/tessil/robin-map@v{robin_map}"),
    ]
    with zipfile.ZipFile(wheel) as files:
        if "foreword/models/codebooks.py" in files.namelist():
            parts.append(part("ggml-codebooks", GGUF, "MIT", f"pkg:pypi/gguf@{GGUF}"))
    return parts


def part(name: str, version: str, licence: str, purl: str) -> dict[str, Any]:
    """Return the entry of a part."""
    return {"type": "library", "bom-ref": f"contained-{name}", "name": name, "version": version, "purl": purl,
            "licenses": [{"license": {"id": licence}}]}  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]))
