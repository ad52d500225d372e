"""The page of a recording in a browser: what it shows is what the trace says, and its interaction."""

import pytest
from recordings import record, record_ranges

from browser import browser, tab
from foreword.batch import attention_mask
from foreword.insight import Replay, Step, Trace
from foreword.insight.page import write_page

SPECULATIVE, SIZES = 40, {"desk": (1280, 900), "phone": (390, 844)}


CONTRAST = """() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(v => v / 255)
      .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const back = light(getComputedStyle(document.body).backgroundColor);
  return ["body", ".soft", "#waits"].map(name => {
    const text = light(getComputedStyle(document.querySelector(name)).color);
    return (Math.max(back, text) + .05) / (Math.min(back, text) + .05);
  });
}"""
"""The contrast of texts with the page, as WCAG 2 defines it."""
MASK = """([groups, n, keys]) => {
  const canvas = document.getElementById("mask"), pen = canvas.getContext("2d"), side = 14;
  const panel = getComputedStyle(document.documentElement).getPropertyValue("--panel").trim();
  const same = (x, y) => "#" + [...pen.getImageData(x, y, 1, 1).data.slice(0, 3)]
    .map(v => v.toString(16).padStart(2, "0")).join("") === panel;
  return Array.from({length: groups}, (_, g) => Array.from({length: n}, (_, i) => Array.from({length: keys}, (_, j) =>
    !same(j * side + side / 2, g * (n * side + 8) + i * side + side / 2))));
}"""
"""Whether each key of each token of the mask is drawn as read, by KV group."""


