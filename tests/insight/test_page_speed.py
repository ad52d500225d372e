"""The page of 10,000 steps in a browser stays fluid; a test of minutes that `make browser` runs."""

import time

import pytest
from recordings import record

from browser import browser, tab
from foreword.insight.page import write_page

NUM_STEPS = 10_000
ACTS = {
    "next step": (50, 60, "() => go(at + 1)"),
    "any step": (20, 200, "k => go(Math.floor(Math.abs(Math.sin(k * 7.1)) * (steps.number.length - 1)))"),
    "token": (50, 20, "k => { token = k % data.tensors.num_tokens; light(); }"),
    "scroll": (30, 40, "async () => { views.all.box.scrollTop += 240; await new Promise(requestAnimationFrame); }"),
}
"""The number of times that an act is done, and the milliseconds that it may take of the page's thread, on average."""


def busy(session) -> float:
    """CPU seconds of the page's thread so far."""
    found = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in found if metric["name"] == "TaskDuration")


@pytest.mark.parametrize("rows", [5, 64])
def test_ten_thousand_steps_stay_fluid(tmp_path, rows, capsys):
    with browser() as started, tab(started, viewport={"width": 1280, "height": 900}) as page:
        report = write_page(record(tmp_path / "steps.jsonl", NUM_STEPS, rows=rows), tmp_path / "steps.html")
        begin = time.perf_counter()
        page.goto(f"file://{tmp_path}/steps.html#step={NUM_STEPS // 2}")
        page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
        loaded = time.perf_counter() - begin
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        found = {}
        for name, (count, _, act) in ACTS.items():
            before = busy(session)
            page.evaluate(f"async () => {{ for (let k = 0; k < {count}; k++) await ({act})(k); }}")
            found[name] = 1e3 * (busy(session) - before) / count
    with capsys.disabled():
        shown = ", ".join(f"{name} {ms:.1f}" for name, ms in found.items())
        print(f"\n{rows} rows: {report}, shown after {loaded:.2f} s; CPU milliseconds: {shown}")
    assert report.num_steps == NUM_STEPS
    assert loaded < 10
    assert {name: ms for name, ms in found.items() if ms > ACTS[name][1]} == {}
