"""Models are fetched from the Hugging Face hub; a class of this file stands in for the hub's library."""

import shutil
import sys
from fnmatch import fnmatch
from types import ModuleType, SimpleNamespace

import pytest

from foreword.errors import ModelError
from foreword.models.hub import from_hub
from foreword.models.loader import find_model, load_model
from foreword.models.vision_files import find_mmproj

FILES = {
    "org/tiny": ["config.json", "tokenizer.json", "model.safetensors", "README.md"],
    "org/tiny-GGUF": ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny.f16.gguf", "README.md"],
    "org/odd-GGUF": ["odd[1]-Q4_K_M.gguf", "odd1-Q4_0.gguf"],
    "org/one-GGUF": ["one-iq3_xs.gguf"],
    "org/seeing-GGUF": ["seeing-Q8_0.gguf", "seeing-f16.gguf", "mmproj-seeing-Q8_0.gguf", "mmproj-seeing-f16.gguf"],
    "org/split-GGUF": ["q4_k_m/split-Q4_K_M.gguf", "old/split-Q4_K_M.gguf"],
    "org/torn-GGUF": [f"torn-Q8_0-0000{i}-of-00003.gguf" for i in (1, 3)],
    "org/parts-GGUF": [*(f"big/parts-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)), "parts-Q4_0.gguf"],
    "org/seeing-parts-GGUF": [*(f"big/seeing-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)), "mmproj-F16.gguf"],
}


class Hub(ModuleType):
    """Repositories of small files. is_reachable: whether the hub answers. fetched: (repository, file) so
    far. revisions: those that were asked for."""

    def __init__(self, folder, size=100):
        super().__init__("huggingface_hub")
        self.folder, self.size, self.is_reachable = folder, size, True
        self.fetched, self.revisions = set(), set()
        self.constants = SimpleNamespace(HF_HUB_CACHE=str(folder))
        self.HfApi = lambda: SimpleNamespace(model_info=self.model_info)

    def model_info(self, repository, revision, files_metadata):
        self.revisions.add(revision)
        if not self.is_reachable:
            raise ConnectionError("no route\nand more")
        if repository not in FILES:
            raise LookupError(f"404: {repository}")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=self.size) for name in FILES[repository]])

    def try_to_load_from_cache(self, repository, file, revision):
        self.revisions.add(revision)
        return "path" if (repository, file) in self.fetched else None

    def snapshot_download(self, repository, revision, allow_patterns=None, local_files_only=False):
        self.revisions.add(revision)
        snapshot = self.folder / repository
        if local_files_only:
            if not snapshot.exists():
                raise FileNotFoundError(repository)
            return str(snapshot)
        for name in FILES[repository]:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                self.fetched.add((repository, name))
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                (snapshot / name).touch()
        return str(snapshot)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_a_repository_of_safetensors_is_a_directory_without_other_files(hub, tmp_path):
    assert from_hub("org/tiny") == tmp_path / "org/tiny"
    assert hub.fetched == {("org/tiny", name) for name in FILES["org/tiny"][:3]}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/tiny-GGUF", "tiny-Q4_K_M.gguf"),
        ("org/tiny-GGUF:q8_0", "tiny-Q8_0.gguf"),
        ("org/tiny-GGUF:F16", "tiny.f16.gguf"),
        ("org/one-GGUF", "one-iq3_xs.gguf"),
        ("org/odd-GGUF", "odd[1]-Q4_K_M.gguf"),
    ],
)
def test_one_file_of_a_repository_of_gguf_files_is_fetched(hub, tmp_path, name, file):
    repository = name.partition(":")[0]
    assert from_hub(name) == tmp_path / repository / file
    assert hub.fetched == {(repository, file)}


@pytest.mark.parametrize("quant", ["Q8_0", "f16"])
def test_the_encoder_of_images_is_fetched_with_the_model(hub, tmp_path, quant):
    for hub.is_reachable in (True, False):
        assert from_hub(f"org/seeing-GGUF:{quant}") == tmp_path / f"org/seeing-GGUF/seeing-{quant}.gguf"
    assert hub.fetched == {("org/seeing-GGUF", f"{kind}seeing-{quant}.gguf") for kind in ("", "mmproj-")}


def test_all_parts_of_a_split_model_are_fetched(hub, tmp_path):
    for hub.is_reachable in (True, False):
        first = tmp_path / "org/parts-GGUF/big/parts-Q8_0-00001-of-00003.gguf"
        assert from_hub("org/parts-GGUF:Q8_0") == first
    assert hub.fetched == {("org/parts-GGUF", name) for name in FILES["org/parts-GGUF"][:3]}
    assert find_model("org/parts-GGUF:Q8_0") == (first, "parts-Q8_0")


def test_the_encoder_above_the_directory_of_parts_is_fetched_and_found(hub, tmp_path):
    name = "org/seeing-parts-GGUF"
    first = tmp_path / name / "big/seeing-Q8_0-00001-of-00002.gguf"
    assert from_hub(f"{name}:Q8_0") == first
    assert hub.fetched == {(name, file) for file in FILES[name]}
    assert find_mmproj(first) == tmp_path / name / "mmproj-F16.gguf"


@pytest.mark.parametrize(
    ("name", "revision"),
    [("org/tiny@v1", "v1"), ("org/tiny@refs/pr/3", "refs/pr/3"), ("org/tiny-GGUF@0a1b:q8_0", "0a1b")],
)
def test_a_revision_is_asked_for_everywhere(hub, name, revision):
    for hub.is_reachable in (True, False):
        assert find_model(name)[0].exists()
    assert hub.revisions == {revision}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/tiny@", "is not a hub id"),
        ("org/tiny:", "is not a hub id"),
        ("org/tiny:q8_0@v1", "in this order"),
        (
            "org/tiny-GGUF:Q5_0",
            r"0 \.gguf files of Q5_0; its formats are F16, Q4_K_M, Q8_0\. Give one as org/tiny-GGUF:",
        ),
        ("org/tiny:Q4_K_M", "its formats are none"),
        ("org/split-GGUF", r"2 \.gguf files of Q4_K_M"),
        ("org/torn-GGUF", r"has no torn-Q8_0-00002-of-00003\.gguf, one of 3 files of a split model"),
        ("org/missing", "the hub reports: 404"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(hub, name, words):
    with pytest.raises(ModelError, match=words):
        from_hub(name)
    assert not hub.fetched


def test_without_a_network_the_cache_serves(hub, tmp_path):
    from_hub("org/tiny-GGUF:Q8_0")
    hub.is_reachable = False
    assert from_hub("org/tiny-GGUF:Q8_0") == tmp_path / "org/tiny-GGUF/tiny-Q8_0.gguf"
    with pytest.raises(ModelError, match=r"its formats are Q8_0"):
        from_hub("org/tiny-GGUF:Q4_K_M")


def test_without_a_network_and_cache_the_reason_is_one_line(hub):
    hub.is_reachable = False
    with pytest.raises(ModelError, match=r"org/tiny: the hub reports: no route\. Check .* known names are smollm2"):
        load_model("org/tiny")


def test_the_disk_is_checked_before_the_download(hub, monkeypatch):
    usage = SimpleNamespace(total=1000, used=850, free=150)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=r"300 bytes are needed and 150 are free in .* set HF_HOME"):
        from_hub("org/tiny")
    hub.fetched |= {("org/tiny", name) for name in FILES["org/tiny"][1:3]}  # 100 bytes are missing
    from_hub("org/tiny")


def test_a_hub_id_without_huggingface_hub_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"Install foreword\[hub\]"):
        load_model("org/model")
