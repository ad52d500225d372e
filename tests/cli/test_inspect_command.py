"""`foreword inspect`: its options."""

import pytest
from trace_lives import Life


def recording(tmp_path, **header):
    Life(tmp_path / "steps.jsonl", 1, tensors=False, **header).run(3)
    return tmp_path / "steps.jsonl"


@pytest.mark.parametrize("how", ["hashed", "omitted"])
def test_texts_of_tokens_that_are_not_in_the_trace_are_refused(run_here, tmp_path, how):
    trace = recording(tmp_path, token_ids=how)
    status, _, error = run_here("inspect", trace, "-o", tmp_path / "page.html", "--model", "x")
    assert status == 2
    assert f"are {how}, so they have no texts" in error


def test_texts_of_tokens_are_for_the_page(run_here, tmp_path):
    trace = recording(tmp_path)
    status, _, error = run_here("inspect", trace, "--perfetto", tmp_path / "steps.json", "--model", "x")
    assert status == 2
    assert "is for the page: give --out too" in error


def test_a_cut_file_is_shown_up_to_the_damage_with_status_1(run_here, tmp_path):
    trace = recording(tmp_path)
    trace.write_bytes(trace.read_bytes()[:-20])
    status, output, error = run_here("inspect", trace, "-o", tmp_path / "page.html")
    assert status == 1
    assert "steps, " in output
    assert f"{trace}, line" in error
    assert "what comes before it is shown" in error
    assert (tmp_path / "page.html").stat().st_size > 1000
