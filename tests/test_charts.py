"""Charts and tables show every value, and no text that they are given is read as markup."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.charts import BOTTOM, TOP, Bars, Lines, svg, ticks, write_chart
from foreword.errors import ConfigError
from foreword.markup import table

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("most", [1e-9, 0.3, 1, 3.7, 10, 99.9, 1e4, 7.3e8])
def test_ticks_are_few_and_reach_the_largest_value(most):
    found = ticks(most)
    assert found[0] == 0
    assert found[-1] >= most * (1 - 1e-9)
    assert found[-2] < most
    assert 3 <= len(found) <= 6
    assert np.diff(found) == pytest.approx([found[1]] * (len(found) - 1))


@pytest.mark.parametrize("most", [0.0, math.nan, math.inf, -1.0])
def test_values_without_a_scale_have_one_all_the_same(most):
    assert ticks(most) == [0.0, 1.0]


def test_the_height_of_a_bar_is_its_value():
    values = {"a": [1.0, 4.0], "b": [2.0, math.nan]}
    root = ElementTree.fromstring(svg("t", [Bars("title", "ms", ["x", "y"], values)]))
    bars = [rect for rect in root.iter(f"{NAMESPACE}rect") if rect.find(f"{NAMESPACE}title") is not None]
    heights = {rect.find(f"{NAMESPACE}title").text: float(rect.get("height")) for rect in bars}
    whole = BOTTOM - TOP
    assert heights == {
        "a, x: 1 ms": pytest.approx(whole / 4, abs=0.1),
        "b, x: 2 ms": pytest.approx(whole / 2, abs=0.1),
        "a, y: 4 ms": pytest.approx(whole, abs=0.1),
    }


def test_a_line_goes_through_its_points():
    root = ElementTree.fromstring(svg("t", [Lines("use", "%", "s", {"a": [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)]})]))
    (line,) = root.iter(f"{NAMESPACE}polyline")
    points = np.array([[float(x) for x in point.split(",")] for point in line.get("points").split()])
    assert np.diff(points[:, 0]).tolist() == pytest.approx([np.diff(points[:, 0])[0]] * 2)
    assert points[:, 1].tolist() == pytest.approx([BOTTOM, (BOTTOM + TOP) / 2, TOP])


@pytest.mark.parametrize("name", ["a.svg", "a.html"])
def test_texts_are_not_markup_and_nothing_is_loaded(tmp_path, name):
    evil = "</svg><script>alert(1)</script>&"
    write_chart(tmp_path / name, evil, [Bars(evil, evil, [evil], {evil: [1.0], "b": [2.0]})])
    text = (tmp_path / name).read_text()
    assert "<script" not in text
    assert not re.search(r"(href|src)=|url\(|@import", text)


def test_other_endings_and_places_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must end with \.svg or \.html"):
        write_chart(tmp_path / "a.png", "t", [])
    with pytest.raises(ConfigError, match="cannot be written"):
        write_chart(tmp_path / "missing" / "a.svg", "t", [])


def test_a_batch_and_its_explanation_are_tables_in_a_notebook():
    states = RequestStates(max_num_reqs=4, max_model_len=16, vocab_size=99, kv_groups=[KVGroup(4)])
    states.add_request(NewRequest("<b>", [1, 2, 3], [[1]]))
    states.add_request(NewRequest("q", [4, 5], [[2]]))
    batch = prepare_inputs(states, {"<b>": 3, "q": 2}, InputBuffers.for_states(states, 16))
    root = ElementTree.fromstring(batch._repr_html_())
    rows = [[cell.text for cell in row] for row in root.iter("tr")][1:]
    assert rows == [["<b>", "3", "0", "3", "True", "0", "0"], ["q", "2", "0", "2", "True", "3", "0"]]
    assert ElementTree.fromstring(batch.explain()._repr_html_()).text == str(batch.explain())


def test_an_output_is_a_table_in_a_notebook(talker):
    with LLM(talker) as llm:
        (output,) = llm.generate("a <i>", SamplingParams(temperature=0.0, max_tokens=4))
    root = ElementTree.fromstring(output._repr_html_())
    assert "reused 0 of" in root.find("caption").text
    rows = [[cell.text or "" for cell in row] for row in root.iter("tr")][1:]
    assert rows[0][:2] == ["prompt", "a <i>"]
    assert rows[1] == ["output 0", output.text, "4", "length"]


def test_a_long_table_ends_with_the_number_of_the_other_rows():
    root = ElementTree.fromstring(table("many", ["n"], ([n] for n in range(1000))))
    assert [row[0].text for row in root.iter("tr")][-1] == "and 800 more"
