"""Sounds over HTTP: the text of the library in every form, with OpenAI's client, and errors with the field."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("soundfile", reason="needs the extra foreword[speech]")

import json
import re

import numpy as np
from server_rig import PATIENCE, serving
from several_rig import serving_several

import openai
from foreword import LLM
from foreword.engine.build import load
from foreword.engine.footprint import footprint
from foreword.engine.options import split_options
from foreword.server.config import ServerConfig
from foreword.server.run_several import several
from foreword.server.served import ServedModel
from pytorch.speech_models import encoded, own_tokens, samples, save

pytestmark = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client warns about translations
ENGINE = {"executor": "transformers", "dtype": "fp32", "num_threads": 1, "block_size": 4, "max_model_len": 64}
SHORT, LONG = samples(1, 0.9), samples(2, 2.7)
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    save(folder)
    with serving(folder, engine=ENGINE, max_sound_seconds=4) as found:
        found.folder = folder
        yield found


@pytest.fixture(scope="module")
def llm(server):
    with LLM(str(server.folder), **ENGINE) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as found:
        yield found.audio


def post(server, files=None, path=PATH, headers=None, **fields):
    files = {"file": ("a.wav", encoded(SHORT), "audio/wav")} if files is None else files
    with server.client() as client:
        return client.post(path, files=files, data=fields, headers=headers)


def test_the_client_of_openai_gets_the_tokens_of_transformers(server, client, llm):
    found = client.transcriptions.create(model="talker", file=("a.flac", encoded(SHORT)), language="en")
    kind = transformers.WhisperForConditionalGeneration
    model = kind.from_pretrained(server.folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = own_tokens(model, SHORT, language="en", task="transcribe")[4:]
    assert found.text == llm.tokenizer.decode([token for token in tokens if token < 256]).lstrip() != ""
    assert (found.usage.type, found.usage.seconds) == ("duration", 1)
    server.check_nothing_is_left()


@pytest.mark.parametrize("sound", [SHORT, LONG], ids=["one window", "three windows"])
@pytest.mark.parametrize("route", ["transcriptions", "translations"])
def test_every_form_has_what_the_library_writes(client, llm, sound, route):
    task = {"transcriptions": "transcribe", "translations": "translate"}[route]
    create = getattr(client, route).create
    common = {"model": "talker", "file": ("a.wav", encoded(sound)), "prompt": "Before. "}
    plain = llm.transcribe(sound, task=task, prompt="Before.")
    assert create(**common).text == create(**common, response_format="text") == plain.text
    timed = llm.transcribe(sound, task=task, prompt="Before.", timestamps=True, scores=True)
    verbose = create(**common, response_format="verbose_json")
    assert (verbose.text, verbose.language) == (timed.text, timed.language)
    assert verbose.duration == pytest.approx(len(sound) / 16000)
    keys = "start", "end", "text", "seek", "compression_ratio"
    assert [[getattr(one, key) for key in keys] for one in verbose.segments] == [
        [getattr(one, key) for key in keys] for one in timed.segments
    ]
    assert [one.tokens for one in verbose.segments] == [list(one.token_ids) for one in timed.segments]
    scores = [(one.avg_logprob, one.no_speech_prob) for one in verbose.segments]
    np.testing.assert_allclose(scores, [(one.avg_logprob, one.no_speech_prob) for one in timed.segments], rtol=1e-4)
    times = [(one.start, one.end) for one in timed.segments]
    for format, point in (("srt", ","), ("vtt", ".")):
        found = re.findall(r"^(\S+) --> (\S+)$", create(**common, response_format=format), re.MULTILINE)
        assert [(seconds(start, point), seconds(end, point)) for start, end in found] == times


def seconds(text, point):
    hours, minutes, rest = text.split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(rest.replace(point, "."))


@pytest.mark.parametrize("sound", [SHORT, LONG], ids=["one window", "three windows"])
def test_the_pieces_of_a_stream_are_the_text(client, llm, sound):
    file = "a.wav", encoded(sound)
    with client.transcriptions.create(model="talker", file=file, language="fr", stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    text = llm.transcribe(sound, language="fr").text
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == text
    assert len(events) > 2


def test_requests_at_the_same_time_get_their_own_texts(server, llm):
    from concurrent.futures import ThreadPoolExecutor

    sounds = [samples(seed, length) for seed, length in enumerate((0.5, 2.2, 0.9, 1.4, 3.1, 0.7))]
    with ThreadPoolExecutor(len(sounds)) as pool:
        found = pool.map(lambda sound: post(server, {"file": encoded(sound)}, language="de"), sounds)
        texts = [response.json()["text"] for response in found]
    assert texts == [llm.transcribe(sound, language="de").text for sound in sounds]
    server.check_nothing_is_left()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not a sound"),
        (encoded(SHORT)[:-100], "its end is missing"),
        (encoded(SHORT, "FLAC", "PCM_16")[:2000], "is damaged"),
        (encoded(np.array([0.0, np.nan, 1.0])), "not all finite"),
        (encoded(np.full(8000, 1e30)), "no finite spectrum"),
        (encoded(np.zeros(16000 * 5)), "may have 4 seconds"),
        (encoded(np.zeros(10**7), "FLAC", "PCM_16"), "may have 4 seconds"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 500, "is not a sound"),
        (b"\0\0\0\x20ftypM4A " + b"\0" * 500, "is not a sound"),
    ],
    ids=["empty", "cut WAV", "cut FLAC", "NaN", "huge", "long", "bomb", "image", "M4A"],
)
def test_a_bad_sound_is_status_400_with_its_field(server, data, reason):
    response = post(server, {"file": ("a.mp3", data, "audio/mpeg")})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "file"), error
    assert reason in error["message"]
    server.check_nothing_is_left()
    assert post(server, language="en").status_code == 200


def test_an_encoder_that_fails_is_an_error_of_its_request(server, client, llm, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(server.llm.model.loaded.module.get_encoder(), "forward", fails)
        other = {"file": encoded(samples(8, 0.9))}
        error = post(server, other, language="en").json()["error"]
        assert (error["param"], "the encoder failed" in error["message"]) == ("file", True)
        file = "a.wav", encoded(samples(9, 0.9))
        with (
            pytest.raises(openai.APIError, match="the encoder failed"),
            client.transcriptions.create(model="talker", file=file, language="en", stream=True) as stream,
        ):
            list(stream)
    server.check_nothing_is_left()
    assert post(server, other, language="en").json()["text"] == llm.transcribe(samples(8, 0.9), language="en").text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "srt", "stream": "true"}, "response_format"),
        ({"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}, "timestamp_granularities[]"),
        ({"timestamp_granularities[]": ["segment"]}, "timestamp_granularities[]"),
        ({"include[]": ["logprobs"]}, "include[]"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "-1"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": "<|endoftext|>"}, "prompt"),
        ({"model": ["talker", "talker"]}, "model"),
        ({"timeout": "never"}, "timeout"),
        ({"speed": "2"}, "speed"),
        ({"file": "text"}, "file"),
    ],
)
def test_a_field_that_cannot_be_served_is_status_400_with_its_name(server, fields, param):
    response = post(server, {"x": b""} if "file" in fields else None, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    server.check_nothing_is_left()


def test_other_bodies_origins_models_and_deadlines_have_their_statuses(server):
    assert server.post(PATH, {"file": "x"}).status_code == 415
    with server.client() as client:
        headers = {"content-type": "multipart/form-data"}
        assert client.post(PATH, content=b"--x", headers=headers).status_code == 400
        headers = {"content-type": "multipart/form-data; boundary=x"}
        assert client.post(PATH, content=b"--x\r\nbroken", headers=headers).status_code == 400
    assert post(server, {}, language="en").status_code in (400, 415)
    two = [("file", ("a.wav", b"a")), ("file", ("b.wav", b"b"))]
    assert post(server, two).status_code == 400
    assert post(server, model="unknown").status_code == 404
    for origin in ("http://elsewhere", "http://[", "null"):
        assert post(server, headers={"origin": origin}).status_code == 403
    assert post(server, headers={"origin": server.url}, temperature="0.5", seed="1").status_code == 200
    server.pace = 0.05
    response = post(server, {"file": encoded(LONG)}, timeout="0.2")
    server.pace = 0.0
    assert response.status_code == 504
    server.check_nothing_is_left()


def test_a_closed_connection_ends_a_transcription(server):
    server.pace = 0.05
    form = {"files": {"file": encoded(LONG)}, "data": {"stream": "true"}}
    with server.client() as client, client.stream("POST", PATH, **form) as response:
        next(response.iter_lines())
    server.pace = 0.0
    server.check_nothing_is_left()


def test_a_model_of_text_answers_that_it_cannot_transcribe(talker):
    with serving(talker) as server:
        response = post(server)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (404, "model")
        assert "cannot transcribe audio" in error["message"]


def test_the_description_has_the_fields_of_the_form(server):
    operation = server.get("/openapi.json").json()["paths"][PATH]["post"]
    schema = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert schema["required"] == ["file"]
    assert {"language", "prompt", "response_format", "stream", "temperature", "timeout"} <= set(schema["properties"])
    assert "text/vtt" in operation["responses"]["200"]["content"]
    json.dumps(schema)


@pytest.mark.parametrize(
    ("content", "boundary", "reason"),
    [
        (b"--x", "", "Missing boundary"),
        (b"broken", "; boundary=x", "is not a form"),
        (b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"a" * (2 << 20), "; boundary=x", "1024KB"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--\r\n", "; boundary=x", "is not a form"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * 65 + b"--x--\r\n",
            "; boundary=x",
            "Too many",
        ),
        (b"", "; boundary=x", "file"),
    ],
)
def test_a_damaged_form_is_status_400(server, content, boundary, reason):
    with server.client() as client:
        response = client.post(PATH, content=content, headers={"content-type": f"multipart/form-data{boundary}"})
    assert (response.status_code, reason in response.text) == (400, True), response.text
    server.check_nothing_is_left()


def test_speech_is_served_beside_text_and_both_are_loaded_and_unloaded_as_requests_ask(server, llm, talker):
    expected = llm.transcribe(SHORT, task="transcribe").text
    text = ServedModel(model=str(talker), names=("text",), options={"max_model_len": 256, "kv_cache_bytes": 1 << 20})
    speech = ServedModel(model=str(server.folder), names=("speech",), options={**ENGINE, "kv_cache_bytes": 1 << 20})
    given = [(one, split_options(one.options)) for one in (text, speech)]
    sizes = [footprint(load(one.model, of.executor, of.of_executor), of.config, budget=None) for one, of in given]
    weights = sum(weight.nbytes for weight in load(str(server.folder), "transformers", {}).loaded.module.parameters())
    taken: list[int] = []
    several([speech], ServerConfig())._read(speech, {}, taken.append)
    assert taken == [sizes[1].weights] == [weights]
    for budget, loads in ((sum(size.total for size in sizes), 1), (max(size.total for size in sizes), 3)):
        with serving_several([text, speech], load_on_demand=True, ram_budget=budget) as both:
            for _ in range(3):
                found = both.client.post(PATH, files={"file": encoded(SHORT)}, data={"model": "speech"})
                assert found.json()["text"] == expected, found.text
                assert both.post("/v1/completions", {"model": "text", "prompt": "x"}).status_code == 200
            refused = both.client.post(PATH, files={"file": encoded(SHORT)}, data={"model": "text"})
            assert refused.status_code == 404
            assert [entry.num_loads for entry in both.models.entries] == [loads, loads]
