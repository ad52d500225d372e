"""The chat page in a browser."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from server_rig import serving

BROWSER = shutil.which("chromium-headless-shell")
INJECTION = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> & <script>1</script>"


@pytest.fixture(scope="module")
def page():
    """A tab of a browser; a test without playwright or Debian's chromium-headless-shell is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("chromium-headless-shell is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        yield page
        browser.close()


@contextmanager
def beside_the_browser(model, **options):
    """A server that starts and ends in another thread: the browser has an event loop in this one."""
    manager = serving(model, **options)
    with ThreadPoolExecutor(1) as other:
        server = other.submit(manager.__enter__).result()
        try:
            yield server
        finally:
            other.submit(manager.__exit__, None, None, None).result()


def send(page, text: str) -> None:
    """With the keyboard alone, from wherever the focus is."""
    page.focus("#prompt")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(talker):
    with beside_the_browser(talker, api_key=("secret",)) as server:
        response = server.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(
        r"(?:https?:)?//[\w.]+\.\w+|\burl\(|@import|<link|<img|innerHTML|insertAdjacentHTML", response.text
    )


def test_an_answer_streams_into_the_page_as_text(talker, page):
    with beside_the_browser(talker, script=INJECTION, api_key=("secret",)) as server:
        page.goto(server.url)
        send(page, "Hi <i>there</i>")
        page.locator(".error").wait_for()  # no key
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        page.locator("#model option").first.wait_for(state="attached")
        for text in ("Hi <i>there</i>", "again"):
            send(page, text)
            page.locator("#stop:not([disabled])").wait_for()
            page.locator("#stop[disabled]").wait_for()
        assert page.locator("article.assistant .text").all_inner_texts()[1:] == [INJECTION, INJECTION]
        assert page.locator("#log :is(b, i, img, script)").count() == 0
        assert page.title() == "Foreword chat"
        note = page.locator("article.assistant .note").last.inner_text()
        assert re.search(r"tokens/s · \d+ tokens · [1-9]\d* of \d+ prompt tokens from the cache", note)
        assert not page.errors


def test_a_waiting_request_tells_why_and_escape_stops_it(talker, page):
    with beside_the_browser(talker, engine={"max_num_seqs": 1}) as server:
        page.goto(server.url)
        page.locator("#model option").first.wait_for(state="attached")
        page.fill("#max_tokens", "4000")
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 4000, "stream": True}) as first,
        ):
            lines = first.iter_lines()  # which closes the connection in the end
            next(lines)
            send(page, "Hi")
            page.locator("article.assistant .note", has_text=re.compile(r"Waiting: .{5}")).wait_for()
        page.locator("article.assistant .text:not(:empty)").wait_for()
        page.keyboard.press("Escape")
        page.locator("article.assistant .note", has_text="stopped").wait_for()
        server.check_nothing_is_left()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_light_of_the_system(talker, page, scheme):
    with beside_the_browser(talker) as server:
        page.emulate_media(color_scheme=scheme)
        page.goto(server.url)
        red, green, blue = map(
            int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))
        )
        assert (red + green + blue > 600) == (scheme == "light")