@pytest.fixture(scope="module")
def started():
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A trace with drafts, waiting requests and shared blocks, and its page."""
    folder = tmp_path_factory.mktemp("pages")
    trace = record(folder / "steps.jsonl", SPECULATIVE, drafts=3)
    write_page(trace, folder / "steps.html", text_of=lambda token: f"w{token}")
    return trace, folder / "steps.html"


@pytest.fixture
def page(started, files):
    with tab(started, viewport={"width": 1280, "height": 900}, bypass_csp=True) as one:  # waits are evaluated
        show(one, files[1])
        yield one
        assert not one.errors


def show(page, path, link=""):
    page.goto("about:blank")
    page.goto(f"file://{path}{link}")
    page.wait_for_selector("html[data-ready=yes]")


def batches(path):
    """Each step of a trace as (its events so far, batch)."""
    trace = Trace.read(path)
    replay = Replay(trace.header, backend="loops")
    for event in trace.events:
        batch = replay.apply(event)
        if isinstance(event, Step):
            yield batch


def table(page, name):
    """The shown rows of a table, as {column: text}."""
    return page.evaluate(
        """name => { const names = [...document.querySelectorAll(`#${name} th`)].map(th => th.textContent);
        return [...document.querySelectorAll(`#${name} tr[data-row]`)].map(tr =>
          Object.fromEntries([...tr.children].map((td, i) => [names[i], td.textContent.trim()]))); }""",
        name,
    )


def step_of(page):
    return page.text_content("#step")


@pytest.mark.parametrize("step", [1, 12, 30])
def test_tables_show_the_tensors_of_the_step(page, files, step):
    show(page, files[1], f"#step={step}")
    batch = next(batch for i, batch in enumerate(batches(files[0]), 1) if i == step)
    rows = table(page, "token")
    count = min(len(rows), batch.num_tokens)
    assert [int(row["positions"]) for row in rows[:count]] == batch.positions[:count].tolist()
    assert [int(row["slot_mapping"]) for row in rows[:count]] == batch.slot_mapping[0][:count].tolist()
    assert [row["text"] for row in rows[:count]] == [f"w{token}" for token in batch.input_ids[:count].tolist()]
    requests = [row for row in table(page, "request") if row["request"] not in ("padding", "end")]
    assert [row["request"] for row in requests] == list(batch.req_ids)
    assert [int(row["seq_lens"]) for row in requests] == batch.seq_lens[: batch.num_reqs].tolist()


def test_keys_go_through_steps_tokens_and_blocks(page):
    at = lambda: int(step_of(page).split()[1])  # noqa: E731
    for key, step in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 40), ("PageUp", 1), ("Home", 1)):
        page.keyboard.press(key)
        page.wait_for_function("n => document.getElementById('step').textContent.startsWith(`step ${n} `)", arg=step)
        assert at() == step
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.text_content("#where").startswith("Token 1 ")
    page.keyboard.press("ArrowUp")
    assert page.text_content("#where").startswith("Token 0 ")
    before = page.text_content("#block-title")
    page.keyboard.press("]")
    page.wait_for_function("text => document.getElementById('block-title').textContent !== text", arg=before)
    page.keyboard.press("Escape")
    page.wait_for_function("document.getElementById('block-title').textContent === ''")
    assert page.text_content("#where").startswith("Point at a token")
    page.keyboard.press("/")
    page.keyboard.type("req-6")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('found').textContent === 'req-6'")


def test_a_link_keeps_step_token_and_block(page, files):
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.getElementById('step').textContent.startsWith('step 2 ')")
    page.click("#token tr[data-row='2']")
    page.wait_for_function("location.hash.includes('token=2') && location.hash.includes('block=')")
    link, where, block = page.evaluate("location.hash"), page.text_content("#where"), page.text_content("#block-title")
    show(page, files[1], link)
    assert step_of(page).startswith("step 2 ")
    assert page.text_content("#where") == where
    assert page.text_content("#block-title") == block
    assert page.get_attribute("#token tr.lit", "data-row") == "2"


def test_pointing_at_a_token_marks_its_request_entry_slot_and_logit_row(page, files):
    show(page, files[1], "#step=12")
    batch = next(batch for i, batch in enumerate(batches(files[0]), 1) if i == 12)
    t = int(batch.logits_indices[-1])
    page.hover(f"#token tr[data-row='{t}']")
    b, position, slot = int(batch.req_indices[t]), int(batch.positions[t]), int(batch.slot_mapping[0][t])
    assert page.get_attribute("#request tr.lit", "data-row") == str(b)
    assert page.get_attribute("#logit tr.lit", "data-row") == str(len(batch.logits_indices) - 1)
    entry = page.query_selector("#tables b.lit")
    assert (entry.get_attribute("data-e"), entry.text_content()) == (str(position // 16), str(slot // 16))
    assert f"slot {slot}" in page.text_content("#where")
    page.click(f"#token tr[data-row='{t}']")
    page.wait_for_selector("#contents .lit")
    assert page.get_attribute("#contents .lit", "data-offset") == str(slot % 16)
    page.hover("#title")
    assert page.text_content("#where").startswith(f"Token {t} ")  # a click keeps it


def test_drafts_are_accepted_and_rejected_as_the_commits_say(page, files):
    trace = Trace.read(files[0])
    kinds = set()
    for number, (step, commit) in enumerate(
        zip(
            [e for e in trace.events if e.kind == "step"], [e for e in trace.events if e.kind == "commit"], strict=True
        ),
        1,
    ):
        if not step.draft_tokens or len(kinds) == 2 or sum(map(int, step.counts)) > 20:
            continue
        show(page, files[1], f"#step={number}")
        expected = []
        for req_id, count in zip(step.req_ids, map(int, step.counts), strict=True):
            k, accepted = len(step.draft_tokens.get(req_id, ())), len(commit.tokens.get(req_id, ())) - 1
            expected += [""] * (count - k) + ["accepted" if j < accepted else "rejected" for j in range(k)]
        assert [row["draft"] for row in table(page, "token")] == expected
        kinds |= set(expected) - {""}
    assert kinds


def test_the_prefix_tree_has_the_blocks_of_every_request_in_order(page, files):
    show(page, files[1], "#step=12")
    *_, (states, batch) = ((batch.states, batch) for i, batch in enumerate(batches(files[0]), 1) if i == 12)
    rows = page.evaluate(
        """() => prefixRuns().runs.map(run => [run.depth, run.blocks.map(i => index.blocks.ids[i]),
             states[run.blocks[0]].holders.map(h => ids[h[0]])])"""
    )
    path, chains = [], []
    for depth, blocks, holders in rows:
        path[depth:] = [blocks]
        chains.append(([b for run in path for b in run], holders))
    step = next(i for i, b in enumerate(batches(files[0])) if i == 11)
    assert step == 11
    tables = page.evaluate("() => data.tensors.block_table[0].map(row => row.filter(n => n !== index.null))")
    for request, blocks in zip(page.evaluate("() => data.requests.map(r => ids[r])"), tables, strict=True):
        longest = max((chain for chain, holders in chains if request in holders), key=len)
        assert longest == blocks
    assert any(len(holders) > 1 for _, holders in chains)
    assert batch.states is states


def test_waiting_requests_have_the_reason_of_the_scheduler(page, files):
    show(page, files[1], "#step=12")
    assert "max_num_seqs" in page.text_content("#waits")
    head = page.text_content("#waits").split("The first is ")[1].split(":")[0]
    state = next(row["state"] for row in table(page, "all") if row["request"] == head)
    assert state == "waiting: max_num_seqs"


def test_requests_have_what_they_reused_and_why_not_more(page, files):
    added = {}
    for event in Trace.read(files[0]).events:
        if event.kind == "add":
            added.setdefault(event.req_id, event)
    show(page, files[1], "#step=12")
    rows = [row for row in table(page, "all") if row["request"] in added]
    assert any(int(row["reused"]) for row in rows)
    for row in rows:
        event = added[row["request"]]
        reason, _, position = event.cache_miss.partition(" at ")
        assert int(row["reused"]) == event.num_computed_tokens
        assert (row["why not more"], row["from position"]) == (reason, position)
    reused = next(r for r, event in added.items() if event.num_computed_tokens and "differs" in event.cache_miss)
    page.fill("#find", reused)
    page.keyboard.press("Enter")
    page.wait_for_function("r => document.getElementById('all-caption').textContent.startsWith(`${r}: `)", arg=reused)
    text, event = page.text_content("#all-caption"), added[reused]
    assert f"{event.num_computed_tokens} of {len(event.prompt_token_ids)} prompt tokens were reused." in text
    assert "goes on with another token" in text


@pytest.mark.parametrize("step", [1, 2])
def test_the_mask_has_the_keys_that_each_token_reads(started, tmp_path, step):
    """A request has bidirectional ranges, in a full group and in one with a window."""
    path = record_ranges(tmp_path / "steps.jsonl")
    write_page(path, tmp_path / "steps.html")
    batch = next(batch for i, batch in enumerate(batches(path), 1) if i == step)
    with tab(started, viewport={"width": 1280, "height": 900}, bypass_csp=True) as page:
        show(page, tmp_path / "steps.html", f"#step={step}")
        n, keys = int(batch.num_scheduled_tokens[0]), int(batch.seq_lens[0])
        drawn = page.evaluate(MASK, [2, n, keys])
        assert drawn == [attention_mask(batch, group)[:n, :keys].tolist() for group in range(2)]
        assert "bidirectional_ranges" in page.text_content("#mask-caption")
        assert not page.errors


def test_a_click_on_a_block_shows_its_content_and_history(page, files):
    show(page, files[1], "#step=12")
    page.click("#pool", position={"x": 8, "y": 8})
    page.wait_for_function("document.getElementById('history').children.length > 0")
    assert page.text_content("#block-title") == "Block 1"
    assert "given to req-0 (entry 0)" in page.text_content("#history li")
    assert len(page.query_selector_all("#contents div")) == 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_than_the_window_and_texts_stand_out(started, files, size, scheme):
    width, height = SIZES[size]
    with tab(started, viewport={"width": width, "height": height}, color_scheme=scheme) as page:
        show(page, files[1], "#step=12&token=3&block=2")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        contrast = page.evaluate(CONTRAST)
        assert min(contrast) >= 4.5
        assert not page.errors


def test_a_cut_recording_is_shown_up_to_the_damage(started, files, tmp_path):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(files[0].read_bytes()[:-3000])
    report = write_page(cut, tmp_path / "cut.html")
    with tab(started, bypass_csp=True) as page:
        show(page, tmp_path / "cut.html")
        assert "cut.jsonl, line" in page.text_content("#damage")
        page.keyboard.press("End")
        page.wait_for_function(
            "n => document.getElementById('step').textContent.includes(`(${n} of ${n})`)", arg=report.num_steps
        )
        assert not page.errors
