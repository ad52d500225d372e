"""Models that are split into several GGUF files: the same weights as of one file, and an error for each wrong part."""

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.digests import model_key
from foreword.models.gguf_files import files_at
from foreword.models.gguf_names import models_among, part_names, whole_name
from foreword.models.loader import find_model, load_model
from models import gguf_models, gguf_writer
from models.recorded import TINY
from models.tiny import random_tensors

NAMES = [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def contents(tmp_path, monkeypatch):
    """The metadata and tensors of a model in one file, tiny.gguf."""
    kept = []
    of_writer = gguf_writer.write
    monkeypatch.setattr(gguf_writer, "write", lambda path, *given, **options: kept.append(given))
    gguf_models.write(tmp_path / "tiny.gguf", TINY["llama3"]["config"], random_tensors(TINY["llama3"]["shapes"]))
    monkeypatch.undo()
    of_writer(tmp_path / "tiny.gguf", *kept[0])
    return kept[0]


def split(folder, contents, *, count=3, total=None, numbers=(0, 1, 2)):
    """Write three parts, as llama.cpp does with --no-tensor-first-split."""
    folder.mkdir()
    metadata, tensors = contents
    names = list(tensors)
    parts = [], names[: len(names) // 2], names[len(names) // 2 :]
    for i, (name, part) in enumerate(zip(NAMES, parts, strict=True)):
        own = {"split.no": ("u16", numbers[i]), "split.count": ("u16", count)}
        own["split.tensors.count"] = ("i32", len(names) if total is None else total)
        gguf_writer.write(folder / name, {**(metadata if i == 0 else {}), **own}, {key: tensors[key] for key in part})
    return folder


@pytest.mark.parametrize("given", ["", *NAMES])
def test_a_split_model_is_the_model_of_one_file(tmp_path, contents, given):
    path = split(tmp_path / "parts", contents) / given
    model, want = load_model(path), load_model(tmp_path / "tiny.gguf")
    assert model.spec == want.spec
    assert model.path == (tmp_path / "parts" / given if given else tmp_path / "parts" / NAMES[0])
    assert model.name == "tiny"
    assert model.weights.keys() == want.weights.keys()
    for name, tensor in want.weights.items():
        np.testing.assert_array_equal(model.weights[name].dequantize(), tensor.dequantize())
    assert [file.path.name for file in model.weights.files] == NAMES


def test_a_missing_part_is_named(tmp_path, contents):
    folder = split(tmp_path / "parts", contents)
    (folder / NAMES[1]).unlink()
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf: is missing, one of 3 files .* Fetch all of them"):
        load_model(folder / NAMES[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"numbers": (0, 2, 1)}, r"tiny-00002-of-00003\.gguf: is not part 2 of this model"),
        ({"count": 2}, r"is one of 2 files .* its name does not say so\. Give the files the names"),
        ({"total": 99}, r"\d+ of 99 tensors are in its 3 files\. Fetch all of them again"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(tmp_path, contents, changes, reason):
    folder = split(tmp_path / "parts", contents, **changes)
    with pytest.raises(ModelError, match=reason):
        load_model(folder / NAMES[0])


def test_parts_of_two_models_are_refused(tmp_path, contents):
    folder = split(tmp_path / "parts", contents)
    other = split(tmp_path / "others", contents)
    second = (other / NAMES[1]).read_bytes().replace(b"split.no", b"split.mo")
    (folder / NAMES[1]).write_bytes(second)
    with pytest.raises(ModelError, match=r"metadata split\.no is missing"):
        load_model(folder / NAMES[0])
    third = dict(list(contents[1].items())[-1:])
    own = {"split.no": ("u16", 1), "split.count": ("u16", 3), "split.tensors.count": ("i32", len(contents[1]))}
    gguf_writer.write(folder / NAMES[1], own, third)
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003\.gguf: is not part 3 of this model"):
        load_model(folder / NAMES[0])


def test_a_part_whose_number_is_not_one_of_the_model_is_refused(tmp_path, contents):
    """Other files would be read in place of the one that was given."""
    folder = split(tmp_path / "parts", contents)
    for number in ("00000", "00004"):
        other = (folder / NAMES[0]).rename(folder / f"tiny-{number}-of-00003.gguf")
        with pytest.raises(ModelError, match=rf"{other.name}: is one of 3 files .* its name does not say so"):
            load_model(other)
        other.rename(folder / NAMES[0])


def test_a_directory_without_the_first_part_names_it(tmp_path, contents):
    folder = split(tmp_path / "parts", contents)
    (folder / NAMES[0]).unlink()
    with pytest.raises(ModelError, match=r"tiny-00001-of-00003\.gguf: is missing, one of 3 files"):
        load_model(folder)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_blocks_on_disk_are_of_all_parts(tmp_path, contents, part):
    folder = split(tmp_path / "parts", contents)
    before = {model_key(folder / name) for name in NAMES}
    changed = (folder / NAMES[part]).read_bytes()
    (folder / NAMES[part]).write_bytes(changed[:-1] + bytes([changed[-1] ^ 1]))
    assert len(before) == 1
    assert model_key(folder / NAMES[0]) not in before


def test_names_of_files(tmp_path):
    assert [whole_name(name) for name in ("a-00002-of-00003.gguf", "a.gguf")] == ["a.gguf", "a.gguf"]
    assert part_names("x/a-00002-of-00002.gguf") == ["x/a-00001-of-00002.gguf", "x/a-00002-of-00002.gguf"]
    assert part_names("a-00000-of-00000.gguf") == ["a-00000-of-00000.gguf"]
    parts = [f"a-0000{i}-of-00003.gguf" for i in (3, 2)]
    assert models_among(["b.gguf", "mmproj-b.gguf", *parts, "a.gguf", "c.txt"]) == [parts[1], "a.gguf", "b.gguf"]
    for other in ("a-00001-of-0000\u0662.gguf", "a-00001-of-00002.gguf\n"):
        assert (whole_name(other), part_names(other)) == (other, [other])
    for name in NAMES:
        (tmp_path / name).write_bytes(b"")
    assert [file.name for file in files_at(tmp_path / NAMES[2])] == NAMES
    assert find_model(tmp_path / NAMES[1]) == (tmp_path / NAMES[1], "tiny")
