"""Images over HTTP: the same answers in every dialect, and errors with the field of the body."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")

from server_rig import serving

from foreword import LLM, SamplingParams
from models.seeing import data_url, image
from pytorch.vision_models import save

ENGINE = {"executor": "transformers", "dtype": "fp32", "num_threads": 1, "max_model_len": 160}
A, B = image(0, 60, 40), image(1, 30, 84)
URLS = [data_url(A), data_url(B)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save(folder, "llava")
    with serving(folder, engine=ENGINE, max_images=2) as found:
        found.folder = folder
        yield found


def test_every_dialect_gives_the_answer_of_the_library(server):
    content = [*({"type": "image", "image": image} for image in (A, B)), {"type": "text", "text": "what"}]
    with LLM(str(server.folder), **ENGINE) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        [output] = llm.chat([{"role": "user", "content": content}], params, progress=False)
    expected = output.outputs[0].text
    text = {"type": "text", "text": "what"}
    settings = {"model": "talker", "temperature": 0.0, "ignore_eos": True}
    chat = {
        **settings,
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": [*({"type": "image_url", "image_url": {"url": url}} for url in URLS), text]}
        ],
    }
    body = server.post("/v1/chat/completions", chat).json()
    assert body["choices"][0]["message"]["content"] == expected
    assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids) > 2 * 16
    frames = server.frames("/v1/chat/completions", chat)
    assert "".join(f["choices"][0]["delta"].get("content") or "" for f in frames if f["choices"]) == expected
    sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in URLS]
    blocks = [*({"type": "image", "source": source} for source in sources), text]
    conversation = {"model": "talker", "messages": [{"role": "user", "content": blocks}]}
    body = server.post("/v1/messages", {**conversation, **settings, "max_tokens": 8}).json()
    assert "".join(block["text"] for block in body["content"]) == expected
    counted = server.post("/v1/messages/count_tokens", conversation).json()
    assert counted == {"input_tokens": len(output.prompt_token_ids)}
    parts = [*({"type": "input_image", "image_url": url} for url in URLS), {"type": "input_text", "text": "what"}]
    items = {**settings, "max_output_tokens": 8, "input": [{"role": "user", "content": parts}]}
    body = server.post("/v1/responses", items).json()
    assert "".join(part["text"] for item in body["output"] for part in item["content"]) == expected


@pytest.mark.parametrize(
    ("parts", "param", "reason"),
    [
        ([URLS[0][:202]], "messages[0].content[1]", "is damaged"),
        (["data:image/png;base64,AAAA"], "messages[0].content[1]", "is not an image"),
        (["http://127.0.0.1:1/a.png"], "messages[0].content[1]", "not fetched from other machines"),
        (["/etc/passwd"], "messages[0].content[1]", "files of this machine are not read"),
        (["file:///etc/passwd"], "messages[0].content[1]", "files of this machine are not read"),
        ([URLS[0]] * 3, "messages[0].content[3]", "may have 2 parts"),
    ],
)
def test_a_bad_image_is_status_400_with_its_field(server, parts, param, reason):
    content = [{"type": "text", "text": "a"}, *({"type": "image_url", "image_url": {"url": url}} for url in parts)]
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
    server.check_nothing_is_left()


@pytest.mark.parametrize(
    ("route", "conversation"),
    [("chat/completions", {"messages": [{"role": "user", "content": "a"}]}), ("responses", {"input": "a"})],
)
def test_a_value_of_the_processor_that_the_model_lacks_is_status_400_with_its_field(server, route, conversation):
    response = server.post(f"/v1/{route}", {**conversation, "mm_processor_kwargs": {"do_pan_and_scan": True}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "mm_processor_kwargs.do_pan_and_scan")
