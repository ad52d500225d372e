"""Whisper: the tokens and segments of transformers' own generate, with all rules of its generation config."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("soundfile", reason="needs the extra foreword[speech]")

import numpy as np

from foreword import LLM, SamplingParams
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ModelError, RequestError
from pytorch.speech_models import ENGLISH, IDS, RATE, encoded, own_segments, own_tokens, samples, save

OPTIONS = {"executor": "transformers", "dtype": "fp32", "num_threads": 1, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A model of three languages as transformers has it, and as Foreword."""
    folder = tmp_path_factory.mktemp("whisper")
    save(folder)
    with LLM(str(folder), check="full", max_num_batched_tokens=8, max_num_seqs=4, **OPTIONS) as llm:
        yield loaded(folder), llm


def loaded(folder):
    kind = transformers.WhisperForConditionalGeneration
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def segments(found):
    return [(one.start, one.end, list(one.token_ids)) for one in found.segments]


def test_requests_get_the_tokens_of_transformers_generate_under_all_rules(whisper):
    model, llm = whisper
    sounds = [samples(seed, 0.9) for seed in range(5)]
    chosen = [
        {"language": language, "task": task, "timestamps": timestamps}
        for language, task in (("en", "transcribe"), ("french", "translate"))
        for timestamps in (False, True)
    ]
    prompts = [{"audio": sound, **choice} for sound in sounds for choice in chosen]
    outputs = llm.generate(prompts, GREEDY, progress=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    for prompt, output, found in zip(prompts, outputs, tokens, strict=True):
        choice = {"language": prompt["language"], "task": prompt["task"], "return_timestamps": prompt["timestamps"]}
        assert output.prompt_token_ids + found == own_tokens(model, prompt["audio"], **choice)
    assert len({tuple(one) for one in tokens}) > 10
    suppressed = set(model.generation_config.suppress_tokens)
    assert not suppressed & {token for one in tokens for token in one}
    free = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True,
                                                extra_args={"generation_config": False}), progress=False)  # fmt: skip
    assert suppressed & {token for output in free for token in output.outputs[0].token_ids}


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        (0.7, {"language": "en"}),
        (3.7, {"language": "en"}),
        (2.5, {"task": "translate"}),  # the language is detected
        (1.0, {}),
        (3.1, {"language": "fr", "prompt": "Bonjour, " * 20}),
    ],
)
def test_sounds_of_any_length_get_the_segments_of_transformers(whisper, seconds, options):
    model, llm = whisper
    sound = samples(int(10 * seconds), seconds)
    own = {key: value for key, value in options.items() if key != "prompt"}
    if "prompt" in options:
        tokens = llm.tokenizer.encode(" " + options["prompt"].strip(), add_special_tokens=False)[-31:]
        own["prompt_ids"] = torch.tensor([IDS["<|startofprev|>"], *tokens])
    expected = own_segments(model, sound, return_timestamps=True, **({"task": "transcribe"} | own))
    found = llm.transcribe(sound, timestamps=True, **options)
    assert segments(found) == expected
    text = "".join(one.text for one in found.segments)
    assert (found.text, found.seconds) == (text.lstrip(), pytest.approx(seconds))
    assert [one.text for one in found.segments] == [
        llm.tokenizer.decode([token for token in tokens if token < 256]) for _, _, tokens in expected
    ]


def test_without_timestamps_a_short_sound_is_one_segment(whisper):
    model, llm = whisper
    sound = samples(3, 0.8)
    own = own_tokens(model, sound, language="de", task="transcribe")[4:]
    found = llm.transcribe(sound, language="German")
    end = own.index(256) if 256 in own else len(own)
    [segment] = found.segments
    assert (list(segment.token_ids), segment.start, segment.end, found.language) == (own[:end], 0.0, 1.0, "german")


def test_scores_are_those_of_the_unchanged_logits(whisper):
    model, llm = whisper
    sound = samples(4, 0.8)
    found = llm.transcribe(sound, language="en", timestamps=True, scores=True)
    features = torch.tensor(llm.media.speech.features(sound))[None]
    tokens = [257, IDS["<|en|>"], IDS["<|transcribe|>"]]
    [output] = llm.generate({"audio": sound, "prompt_token_ids": tokens}, GREEDY, progress=False)
    outputs = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(features, decoder_input_ids=torch.tensor([[*tokens, *outputs]])).logits[0].double()
    logprobs = logits.log_softmax(-1)
    mean = float(np.mean([logprobs[2 + i, token] for i, token in enumerate(outputs)]))
    first = found.segments[0]
    assert first.avg_logprob == pytest.approx(mean, rel=1e-3)
    assert first.no_speech_prob == pytest.approx(float(logprobs[0, IDS["<|nospeech|>"]].exp()), rel=1e-3)
    assert first.compression_ratio > 0


