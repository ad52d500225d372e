"""The chat page in a browser."""

import re

import pytest
from server_rig import beside_the_browser

from browser import browser, tab

INJECTION = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> & <script>1</script>"


@pytest.fixture(scope="module")
def page():
    """A tab of a browser."""
    with browser() as started, tab(started) as page:
        yield page


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


MARKDOWN = """# Title
A `code`, a **bold** word and 2*3*4.

- one
  more
- two `x`

3. three
4. four

```python
a = "<b>"

# no title
```
end ``` **open"""


def answered(page) -> None:
    """Wait for the end of an answer."""
    page.locator("#stop[disabled]").wait_for()
    page.locator("article.assistant").last.locator(".again").wait_for()


def test_markdown_becomes_elements_and_html_stays_text(talker, page):
    with beside_the_browser(talker, script=MARKDOWN) as server:
        page.goto(server.url)
        send(page, "Hi **you**")
        answered(page)
        text = page.locator("article.assistant .text")
        assert text.locator("h3").inner_text() == "Title"
        assert text.locator("p code").first.inner_text() == "code"
        assert text.locator("strong").all_inner_texts() == ["bold"]
        assert text.locator("ul li").all_inner_texts() == ["one\nmore", "two x"]
        assert text.locator("ol li").all_inner_texts() == ["three", "four"]
        assert text.locator("ol").get_attribute("start") == "3"
        assert text.locator("pre code").inner_text() == 'a = "<b>"\n\n# no title'
        assert text.locator("p").all_inner_texts() == ["A code, a bold word and 2*3*4.", "end ``` **open"]
        assert page.locator("article.user .text").inner_text() == "Hi **you**"
        assert text.locator("b").count() == 0
        assert not page.errors


def test_a_message_that_is_refused_goes_back_to_where_it_was_typed(talker, page):
    with beside_the_browser(talker, script="Yes.", api_key=("secret",)) as server:
        page.goto(server.url)
        send(page, "Hi")
        page.locator(".error").wait_for()
        assert page.input_value("#prompt") == "Hi"
        assert page.locator("article.user").count() == 0
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        page.focus("#prompt")
        page.keyboard.press("Enter")
        answered(page)
        assert page.locator("article.user .text").all_inner_texts() == ["Hi"]
        assert page.evaluate("messages") == [
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
        ]  # fmt: skip


def test_an_answer_can_be_copied_and_made_again_and_survives_a_reload(talker, page):
    with beside_the_browser(talker, script="**Yes.**") as server:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        page.goto(server.url)
        for text in ("Hi", "you"):
            send(page, text)
            answered(page)
        assert page.locator(".again").count() == 1
        page.locator("article.assistant .tools button", has_text="Copy").last.click()
        page.locator("button", has_text="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "**Yes.**"
        page.locator(".again").click()
        page.locator("#stop:not([disabled])").wait_for()
        answered(page)
        expected = [("user", "Hi"), ("assistant", "**Yes.**"), ("user", "you"), ("assistant", "**Yes.**")]
        for _ in range(2):
            assert [(m["role"], m["content"]) for m in page.evaluate("messages")] == expected
            assert page.locator("article .text").all_inner_texts() == ["Hi", "Yes.", "you", "Yes."]
            page.reload()
        page.locator("#clear").click()
        page.reload()
        assert page.locator("article").count() == 0
        assert not page.errors


def test_an_answer_stays_if_there_is_no_other(talker, page):
    with beside_the_browser(talker, script="Yes.") as server:
        page.goto(server.url)
        send(page, "Hi")
        answered(page)
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.locator(".again").click()
        page.locator(".error").wait_for()
        assert [m["content"] for m in page.evaluate("messages")] == ["Hi", "Yes."]
        assert page.locator("article.assistant .text").last.inner_text() == "Yes."
        page.unroute("**/v1/chat/completions")


def test_settings_are_folded_in_a_narrow_window(talker, page):
    size = page.viewport_size
    try:
        with beside_the_browser(talker) as server:
            page.set_viewport_size({"width": 360, "height": 640})
            page.goto(server.url)
            assert not page.locator("#temperature").is_visible()
            assert page.locator("aside").bounding_box()["height"] < 110
            page.locator("summary", has_text="Settings").click()
            assert page.locator("#temperature").is_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            page.set_viewport_size(size)
            page.goto(server.url)
            assert page.locator("#temperature").is_visible()
    finally:
        page.set_viewport_size(size)


def test_conversations_are_kept_and_a_message_can_be_edited(talker, page):
    with beside_the_browser(talker, script="Yes.") as server:
        page.goto(server.url)
        for text in ("One", "Two"):
            send(page, text)
            answered(page)
        page.locator("#clear").click()
        send(page, "<b>Other</b>")
        answered(page)
        titles = page.locator("#chats li button:first-child")
        assert titles.all_inner_texts() == ["<b>Other</b>", "One"]
        titles.nth(1).click()
        assert page.locator("article.user .text").all_inner_texts() == ["One", "Two"]
        page.locator("article.user button", has_text="Edit").last.click()
        assert page.input_value("#prompt") == "Two"
        assert page.locator("article").count() == 2
        page.keyboard.type("!")
        page.keyboard.press("Enter")
        answered(page)
        assert [m["content"] for m in page.evaluate("messages")] == ["One", "Yes.", "Two!", "Yes."]
        page.locator("#chats li button[aria-label^=Delete]").first.click()
        assert page.locator("article").count() == 0
        page.reload()
        assert titles.all_inner_texts() == ["<b>Other</b>"]
        assert not page.errors


def test_files_are_parts_of_a_message_and_come_back_with_a_refusal(talker, page):
    with beside_the_browser(talker, script="Yes.") as server:
        page.goto(server.url)
        page.set_input_files("#picker", [
            {"name": "a.txt", "mimeType": "text/plain", "buffer": b"words <i>"},
            {"name": "b.bin", "mimeType": "application/octet-stream", "buffer": b"\xff\xfe\x00"},
        ])  # fmt: skip
        page.locator(".error", has_text="b.bin: is neither an image nor text").wait_for()
        assert page.locator("#files button").all_inner_texts() == ["a.txt ×"]
        send(page, "Read it")
        answered(page)
        parts = [{"type": "text", "text": "Read it"}, {"type": "text", "text": "File a.txt:\nwords <i>"}]
        assert page.evaluate("messages[0].content") == parts
        assert page.locator("article.user .note").inner_text() == "Attached: a.txt"
        page.set_input_files("#picker", [{"name": "c.png", "mimeType": "image/png", "buffer": b"\x89PNG"}])
        page.locator("#files button").wait_for()
        send(page, "See")
        page.locator(".error", has_text="image").last.wait_for()  # the model reads no images
        assert page.input_value("#prompt") == "See"
        assert page.locator("#files button").all_inner_texts() == ["c.png ×"]


def test_a_server_of_embeddings_alone_compares_texts(talker, page):
    with beside_the_browser(talker) as server:

        def answer(route):
            found = [{"embedding": [1.0, float(i)]} for i, _ in enumerate(route.request.post_data_json["input"])]
            route.fulfill(json={"data": found})

        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "e", "tasks": ["embed"]}]}))
        page.route("**/v1/embeddings", answer)
        page.goto(server.url)
        page.locator("#send", has_text="Embed").wait_for()
        for text in ("a", "b"):
            send(page, text)
            page.locator("article.user .note", has_text="2 numbers").nth(0 if text == "a" else 1).wait_for()
        assert "0.707 a" in page.locator("article.user").last.inner_text()
        page.unroute("**/v1/models")
        page.unroute("**/v1/embeddings")
        assert not page.errors
