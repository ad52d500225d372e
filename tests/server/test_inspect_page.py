"""The live page at `/inspect` in a browser."""

import pytest
from server_rig import HI, beside_the_browser

from browser import browser, tab
from foreword.server.inspector import NO_STEPS

CHAT = {"messages": HI, "max_tokens": 12, "temperature": 0}
KEYS = {"api_key": ("user",), "admin_key": "boss"}


@pytest.fixture(scope="module")
def started():
    with browser() as one:
        yield one


def shows_the_last_step(page, server):
    server.check_nothing_is_left()
    page.wait_for_selector(f"#step:text('step {server.llm.engine.recorder._num_steps} ')")


def test_the_page_asks_for_the_key_and_follows_the_engine(started, talker):
    with beside_the_browser(talker, **KEYS) as server, tab(started) as page:
        server.post("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer user"})
        page.goto(f"{server.url}/inspect")
        page.wait_for_selector("#key:focus")
        assert "needs the admin key" in page.text_content("#link")
        page.keyboard.type("boss")
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-ready=yes]")
        shows_the_last_step(page, server)
        server.post("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer user"})
        shows_the_last_step(page, server)
        page.keyboard.press("ArrowLeft")  # pauses
        page.wait_for_selector("#follow[aria-pressed=false]")
        paused = page.text_content("#step")
        server.post("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer user"})
        page.wait_for_timeout(1500)
        assert page.text_content("#step") == paused
        page.keyboard.press("f")
        shows_the_last_step(page, server)
        page.click("#token tr[data-row='0']")
        page.wait_for_selector("#contents .lit")
        page.wait_for_url("**token=0**")
        page.reload()  # the key and the place are kept in the tab
        page.wait_for_selector("html[data-ready=yes]")
        shows_the_last_step(page, server)
        assert not page.errors


def test_without_an_admin_key_the_page_says_that_token_ids_are_left_out(started, talker):
    with beside_the_browser(talker) as server, tab(started) as page:
        page.goto(f"{server.url}/inspect")
        page.wait_for_selector("#step:text('no steps yet')")
        server.post("/v1/chat/completions", CHAT)
        page.wait_for_selector("html[data-ready=yes]")
        assert "admin key" in page.text_content("#link")
        assert "input_ids" not in page.text_content("#token thead")
        assert not page.errors


def test_where_there_are_no_steps_the_page_says_what_to_do_and_asks_no_more(started, talker):
    with beside_the_browser(talker, engine={"flight_steps": 0}) as server, tab(started) as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url.endswith("/inspect/steps")))
        page.goto(f"{server.url}/inspect")
        page.wait_for_selector("#damage:not(:empty)")
        assert page.text_content("#damage") == NO_STEPS
        page.wait_for_timeout(1300)
        assert sum(asked) == 1
        assert not page.errors


def test_in_front_of_replicas_the_page_shows_the_steps_of_the_chosen_one(started, talker):
    """The first one is shown at first. Which one it is, is in the address."""
    with beside_the_browser(talker) as server, tab(started) as page:
        server.post("/v1/chat/completions", CHAT)
        states = [{"replica": 0, "ready": False}, {"replica": 1, "ready": True}, {"replica": 2, "ready": True}]
        page.route("**/ready", lambda route: route.fulfill(json={"status": "ready", "replicas": states}))
        asked = []

        def of_replica(route):
            path, _, query = route.request.url.partition("?")
            asked.append(query)
            route.continue_(url=path)

        page.route("**/inspect/steps**", of_replica)
        page.goto(f"{server.url}/inspect")
        page.wait_for_selector("html[data-ready=yes]")
        assert page.locator("#replica option").all_text_contents() == ["replica 1", "replica 2"]
        assert set(asked) == {"replica=1"}
        asked.clear()
        page.select_option("#replica", "2")
        page.wait_for_url("**/inspect?replica=2")
        page.wait_for_selector("html[data-ready=yes]")
        assert page.input_value("#replica") == "2"
        page.wait_for_timeout(1300)
        assert asked[-1] == "replica=2"
        assert not page.errors