def test_files_of_another_rate_are_resampled(whisper):
    _, llm = whisper
    sound = samples(5, 0.9, 8000)
    files = [encoded(sound, "FLAC", "PCM_16", 8000), encoded(sound, "WAV", "PCM_16", 8000)]
    found = [llm.transcribe(file, language="en", timestamps=True) for file in files]
    assert segments(found[0]) == segments(found[1]) != []


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"language": "xx"}, "language"),
        ({"language": 5}, "language"),
        ({}, "language"),
        ({"language": "en", "task": "summarize"}, "task"),
        ({"language": "en", "timestamps": 1}, "timestamps"),
        ({"language": "en", "prompt_token_ids": [257]}, "language"),
        ({"language": "en", "audio": np.zeros(RATE + 1, np.float32)}, "audio"),
        ({"language": "en", "audio": np.full(RATE, 1e30, np.float32)}, "audio"),
        ({"language": "en", "audio": np.array([0.0, np.nan])}, "audio"),
        ({"language": "en", "audio": None, "input_features": np.zeros((8, 99), np.float32)}, "input_features"),
        ({"language": "en", "input_features": np.zeros((8, 100), np.float32)}, "input_features"),
        ({"encoder_token_ids": [5]}, "encoder_token_ids"),
    ],
)
def test_what_the_model_does_not_have_is_refused_by_name(whisper, prompt, field):
    _, llm = whisper
    given = {"audio": np.zeros(RATE, np.float32), **prompt}
    with pytest.raises(RequestError) as found:
        llm.generate(given, GREEDY, progress=False)
    assert found.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": "a<|endoftext|>b"}, "prompt"),
        ({"prompt": "a<|0.02|>b"}, "prompt"),
        ({"sampling_params": SamplingParams(n=2)}, "n"),
        ({"sampling_params": SamplingParams(stop="x")}, "stop"),
        ({"task": "x"}, "task"),
    ],
)
def test_options_of_a_transcription_that_do_not_exist_are_refused_by_name(whisper, options, field):
    with pytest.raises(RequestError) as found:
        whisper[1].transcribe(np.zeros(RATE, np.float32), **options)
    assert found.value.field == field


def test_drafts_change_no_token_of_an_output_with_timestamps(whisper, tmp_path):
    prompts = [{"audio": samples(seed, 0.9), "language": "en", "timestamps": True} for seed in range(4)]
    expected = [output.outputs[0].token_ids for output in whisper[1].generate(prompts, GREEDY, progress=False)]
    save(tmp_path)
    drafts = SpeculationConfig(num_tokens=3, min_match=1, adaptive=False)
    with LLM(str(tmp_path), speculation=drafts, **OPTIONS) as llm:
        outputs = llm.generate(prompts, GREEDY, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.metrics.num_accepted_drafts for output in outputs) > 5


def test_a_model_of_one_language(tmp_path):
    save(tmp_path, languages=ENGLISH, seed=2)
    model, sound = loaded(tmp_path), samples(1, 2.2)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        expected = own_segments(model, sound, return_timestamps=True)
        assert segments(llm.transcribe(sound)) == segments(llm.transcribe(sound, language="en")) == expected
        for name, value in (("language", "fr"), ("task", "translate")):
            with pytest.raises(RequestError) as found:
                llm.transcribe(sound, **{name: value})
            assert found.value.field == name


def test_a_configuration_may_ask_for_timestamps(tmp_path):
    save(tmp_path, return_timestamps=True)
    model, sound = loaded(tmp_path), samples(2, 0.9)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        [output] = llm.generate({"audio": sound, "language": "en"}, GREEDY, progress=False)
        assert output.prompt_token_ids + list(output.outputs[0].token_ids) == own_tokens(model, sound, language="en")
        assert segments(llm.transcribe(sound, language="en")) == own_segments(model, sound, language="en")


def test_tokens_that_an_old_configuration_forces_come_first(tmp_path):
    forced = [[1, IDS["<|de|>"]], [2, IDS["<|transcribe|>"]], [3, IDS["<|notimestamps|>"]]]
    save(tmp_path, forced_decoder_ids=forced)
    model, sound = loaded(tmp_path), samples(2, 0.9)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        [output] = llm.generate({"audio": sound}, GREEDY, progress=False)
        assert output.prompt_token_ids == [257, *(token for _, token in forced)]
        assert output.prompt_token_ids + list(output.outputs[0].token_ids) == own_tokens(model, sound)
        assert segments(llm.transcribe(sound, timestamps=True)) == own_segments(model, sound, return_timestamps=True)


@pytest.mark.parametrize(
    "generation", [{"logprob_threshold": -1.0}, {"condition_on_prev_tokens": True}, {"bad_words_ids": [[5, 6]]}]
)
def test_rules_that_are_not_applied_are_refused_by_name(tmp_path, generation):
    save(tmp_path, **generation)
    with pytest.raises(ModelError, match=f"{next(iter(generation))}.* not applied"):
        LLM(str(tmp_path), **OPTIONS)
