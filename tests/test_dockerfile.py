"""The Dockerfile names files, extras, commands, a route and a port that exist."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from foreword.cli.app import app
from foreword.server.config import ServerConfig
from foreword.server.operations import OPERATIONS

ROOT = Path(__file__).parents[1]
TEXT = re.sub(r"\s*\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def arguments(instruction: str) -> list[str]:
    """Return what follows an instruction, once per line of the file that has it."""
    return re.findall(rf"^{instruction} (.+)$", TEXT, re.MULTILINE)


COPIED = {name for line in arguments("COPY") if not line.startswith("--from") for name in line.split()[:-1]}


def test_every_copied_file_is_in_the_build_context():
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in patterns if line.startswith("!")} == COPIED
    assert [name for name in COPIED if not (ROOT / name).exists()] == []


def test_the_build_has_every_file_that_the_package_names():
    named = {PROJECT["readme"], *PROJECT["license-files"], "CMakeLists.txt", "pyproject.toml", "src", "native"}
    assert named == {name for name in COPIED if not name.startswith("tools/locked/")}


def test_the_image_has_the_locked_packages_that_the_server_needs():
    """Each of a fixed version, with hashes that pip must require; the base image is one digest."""
    locked = (ROOT / "tools" / "locked" / "serve.txt").read_text()
    extras = PROJECT["optional-dependencies"]
    needed = [
        *PROJECT["dependencies"],
        *(one for name in ("serve", "grammar", "hub", "templates") for one in extras[name]),
    ]
    for name in (re.match(r"[\w-]+", one)[0].replace("_", "-").lower() for one in needed if "foreword[" not in one):
        assert re.search(rf"^{name}==[\w.]+ .*\n +--hash=sha256:", locked, re.MULTILINE), name
    installed = re.findall(r"pip install (.*?)(?: &&|$)", TEXT, re.MULTILINE)
    assert installed
    assert all("--require-hashes -r /locked/" in one or one.endswith("--no-deps /wheels/*.whl") for one in installed)
    bases = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert len(bases) == 2
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", *set(bases))


def test_the_image_runs_the_server_without_root():
    assert arguments("USER") == ["1000"]
    assert "useradd --create-home --uid 1000 foreword" in TEXT
    (entry,), (command,) = arguments("ENTRYPOINT"), arguments("CMD")
    assert json.loads(entry) == list(PROJECT["scripts"])
    with pytest.raises(SystemExit) as end:
        app([*json.loads(command), "--help"])
    assert end.value.code == 0


def test_the_health_check_asks_a_public_route_at_the_servers_port():
    ((port, route),) = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", TEXT)
    assert OPERATIONS.target("GET", route).access == "public"
    assert arguments("EXPOSE") == [port] == [str(ServerConfig().port)]
