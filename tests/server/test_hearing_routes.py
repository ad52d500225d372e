"""Sounds of conversations over HTTP: the answers of the library, and errors with the field of the body."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")
pytest.importorskip("soundfile", reason="needs the extra foreword[speech]")

import base64

import numpy as np
from server_rig import serving

from foreword import LLM, SamplingParams
from pytorch.speech_models import encoded, samples
from pytorch.vision_models import save

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")
ENGINE = {"executor": "transformers", "dtype": "fp32", "num_threads": 1, "max_model_len": 300}
TONE = samples(0, 1.5, 8000)
SETTINGS = {"model": "talker", "temperature": 0.0, "ignore_eos": True}
TEXT = {"type": "text", "text": "write"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glmasr")
    save(folder, "glmasr")
    with serving(folder, engine=ENGINE, max_sound_seconds=3) as found:
        found.folder = folder
        yield found


def part(data, format="wav"):
    given = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    return {"type": "input_audio", "input_audio": {"data": given, "format": format}}


def test_every_format_gives_the_answer_of_the_library(server):
    files = {
        "wav": encoded(samples(0, 1.5, 44100), rate=44100),
        "flac": encoded(TONE, "FLAC", "PCM_16", 8000),
        "mp3": encoded(TONE, "MP3", "MPEG_LAYER_III", 8000),
        "ogg": encoded(TONE, "OGG", "VORBIS", 8000),
    }
    with LLM(str(server.folder), **ENGINE) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        conversations = [
            [{"role": "user", "content": [{"type": "audio", "audio": data}, TEXT]}] for data in files.values()
        ]
        outputs = llm.chat(conversations, params, progress=False)
    assert len({output.outputs[0].text for output in outputs}) > 1
    for (format, data), output in zip(files.items(), outputs, strict=True):
        body = {**SETTINGS, "max_tokens": 8, "messages": [{"role": "user", "content": [part(data, format), TEXT]}]}
        answer = server.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["message"]["content"] == output.outputs[0].text
        frames = server.frames("/v1/chat/completions", body)
        pieces = (frame["choices"][0]["delta"].get("content") or "" for frame in frames if frame["choices"])
        assert "".join(pieces) == output.outputs[0].text
    server.check_nothing_is_left()


@pytest.mark.parametrize(
    ("sound", "param", "reason"),
    [
        (part(b""), "messages[0].content[1]", "is not a sound"),
        (part("***"), "messages[0].content[1]", "is not base64"),
        (part(None), "messages[0].content[1]", "has no audio"),
        (part(encoded(TONE, rate=8000), "aac"), "messages[0].content[1].input_audio.format", "is not supported"),
        (part(encoded(TONE, rate=8000)[:-40]), "messages[0].content[1]", "its end is missing"),
        (part(encoded(np.zeros(8000 * 4), rate=8000)), "messages[0].content[1]", "may have 3 seconds"),
        (part(encoded(np.zeros(10**7), "FLAC", "PCM_16")), "messages[0].content[1]", "may have 3 seconds"),
        ({"type": "audio", "audio": "/etc/passwd"}, "messages[0].content[1]", "files of this machine are not read"),
        ({"type": "audio", "audio": "http://127.0.0.1:1/a.wav"}, "messages[0].content[1]", "not fetched"),
    ],
)
def test_a_bad_sound_is_status_400_with_its_field(server, sound, param, reason):
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT, sound]}]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert reason in error["message"]
    server.check_nothing_is_left()
