"""A model of transformers that hears: equal to transformers' own generate."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("PIL.Image", reason="needs the extra foreword[vision]")
soundfile = pytest.importorskip("soundfile", reason="needs the extra foreword[speech]")
soxr = pytest.importorskip("soxr", reason="needs the extra foreword[speech]")

import base64
import wave
from io import BytesIO

import numpy as np

from foreword import LLM, SamplingParams
from foreword.errors import RequestError
from foreword.executors.transformers.media import load_processor
from pytorch.vision_models import save

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")
OPTIONS = {"executor": "transformers", "dtype": "fp32", "num_threads": 1, "max_model_len": 300, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def samples(seed, seconds):
    return np.random.default_rng(seed).integers(-(2**15), 2**15, int(8000 * seconds)).astype("<i2")


def wav(values, rate=8000):
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(values.tobytes())
    return file.getvalue()


def floats(values, rate):
    file = BytesIO()
    soundfile.write(file, values, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


SOUNDS = [samples(0, 1.7), samples(1, 0.6), samples(2, 3.1)]


def test_conversations_with_sounds_get_the_tokens_of_transformers(tmp_path):
    save(tmp_path, "glmasr")
    parts = [{"type": "audio", "audio": wav(SOUNDS[0])}, {"type": "audio", "audio": wav(SOUNDS[2])}]
    data = base64.b64encode(wav(SOUNDS[1])).decode()
    parts.insert(1, {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    text = {"type": "text", "text": "write"}
    conversations = [[{"role": "user", "content": [part, text]}] for part in parts]
    with LLM(str(tmp_path), **OPTIONS, max_num_batched_tokens=16, check="full") as llm:
        outputs = [llm.chat(conversations, GREEDY, progress=False) for _ in range(2)]
        at_another_rate = soxr.resample(SOUNDS[0].astype(np.float32) / 2**15, 8000, 16000)
        parts = [{"type": "audio", "audio": floats(at_another_rate, 16000)}]
        parts.append({"type": "audio", "audio": floats(soxr.resample(at_another_rate, 16000, 8000), 8000)})
        resampled = llm.chat([[{"role": "user", "content": [part, text]}] for part in parts], GREEDY, progress=False)
        assert resampled[0].outputs[0].token_ids == resampled[1].outputs[0].token_ids
        with pytest.raises(RequestError, match=r"content\[0\].*the model takes no image"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])
    assert all(output.metrics.num_cached_tokens > 5 for output in outputs[1])
    model = transformers.AutoModelForMultimodalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    processor = load_processor(tmp_path, model)
    expected = []
    for output, sound in zip(outputs[0], SOUNDS, strict=True):
        inputs = processor(
            text=[output.prompt], audio=[sound.astype(np.float32) / 2**15], sampling_rate=8000, return_tensors="pt",
            add_special_tokens=False,
        )  # fmt: skip
        tokens = model.generate(
            **inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=256
        )
        expected.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert [[output.outputs[0].token_ids for output in wave] for wave in outputs] == [expected] * 2
