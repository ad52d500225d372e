"""Packed weights in mapped files: the same numbers, and what happens to files, folders and processes that fail."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError, ModelError
from foreword.executors.native import NativeExecutor
from foreword.executors.packed import parts, store
from foreword.executors.packed.file import Part
from foreword.executors.packed.store import NotKeptError, PackedStore
from foreword.models import digests
from foreword.models.digests import Digests, model_key
from foreword.models.files import ModelFile
from foreword.models.loader import load_model
from foreword.native import available
from models.pooling_models import make_pooling
from models.recorded import TINY, make
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors, write_model

pytestmark = pytest.mark.skipif(not available(), reason="the native module is not built")

NAME = "qwen2"
FAMILIES = ("qwen2", "gemma3", "phi3", "starcoder2", "granite-moe-shared", "bamba", "qwen3_5-moe", "lfm2", "hrm-text")
"""Tied and separate heads, fused and single matrices, biases, experts, recurrent layers of each kind, layers that run
again.
"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
RECIPE = {"files": ["a"]}
PARTS = {"a": Part("x", np.arange(5000, dtype=np.uint8)), "b": Part("y", np.ones((3, 7), np.float32))}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of its own that keeps weights of any size; the folder of packed weights."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)
    monkeypatch.setattr(store, "_FREE_BYTES", 0)
    return tmp_path / "home" / "packed"


@pytest.fixture
def model(tmp_path):
    return make(tmp_path, NAME)


def files(folder, suffix=".weights"):
    return sorted(folder.glob(f"*{suffix}"))


def answer(model, **options):
    """Return what a new engine computes."""
    with LLM(str(model), num_blocks=64, **options) as llm:
        [output] = llm.generate([[1, 2, 3, 4, 5]], GREEDY, progress=False)
    completion = output.outputs[0]
    return completion.token_ids, [{i: entry.logprob for i, entry in at.items()} for at in completion.logprobs]


def quiet(model, **options):
    """The answer, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return answer(model, **options)


@contextmanager
def counted_packs(monkeypatch):
    """Counts the matrices that are packed from the model's file."""
    count, of_file = SimpleNamespace(packed=0), parts.source_of

    def source_of(tensor):
        count.packed += 1
        return of_file(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "source_of", source_of)
        yield count


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_mapped_weights_give_the_logits_of_packed_ones(tmp_path, monkeypatch, name, home):
    folder, texts = make(tmp_path, name), [TINY[name]["token_ids"][:6], [3, 1]]

    def logits(**options):
        monkeypatch.setitem(EXECUTORS, "native", lambda *a, **k: NativeExecutor(*a, **k, **options))
        return all_logits(load_model(folder), texts, whole(texts), "native", block_size=16)

    for options in ({}, {"weight_format": "int8", "kv_format": "int8"}):
        want = logits(weight_cache_bytes=0, **options)
        with counted_packs(monkeypatch) as first:
            found = logits(**options)
        with counted_packs(monkeypatch) as second:
            again = logits(**options)
        assert (first.packed > 0, second.packed) == (True, 0)
        for one, two, three in zip(want, found, again, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)
    assert len(files(home)) == 2


def test_many_greedy_requests_use_the_screen_of_the_file(model):
    """The first step that needs it makes it from integer weights, unless the file has it."""
    prompts, params = [[i, 2 * i, 7] for i in range(1, 9)], SamplingParams(temperature=0.0, max_tokens=8)
    tokens = []
    for options in ({"weight_cache_bytes": 0}, {}, {}):
        with LLM(str(model), num_blocks=64, weight_format="q4", **options) as llm:
            outputs = llm.generate(prompts, params, progress=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            size = llm.engine.executor.core.packed_bytes
    assert tokens[0] == tokens[1] == tokens[2]
    with LLM(str(model), num_blocks=64, weight_format="q4") as llm:
        assert llm.engine.executor.core.packed_bytes == size


def test_an_encoder_is_mapped_too(tmp_path, monkeypatch, home):
    folder, texts = make_pooling(tmp_path, "bert"), [[1, 2, 3], [4, 5]]

    def vectors(**options):
        with LLM(str(folder), **options) as llm:
            return np.stack(llm.embed(texts, progress=False))

    want = vectors(weight_cache_bytes=0)
    first = vectors()
    with counted_packs(monkeypatch) as second:
        np.testing.assert_array_equal(vectors(), want)
    np.testing.assert_array_equal(first, want)
    assert second.packed == 0
    assert len(files(home)) == 1


def test_files_belong_to_their_user_alone(model, home):
    quiet(model)
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in home.rglob("*") if path.is_file()} == {0o600}
    assert not files(home, ".tmp")


