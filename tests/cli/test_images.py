"""Images beside a message, for models that take none; `tests/pytorch/test_vision_commands.py` has those that see."""

from __future__ import annotations

import pytest
from processes import run


@pytest.mark.one_in(2)
@pytest.mark.parametrize("more", [(), ("--raw",)])
def test_an_image_for_a_model_that_reads_text_alone_is_refused_by_name(talker, more):
    status, shown, error = run("run", "what", "-m", talker, "--image", "photo.jpg", *more)
    assert (status, shown, len(error.splitlines())) == (2, "", 1)
    assert error.startswith("foreword: --image")
    assert ("--raw is given" if more else f"photo.jpg: model {talker.name!r} takes no images") in error


def test_a_chat_with_such_a_model_refuses_the_command(talker):
    status, shown, error = run("chat", "-m", talker, "-q", input=b"/image photo.jpg\n")
    assert (status, shown) == (2, "")
    assert "/image photo.jpg: model" in error
    assert "takes no images" in error


def test_a_url_is_refused_as_it_was_written(talker):
    url = "https://example.com/a//b.png"
    status, shown, error = run("run", "what", "-m", talker, "--image", url)
    assert (status, shown) == (2, "")
    assert f"--image = {url!r}: is a URL, and this command reads files alone. Download it first." in error
    status, _, error = run("chat", "-m", talker, "-q", input=f"/image {url}\n".encode())
    assert status == 2
    assert f"/image = {url!r}: is a URL" in error
