"""A release and the workflows name one version, and verbs that exist."""

import json
import re
import tomllib
from pathlib import Path

import foreword

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()
VERBS = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.MULTILINE))


def test_every_file_has_the_same_version():
    found = {
        "pyproject.toml": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        "CITATION.cff": re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1],
        "kubernetes.yaml": re.search(r"image: foreword:(\S+)", (ROOT / "deploy" / "kubernetes.yaml").read_text())[1],
        "CHANGELOG.md": re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1],
    }
    assert found == dict.fromkeys(found, foreword.__version__)


def test_every_verb_of_a_workflow_is_one_of_the_makefile():
    run = {verb for text in WORKFLOWS.values() for verb in re.findall(r"run: make ([a-z][a-z0-9-]*)", text)}
    listed = re.findall(r"verb:\s+\[(.*?)\]", WORKFLOWS["nightly.yml"], re.DOTALL)
    run |= {verb.strip() for verbs in listed for verb in verbs.split(",")}
    assert len(run) > 20
    assert run <= VERBS


def test_actions_are_named_by_hash_and_tokens_can_only_read_by_default():
    for name, text in WORKFLOWS.items():
        uses = re.findall(r"uses: (\S+)", text)
        assert uses, name
        assert [one for one in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", one)] == [], name
        assert re.search(r"^permissions:\n  contents: read\n(?=\S)", text, re.MULTILINE), name


def test_every_package_that_the_makefile_installs_for_builds_is_locked_with_hashes():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for name, packages in groups.items():
        text = (ROOT / "tools" / "locked" / f"{name}.txt").read_text()
        locked = {
            one.replace("_", "-").lower(): rest for one, rest in re.findall(r"^([\w-]+)==(.*)", text, re.MULTILINE)
        }
        assert all(rest.endswith("\\") for rest in locked.values()), name
        for package in packages:
            if isinstance(package, str):
                assert re.match(r"[\w-]+", package)[0].replace("_", "-").lower() in locked, json.dumps([name, package])
