"""`benchmarks/peers/run.py`: its rows, and what it says without running an engine."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def peers(monkeypatch):
    """Import a program of the directory; its modules have short names, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(PEERS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(PEERS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def told(peers, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        peers("run").main()
    return f"{end.value.code}\n{capsys.readouterr().err}"


def test_without_results_the_missing_file_is_named_and_nothing_is_made(peers, monkeypatch, capsys, tmp_path):
    message = told(peers, monkeypatch, capsys, "--peers", tmp_path, "--table-only", "--gguf", "qwen-q4_0.gguf")
    assert f"{tmp_path}/results/qwen-q4_0.jsonl: no row has a result" in message
    assert not list(tmp_path.iterdir())


def test_wrong_arguments_are_named_before_anything_is_installed(peers, monkeypatch, capsys, tmp_path):
    for arguments, message in (
        (("--workloads", "W1,W0"), "--workloads: W0 not among W1, W2"),
        (("--gguf", "none.gguf"), "--gguf none.gguf: there is no such file"),
        (("--only", "none"), "--only none: choose among foreword:auto"),
    ):
        assert message in told(peers, monkeypatch, capsys, "--peers", tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "q4_1"),
        ("qwen2.5-0.5b-instruct-q4_k_m", "q4_k_m"),
        ("a-Q8_0", "q8_0"),
        ("model_IQ4_XS", "iq4_xs"),
        ("gpt-oss-20b-mxfp4", "mxfp4"),
        ("qwen2", "file"),
    ],
)
def test_rows_of_the_file_have_its_number_format(peers, name, weights):
    rows = [row for row in peers("run").rows_of(name) if row.peer == "llama_cpp"]
    assert [row.weights for row in rows if not row.form] == [weights]
    assert len({row.weights for row in rows}) == len(rows)


def test_contexts_of_many_sequences_do_not_have_room_for_a_long_prompt_each(peers):
    batches = peers("llama_batches")

    class Batches(batches.LlamaBatches):
        new_context = clear = remove = None

    api = SimpleNamespace(llama_batch_init=lambda *_: None)
    one = Batches(api, 10, 8192)
    assert [one.sized(SimpleNamespace(), n, 2).n_ctx for n in (1, 64)] == [8192, 64 * 2304]


def test_the_table_shows_the_best_of_each_workload(peers, tmp_path, capsys):
    common = '{"engine": "e", "version": "1", "weights": "w", "load_s": 1.0, "peak_mb": 5'
    lines = [f'{common}, "workload": "W8", "prompt_tok_s": {rate}}}' for rate in (10.0, 20.0)]
    (tmp_path / "r.jsonl").write_text("\n".join([*lines, f'{common}, "workload": "W7", "skipped": "no"}}']))
    peers("table").print_table(tmp_path / "r.jsonl")
    head, _, row, reason = capsys.readouterr().out.splitlines()
    cells = dict(zip(*([one.strip() for one in line.split("|")] for line in (head, row)), strict=True))
    assert (cells["W8 prefill"], cells["W9 prefill"], cells["MB, all"]) == ("20", "–", "5")
    assert reason == "e, W7: no."