def test_nothing_is_kept_without_a_quota(model, home):
    assert quiet(model, weight_cache_bytes=0) == quiet(model, weight_cache_bytes=0)
    assert not home.exists()
    with pytest.raises(ConfigError, match="weight_cache_bytes=-1"):
        LLM(str(model), weight_cache_bytes=-1)


def test_small_weights_are_not_kept(model, home, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_BYTES", 16 << 20)
    quiet(model)
    assert not home.exists()


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_changed_model_is_packed_again(model, home, keep_time):
    old = quiet(model)
    path, tiny = model / "model.safetensors", TINY[NAME]
    before = path.stat()
    write_model(model, tiny["config"], random_tensors(tiny["shapes"], seed=1))
    if keep_time:  # the time of a change of the file's state cannot be set
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    new = quiet(model)
    assert new == quiet(model, weight_cache_bytes=0) != old
    assert len(files(home)) == 2


def test_another_configuration_is_packed_again(model, home):
    quiet(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert quiet(model) == quiet(model, weight_cache_bytes=0)
    assert len(files(home)) == 2


def test_an_equal_file_elsewhere_is_mapped(model, tmp_path, monkeypatch, home):
    quiet(model)
    with counted_packs(monkeypatch) as packs:
        quiet(shutil.copytree(model, tmp_path / "copy"))
    assert packs.packed == 0
    assert len(files(home)) == 1


def damage(kind, path):
    data = bytearray(path.read_bytes())
    match kind:
        case "empty":
            data = bytearray()
        case "truncated":
            del data[len(data) // 2 :]
        case "one bit":
            data[len(data) // 2] ^= 1
        case "header":
            data[60] ^= 1
        case "length of the header":
            data[8:16] = b"\xff" * 8
        case "text":
            data = bytearray(b"hello\n" * 100)
        case "longer":
            data += bytes(64)
    path.write_bytes(data)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["empty", "truncated", "one bit", "header", "length of the header", "text", "longer"])
def test_a_damaged_file_is_packed_again_with_one_warning(model, home, kind):
    want = quiet(model)
    [path] = files(home)
    whole_file = path.read_bytes()
    damage(kind, path)
    with pytest.warns(UserWarning, match="is damaged") as shown:
        assert answer(model) == want
    assert len(shown) == 1
    assert path.read_bytes() == whole_file
    assert quiet(model) == want


def test_a_file_of_another_recipe_is_not_used(model, tmp_path, home):
    want = quiet(model)
    [path] = files(home)
    tiny = TINY[NAME]
    other = write_model(tmp_path / "other", tiny["config"], random_tensors(tiny["shapes"], seed=1))
    quiet(other)
    [foreign] = set(files(home)) - {path}
    path.write_bytes(foreign.read_bytes())
    with pytest.warns(UserWarning, match="follows from something else"):
        assert answer(model) == want


def test_a_folder_that_others_may_write_to_is_not_used(model, home):
    home.mkdir(parents=True)
    home.chmod(0o770)
    with pytest.warns(UserWarning, match="not kept: .* others may write to it") as shown:
        found = answer(model)
    assert len(shown) == 1
    assert found == quiet(model, weight_cache_bytes=0)
    assert not files(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the system's user can give a file to another one")
def test_a_file_of_another_user_is_not_used(model, home):
    want = quiet(model)
    [path] = files(home)
    os.chown(path, 12345, -1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert answer(model) == want
    assert path.exists()


def test_a_symbolic_link_is_not_used(model, home, tmp_path):
    want = quiet(model)
    [path] = files(home)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert answer(model) == want


def test_a_home_that_cannot_be_written_costs_one_warning(model, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", "/proc/nothing")
    with pytest.warns(UserWarning, match="not kept: /proc/nothing/packed cannot be written") as shown:
        found = answer(model)
    assert len(shown) == 1
    assert found == quiet(model, weight_cache_bytes=0)


def test_a_disk_that_is_full_while_writing_costs_one_warning(model, home, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "write_parts", full)
    with pytest.warns(UserWarning, match="No space left on device") as shown:
        found = answer(model)
    assert len(shown) == 1
    assert found == quiet(model, weight_cache_bytes=0)
    assert not files(home) + files(home, ".tmp")


def test_a_disk_without_room_is_not_filled(model, home, monkeypatch):
    monkeypatch.setattr(store, "_FREE_BYTES", 1 << 60)
    with pytest.warns(UserWarning, match="to spare, are needed"):
        answer(model)
    assert not files(home) + files(home, ".tmp")


def test_a_disk_without_room_loses_the_files_that_were_not_used_for_longest(home, monkeypatch):
    own, recipes = PackedStore(1 << 20), [{"files": [name]} for name in "abcd"]
    for age, recipe in zip((3, 2, 1), recipes, strict=False):
        written(own, recipe)
        os.utime(own._path(recipe).with_suffix(".checked"), (time.time() - age, time.time() - age))
    size = own.entries()[0].size
    in_all = 3 * size + 100  # bytes of a disk with these files, and room for none
    monkeypatch.setattr(own, "_num_free", lambda: in_all - sum(entry.size for entry in own.entries()))
    with pytest.raises(NotKeptError, match="are free in"), own.writing(recipes[3], 4 * size):
        pass
    assert len(own.entries()) == 3
    assert written(own, recipes[3])
    assert [own.find(recipe) is not None for recipe in recipes] == [False, True, True, True]


def test_a_module_that_replaced_the_loaded_one_names_no_packed_weights(model, home, monkeypatch):
    want = quiet(model, weight_cache_bytes=0)
    monkeypatch.setattr(digests, "NATIVE_FILE", os.stat(model))
    with pytest.warns(UserWarning, match="was replaced since this process started"):
        assert answer(model) == want
    assert not files(home)
    with pytest.raises(ModelError, match="was replaced since this process started"):
        answer(model, weight_cache_bytes=0, cache_dir=str(home.parent / "blocks"))


def test_the_first_start_reads_a_model_once_for_packed_weights_and_blocks_on_disk(model, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_YOUNG", 0)
    digest_of, read = ModelFile.sha256, []

    def counted(file):
        read.append(file.path.name)
        return digest_of(file)

    monkeypatch.setattr(ModelFile, "sha256", counted)
    first = quiet(model, cache_dir=str(tmp_path / "blocks"))
    assert read.count("model.safetensors") == 1
    read.clear()
    assert quiet(model, cache_dir=str(tmp_path / "other")) == first
    assert read == []
    (model / "model.safetensors").touch()
    assert quiet(model, cache_dir=str(tmp_path / "blocks")) == first
    assert read == ["model.safetensors"]


def test_digests_in_a_folder_that_others_may_write_to_are_not_used(model, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_YOUNG", 0)
    file = ModelFile(model / "model.safetensors", 0)
    right = Digests().sha256_of(file)
    [record] = Digests().folder.iterdir()
    record.write_text("0" * 64)
    assert Digests().sha256_of(file) == "0" * 64
    Digests().folder.chmod(0o777)
    assert Digests().sha256_of(file) == right
    os.utime(record, (1, 1))
    Digests().prune()
    assert not list(Digests().folder.iterdir())


@pytest.mark.parametrize("damage", [b"\0" * 64, b"\xff" * 64, b"", b"0" * 63 + b"\n"])
def test_a_record_that_is_not_a_digest_is_made_anew(model, monkeypatch, damage):
    monkeypatch.setattr(digests, "_YOUNG", 0)
    file = ModelFile(model / "model.safetensors", 0)
    right = Digests().sha256_of(file)
    [record] = Digests().folder.iterdir()
    record.write_bytes(damage)
    assert Digests().sha256_of(file) == right
    assert record.read_text() == right


def written(own, recipe=RECIPE, values=PARTS):
    """Keep parts as a process would, and return whether this one wrote them."""
    if own.find(recipe) is not None:
        return False
    with own.writing(recipe, 1) as out:
        if out is not None:
            own.keep(out, recipe, values)
    return out is not None


def in_child(run):
    """Run a function in a forked process; its number."""
    if child := os.fork():
        return child
    try:
        run()
    finally:
        os._exit(3)


def assert_whole(own):
    found = own.find(RECIPE)
    for name, part in PARTS.items():
        np.testing.assert_array_equal(found.array(name, part.form), part.array)
    assert not files(own.folder, ".tmp")


def test_a_size_limit_of_files_leaves_nothing_behind(home):
    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            written(PackedStore(1 << 20))
        except NotKeptError as error:
            os._exit(0 if "File too large" in str(error) else 1)

    assert os.waitpid(in_child(run), 0)[1] == 0
    assert not files(home) + files(home, ".tmp")


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_writer_that_is_killed_leaves_a_whole_file_or_none(monkeypatch, calls):
    """Before it writes, before the file is on the disk, before its name is, and before its check is noted."""
    own, left = PackedStore(1 << 20), [calls]

    def killed_at(call):
        def run(*arguments):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        return run

    def run():
        monkeypatch.setattr(store, "write_parts", killed_at(store.write_parts))
        monkeypatch.setattr(os, "fsync", killed_at(os.fsync))
        monkeypatch.setattr(store, "write_private", killed_at(store.write_private))
        written(own)

    assert os.waitpid(in_child(run), 0)[1] == signal.SIGKILL
    found = own.find(RECIPE)
    assert (found is not None) == (calls > 2)
    assert written(own) == (found is None)
    assert_whole(own)


def test_a_file_that_is_half_written_is_written_anew(home):
    own = PackedStore(1 << 20)

    def run():
        with own.writing(RECIPE, 1) as out:
            out.write(bytes(777))
            out.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(run), 0)
    [left] = files(home, ".tmp")
    assert left.stat().st_size == 777
    assert written(own)
    assert_whole(own)


def test_of_processes_that_write_at_once_one_writes():
    own, start = PackedStore(1 << 20), time.monotonic() + 0.2

    def run():
        time.sleep(max(0.0, start - time.monotonic()))
        os._exit(10 + written(own))

    children = [in_child(run) for _ in range(6)]
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes == [10] * 5 + [11]
    assert_whole(own)


def test_a_process_that_writes_for_too_long_is_not_waited_for(monkeypatch):
    own = PackedStore(1 << 20)
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    with own.writing(RECIPE, 1), pytest.raises(NotKeptError, match="has been writing"):
        written(own)


def test_the_least_recently_used_goes_when_the_quota_is_full():
    own = PackedStore(3 * 6000)
    recipes = [{"files": [name]} for name in "abcd"]
    for age, recipe in zip((3, 2, 1), recipes, strict=False):
        written(own, recipe)
        os.utime(own._path(recipe).with_suffix(".checked"), (time.time() - age, time.time() - age))
    mapped = own.find(recipes[1])
    assert own.find(recipes[0]) is not None  # the oldest is used again
    os.utime(own._path(recipes[1]).with_suffix(".checked"), (1, 1))
    written(own, recipes[3])
    assert [own.find(recipe) is not None for recipe in recipes] == [True, False, True, True]
    np.testing.assert_array_equal(mapped.array("a", "x"), PARTS["a"].array)  # as long as it is used
    assert sum(entry.size for entry in own.entries()) <= own.quota
    with pytest.raises(NotKeptError, match="more than weight_cache_bytes = 100"):
        written(PackedStore(100), {"files": ["e"]})
    kept = sum(entry.size for entry in own.entries())
    assert own.prune(0) == kept > 0
    assert not own.entries()


def test_a_part_of_another_form_is_an_error():
    own = PackedStore(1 << 20)
    written(own)
    with pytest.raises(Exception, match="part 'a' is 'x', 'z' expected"):
        own.find(RECIPE).array("a", "z")
    with pytest.raises(ValueError, match="read-only"):
        own.find(RECIPE).array("a", "x")[0] = 1


SHARING = """
import sys
from foreword.engine.build import build_engine, load
from foreword import LLM, SamplingParams

def pss():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))

def told(value):
    print(value, flush=True)
    sys.stdin.readline()

told("imported")
before = pss()
told("measured")
llm = LLM(sys.argv[1], num_blocks=64, num_threads=1, max_num_seqs=4, max_num_batched_tokens=64)
[output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4), progress=False)
tokens = output.outputs[0].token_ids
told("made")
print(1024 * (pss() - before), tokens, flush=True)
told("done")
"""


@pytest.mark.long
def test_processes_share_the_memory_of_weights(tmp_path, home):
    """Three that start at once, of which one packs: together they take less than one and a half times the weights."""
    config = TINY["mistral"]["config"] | {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "num_hidden_layers": 3,
    }  # fmt: skip
    d, inner, kv = 1024, 4096, 256
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for i in range(3):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)}
        shapes |= {p + f"self_attn.{n}_proj.weight": (d if n == "q" else kv, d) for n in "qkv"}
        shapes |= {p + "self_attn.o_proj.weight": (d, d), p + "mlp.down_proj.weight": (d, inner)}
        shapes |= {p + f"mlp.{n}_proj.weight": (inner, d) for n in ("gate", "up")}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    rng = np.random.default_rng(0)
    tensors = {name: (rng.random(shape, np.float32) * 0.05 - 0.025).astype("<f2") for name, shape in shapes.items()}
    model = write_model(tmp_path / "model", config, tensors)
    command = [sys.executable, "-c", SHARING, str(model)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        for stage in ("imported", "measured", "made"):
            assert [process.stdout.readline() for process in processes] == [f"{stage}\n"] * 3
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
        found = [process.stdout.readline().split(maxsplit=1) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    [path] = files(home)
    assert len({tokens for _, tokens in found}) == 1
    assert path.stat().st_size > 70e6
    assert sum(int(size) for size, _ in found) < 1.5 * path.stat().st_size


@pytest.mark.parametrize("refused", ["utime", "open", "mkdir"])
def test_a_folder_of_digests_that_cannot_be_read_or_written_costs_only_time(model, monkeypatch, refused):
    monkeypatch.setattr(digests, "_YOUNG", 0)
    file = ModelFile(model / "model.safetensors", 0)
    right = Digests().sha256_of(file)
    if refused == "mkdir":
        shutil.rmtree(Digests().folder)

    def deny(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, deny)
        assert Digests().sha256_of(file) == right
    assert Digests().sha256_of(file) == right


def test_a_pipe_in_place_of_a_file_is_not_waited_for(model, monkeypatch):
    monkeypatch.setattr(digests, "_YOUNG", 0)
    file = ModelFile(model / "model.safetensors", 0)
    right = Digests().sha256_of(file)
    [record] = Digests().folder.iterdir()
    for pipe in (record, record.with_name(f"{record.name}.{os.getpid()}")):  # the second one is that of a new record
        record.unlink()
        os.mkfifo(pipe)
        assert Digests().sha256_of(file) == right
    os.mkfifo(model / "pipe.json")
    with pytest.raises(ModelError, match=r"pipe.json: cannot be read \(not a regular file\)"):
        model_key(model)
