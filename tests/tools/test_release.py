"""A release and the workflows name one version, and verbs that exist."""

import json
import re
import tomllib
from pathlib import Path

import foreword

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
LOCKED = ROOT / "tools" / "locked"
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
    assert verbs_of_workflows() <= VERBS


def test_every_verb_that_checks_something_runs_in_a_workflow():
    """Others show or write something, run other verbs, or need a machine that no workflow has."""
    shown = {"help", "demo", "serve", "smoke", "bench", "throughput", "wheel", "workflow", "clean"}
    writers = {"native", "stubs", "pages", "lock-vllm"}
    assert VERBS - verbs_of_workflows() == {*shown, *writers, "gpu"}


def verbs_of_workflows() -> set[str]:
    run = {verb for text in WORKFLOWS.values() for verb in re.findall(r"run: make ([a-z][a-z0-9-]*)", text)}
    listed = [one for text in WORKFLOWS.values() for one in re.findall(r"verb:\s+\[(.*?)\]", text, re.DOTALL)]
    return run | {verb.strip() for verbs in listed for verb in verbs.split(",")}


def test_actions_are_named_by_hash_and_tokens_can_only_read_by_default():
    for name, text in WORKFLOWS.items():
        uses = re.findall(r"uses: (\S+)", text)
        assert uses, name
        assert [one for one in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", one)] == [], name
        assert re.search(r"^permissions:\n  contents: read\n(?=\S)", text, re.MULTILINE), name


def test_no_job_that_can_write_contents_runs_the_makefile():
    """A package that a verb installs would have the job's token."""
    for name, text in WORKFLOWS.items():
        for job in re.split(r"^  (?=[\w-]+:\n)", text.partition("\njobs:\n")[2], flags=re.MULTILINE):
            assert "contents: write" not in job or "run: make" not in job, (name, job)


def test_the_hooks_of_commits_are_the_checks_of_make_check():
    recipe = re.search(r"^check: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    entries = re.findall(
        r"^ +entry: (?:bash -c ')?([^'\n]+)", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE
    )
    assert entries == [line.strip().removeprefix("$(BIN)/") for line in recipe.splitlines()]


def test_the_makefile_installs_nothing_but_locked_packages_and_torch():
    recipes = "".join(line for line in MAKEFILE.splitlines(keepends=True) if line.startswith("\t"))
    assert "$(PIP) " in recipes
    found = set(re.findall(r"(?:\$\((?:PIP|OLDEST)\)|pip (?:install|wheel)) (.*)", recipes))
    assert {one for one in found if "--require-hashes -r $<" not in one} == {
        "--no-build-isolation --no-deps .",
        "--no-deps build/oldest/wheel/*.whl",
        "--quiet --disable-pip-version-check --no-build-isolation --no-deps -w build/oldest/wheel .",
    }
    installed = {name for names in re.findall(r"\$\(TORCH\) (.*)", recipes) for name in names.split()}
    versions = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (LOCKED / "torch.txt").read_text(), re.MULTILINE))
    assert installed == versions.keys() == {"torch", "torchvision", "triton"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ranges = {one.partition(">=")[0]: one for name in ("torch", "vision") for one in extras[name] if "<" in one}
    for name in ("torch", "torchvision"):
        lowest, highest = (tuple(map(int, one.split("."))) for one in re.findall(r"[\d.]+", ranges[name]))
        assert lowest <= tuple(map(int, versions[name].split("."))) < highest


def test_wheels_of_a_release_need_the_libc_that_the_page_of_platforms_names():
    page = (ROOT / "docs" / "platforms.md").read_text()
    programs = {name: (ROOT / "tools" / "wheels" / f"{name}.py").read_text() for name in ("__main__", "cross")}
    x86 = re.search(r"^OLDEST_LIBC = \((\d+), (\d+)\)", programs["__main__"], re.MULTILINE)
    arm = re.search(r'^LIBC = "([\d.]+)"', programs["cross"], re.MULTILINE)
    assert f"| Linux, x86-64, glibc {x86[1]}.{x86[2]} or later" in page
    assert re.search(rf"^\| Linux, aarch64 .*, glibc {re.escape(arm[1])} or later", page, re.MULTILINE)
    assert f"manylinux_{arm[1].replace('.', '_')}_aarch64" in programs["__main__"]


def test_programs_of_verbs_install_locked_packages():
    """Two programs of tools/wheels install the wheels that they built, with the newest packages these need."""
    texts = {path: path.read_text() for path in (ROOT / "tools").rglob("*.py")}
    installing = {path.relative_to(LOCKED.parent): text for path, text in texts.items() if '"install", ' in text}
    locked = {str(path) for path, text in installing.items() if '"--require-hashes"' in text}
    assert locked == {"arm/check.py", "wheels/__main__.py", "wheels/emulated.py"}
    assert {str(path) for path in installing} - locked == {"wheels/check.py", "wheels/parts.py"}


def test_what_several_verbs_install_in_one_environment_has_one_version():
    verbs = re.findall(r"\$\(STAMPS\)/([a-z-]+)", "".join(re.findall(r"^[a-z$].*:(.*?)##", MAKEFILE, re.MULTILINE)))
    files = [ROOT / "tests" / "requirements.txt", LOCKED / "foreword.txt", LOCKED / "build.txt"]
    files += [LOCKED / f"{verb}.txt" for verb in set(verbs) - {"install", "test", "build-tools"}]
    assert len(files) > 10
    versions: dict[str, dict[str, set[str]]] = {}
    for path in files:
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE):
            versions.setdefault(name, {}).setdefault(path.name, set()).add(version)
    for name, found in versions.items():
        assert len({frozenset(one) for one in found.values()}) == 1, (name, found)


def test_every_package_that_the_makefile_installs_for_builds_and_verbs_is_locked_with_hashes():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for name, packages in groups.items():
        text = (LOCKED / f"{name}.txt").read_text()
        locked = {
            one.replace("_", "-").lower(): rest for one, rest in re.findall(r"^([\w-]+)==(.*)", text, re.MULTILINE)
        }
        assert all(rest.endswith("\\") for rest in locked.values()), name
        for package in packages:
            if isinstance(package, str):
                assert re.match(r"[\w-]+", package)[0].replace("_", "-").lower() in locked, json.dumps([name, package])
