"""The page of 10,000 steps in a browser stays fluid; a test of minutes that `make browser` runs."""

import time

import pytest
from recordings import record

from browser import browser, tab
from foreword.insight.page import write_page

NUM_STEPS = 10_000
LIMITS = {"load": 5000.0, "next": 100.0, "jump": 300.0, "scroll": 100.0, "hover": 50.0}
"""Milliseconds: the median of each, at most. A frame of a step takes a tenth of that on an idle machine."""
MEASURE = """async () => {
  const frame = () => new Promise(done => requestAnimationFrame(done)), last = steps.number.length - 1;
  const timed = async (count, act) => {
    const times = [];
    for (let k = 0; k < count; k++) {
      const start = performance.now();
      await act(k);
      times.push(performance.now() - start);
    }
    return times.sort((a, b) => a - b);
  };
  const found = {};
  await go(last >> 1);
  found.next = await timed(100, () => go(at + 1));
  found.jump = await timed(40, k => go(Math.floor(Math.abs(Math.sin(k * 7.1)) * last)));
  await frame();
  found.scroll = await timed(60, async () => { views.all.box.scrollTop += 240; await frame(); });
  found.hover = await timed(50, k => { token = k % data.tensors.num_tokens; light(); });
  return found;
}"""


@pytest.mark.parametrize("rows", [5, 64])
def test_ten_thousand_steps_stay_fluid(tmp_path, rows, capsys):
    with browser() as started, tab(started, viewport={"width": 1280, "height": 900}) as page:
        trace = record(tmp_path / "steps.jsonl", NUM_STEPS, rows=rows)
        begin = time.perf_counter()
        report = write_page(trace, tmp_path / "steps.html")
        written = time.perf_counter() - begin
        begin = time.perf_counter()
        page.goto(f"file://{tmp_path}/steps.html")
        page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
        found = {"load": [1e3 * (time.perf_counter() - begin)], **page.evaluate(MEASURE)}
    middle = {name: times[len(times) // 2] for name, times in found.items()}
    most = {name: times[int(0.95 * (len(times) - 1))] for name, times in found.items()}
    with capsys.disabled():
        shown = ", ".join(f"{name} {middle[name]:.1f} (95 %: {most[name]:.1f})" for name in found)
        print(f"\n{rows} rows: {report}, written in {written:.1f} s; milliseconds: {shown}")
    assert report.num_steps == NUM_STEPS
    assert {name: ms for name, ms in middle.items() if ms > LIMITS[name]} == {}
