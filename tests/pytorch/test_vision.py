"""Models of transformers that see images: equal to transformers' own generate."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("PIL.Image", reason="needs the extra foreword[vision]")

from foreword import LLM, AsyncLLM, SamplingParams
from foreword.engine.chat import num_chat_tokens
from foreword.engine.observer import EngineMetrics
from foreword.errors import ContextLengthError, RequestError
from foreword.executors.transformers import executor
from foreword.executors.transformers.media import TransformersEncoder
from foreword.media import MediaLimits
from foreword.media.parts import take_media
from models.seeing import CONVERSATIONS, IMAGES, PART_A, image
from pytorch.vision_models import MODELS, MROPE, conversation_tokens, load, save

SEEING = (
    "qwen2-vl",
    "qwen2.5-vl",
    "llava",
    "pixtral",
    "idefics3",
    "smolvlm",
    "gemma3",
    "gemma3-crops",
    "qwen3-vl",
    "qwen3-vl-moe",
)
NATIVE = ("qwen3.5", "lfm2-vl", "lfm2-vl-plain", "gemma4", "gemma4-large")
"""Models whose requests have a cache of the model's own in transformers, or whose processor of messages needs
torchvision: see test_seeing_models.py.
"""
NEEDS = {"pixtral": "torchvision", "smolvlm": "num2words"}
OPTIONS = {"executor": "transformers", "dtype": "fp32", "num_threads": 1, "max_model_len": 160, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def saved(folder, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"transformers' processor of {name} needs it")
    save(folder, name)
    return str(folder)


def expected(folder, texts):
    """The tokens of transformers' own generate."""
    return conversation_tokens(*load(folder), texts, IMAGES)[1]


@pytest.mark.parametrize("name", SEEING)
def test_conversations_with_images_get_the_tokens_of_transformers(tmp_path, name):
    folder = saved(tmp_path, name)
    found = []
    small = {"num_blocks": 42}
    if name == "gemma3":  # it has two KV groups, one of them with a window
        small = {"num_blocks": 50, "max_model_len": 96, "max_num_batched_tokens": 32, "reserve_full_prompt": False}
    chunked = {"max_num_batched_tokens": 16, "check": "full"}
    small |= {"watermark": 0.0, "async_scheduling": True, "prefix_caching": False}
    for options in (chunked, small) if name != "gemma3-crops" else ({**chunked, "max_model_len": 400},):
        metrics = EngineMetrics()
        with LLM(folder, **{**OPTIONS, **options}, observers=[metrics]) as llm:
            outputs = [llm.chat(CONVERSATIONS, GREEDY, progress=False) for _ in range(2)]
            texts = [output.prompt for output in outputs[0]]
            found += [[output.outputs[0].token_ids for output in wave] for wave in outputs]
            if "num_blocks" in options:
                assert metrics.num_preemptions
            else:
                assert all(output.metrics.num_cached_tokens for output in outputs[1])
    tokens = expected(tmp_path, texts)
    assert len({tuple(one) for one in tokens}) > 3
    assert found == [tokens] * len(found)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        *(("qwen2-vl", sections) for sections in ([3, 1, 0], [4, 0, 0])),
        *((name, sections) for name in ("qwen3-vl", "qwen3.5") for sections in ([1, 0, 0], [11, 11, 10], None)),
    ],
)
def test_small_heads_have_the_rotary_sections_of_transformers(tmp_path, monkeypatch, name, sections):
    """The last components may rotate nothing. Interleaved sections may be those of large heads, or not be given."""
    if sections is None:
        monkeypatch.delitem(MROPE, "mrope_section")
    else:
        monkeypatch.setitem(MROPE, "mrope_section", sections)
    with LLM(saved(tmp_path, name), executor="numpy", max_model_len=160) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, progress=False)
    tokens = expected(tmp_path, [output.prompt for output in outputs])
    assert [output.outputs[0].token_ids for output in outputs] == tokens


@pytest.mark.parametrize(
    ("name", "owner", "method"), [("gemma3", TransformersEncoder, "see_all"), ("qwen3-vl", executor, "_with_deepstack")]
)
def test_images_are_refused_where_the_logits_are_not_those_of_the_model(tmp_path, monkeypatch, name, owner, method):
    monkeypatch.setattr(owner, method, lambda *_: SimpleNamespace(remove=lambda: None))
    with LLM(saved(tmp_path, name), **OPTIONS) as llm:
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\].*the model takes no image: .*differ"):
            llm.chat(CONVERSATIONS[0], GREEDY)
        assert llm.chat(CONVERSATIONS[2], GREEDY, progress=False)[0].outputs[0].num_tokens == 12


def test_coroutines_that_ask_about_images_at_once_get_the_answers_of_each(tmp_path):
    with LLM(saved(tmp_path, "llava"), **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.chat(CONVERSATIONS, GREEDY, progress=False)]

    async def answers():
        async def answer(llm, conversation):
            *_, last = [output async for output in llm.chat(conversation, GREEDY)]
            return last.outputs[0].token_ids

        async with AsyncLLM(str(tmp_path), **OPTIONS) as llm:
            return await asyncio.gather(*(answer(llm, conversation) for conversation in CONVERSATIONS))

    assert asyncio.run(answers()) == expected


def test_another_image_in_the_same_place_finds_no_cached_prefix(tmp_path):
    def ask(picture):
        return [{"role": "user", "content": [{"type": "text", "text": "0123"}, {"type": "image", "image": picture}]}]

    with LLM(saved(tmp_path, "llava"), **OPTIONS) as llm:
        first = llm.chat(ask(image(5, 28, 28)), GREEDY, progress=False)[0]
        other = llm.chat(ask(image(6, 28, 28)), GREEDY, progress=False)[0]
        same = llm.chat(ask(image(5, 28, 28)), GREEDY, progress=False)[0]
    assert other.metrics.num_cached_tokens < 16 < same.metrics.num_cached_tokens
    assert first.outputs[0].token_ids == same.outputs[0].token_ids


@pytest.mark.parametrize("cache_bytes", [0, 2 * 16 * 32 * 4, 1 << 20])
def test_encoder_outputs_are_kept_within_the_budget(tmp_path, cache_bytes, monkeypatch):
    with LLM(saved(tmp_path, "llava"), **OPTIONS, media_cache_bytes=cache_bytes) as llm:
        encoder, encoded = llm.media.encoder, []
        before = encoder.cache._encode
        monkeypatch.setattr(encoder.cache, "_encode", lambda image: encoded.append(image.digest) or before(image))
        encoder.cache._kept.clear()
        for seed in (0, 1, 0, 2, 0, 1):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": image(seed, 30, 30)}]}], GREEDY)
            assert encoder.cache.num_bytes <= cache_bytes
    assert len(encoded) == {0: 6, 4096: 4, 1 << 20: 3}[cache_bytes]


@pytest.mark.parametrize("name", ["llava", "idefics3", "gemma3-crops", "qwen2-vl"])
def test_vectors_are_counted_before_any_image_is_encoded(tmp_path, name, monkeypatch):
    with LLM(saved(tmp_path, name), **{**OPTIONS, "max_model_len": 400}) as llm:
        lengths = [len(output.prompt_token_ids) for output in llm.chat(CONVERSATIONS, GREEDY, progress=False)]
        encoder = llm.media.encoder
        own = sum(len(encoder.cache.encoded(one).vectors) for one in take_media(CONVERSATIONS[0], MediaLimits())[1])
        encoder.cache._kept.clear()
        monkeypatch.setattr(encoder.cache, "_encode", lambda image: pytest.fail("an image is encoded"))
        counted = [num_chat_tokens(llm.tokenizer, one, GREEDY, 400, {}, llm.media) for one in CONVERSATIONS]
        assert counted == lengths
        with pytest.raises(ContextLengthError, match=rf"messages\[0\]\.content\[2\] = .*: max_model_len is {own - 1}"):
            num_chat_tokens(llm.tokenizer, CONVERSATIONS[0], GREEDY, own - 1, {}, llm.media)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 3}),
        ("qwen2-vl", {"min_pixels": 4096, "max_pixels": 8192}),
    ],
)
def test_values_of_the_processor_of_a_request_give_the_tokens_of_the_native_executor(tmp_path, name, asked):
    folder, found = saved(tmp_path, name), []
    for kind in ("transformers", "numpy"):
        own = OPTIONS if kind == "transformers" else {"block_size": 4}
        with LLM(folder, **{**own, "executor": kind, "max_model_len": 400}) as llm:
            outputs = llm.chat(CONVERSATIONS[:2], GREEDY, progress=False, mm_processor_kwargs=asked)
            plain = llm.chat(CONVERSATIONS[1], GREEDY, progress=False)
            with pytest.raises(RequestError, match=r"mm_processor_kwargs\.max_pixel = 9: is not a value"):
                llm.chat(CONVERSATIONS[1], GREEDY, mm_processor_kwargs={"max_pixel": 9})
        found.append([(list(output.prompt_token_ids), output.outputs[0].token_ids) for output in outputs])
        assert len(plain[0].prompt_token_ids) < len(outputs[1].prompt_token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        (
            "qwen2-vl",
            [
                ({"min_pixels": 50_000_000}, r"kwargs\.min_pixels = 50000000: expected an integer from 1 to 16777216"),
                ({"max_pixels": "500"}, r"kwargs\.max_pixels = '500': expected an integer"),
                ({"max_pixels": 9}, "at least 256 and at most 9 pixels"),
                ({"resample": "bicubic"}, r"kwargs\.resample = 'bicubic': expected an integer from 0 to 5"),
                ({"do_pan_and_scan": False}, "do_pan_and_scan = False: is not a value of the model's processor"),
            ],
        ),
        ("idefics3", [({"max_image_size": {"longest_edge": 56}}, "image_seq_len is 4, a tile has 16 vectors")]),
        ("llava", [({"size": {"shortest_edge": 29}}, "a mapping with shortest_edge, each an integer from 1 to 28")]),
    ],
)
def test_values_of_the_processor_are_refused_by_name_before_any_image_is_processed(
    tmp_path, name, refused, monkeypatch
):
    with LLM(saved(tmp_path, name), **OPTIONS) as llm:
        monkeypatch.setattr(llm.media.encoder, "processed", None)
        for asked, reason in refused:
            for conversation in CONVERSATIONS[1:3]:
                with pytest.raises(RequestError, match=reason) as error:
                    llm.chat(conversation, GREEDY, mm_processor_kwargs=asked)
                assert str(tmp_path) not in str(error.value)
        if name != "llava":
            with pytest.raises(ContextLengthError):  # the number of vectors is computed
                num_chat_tokens(llm.tokenizer, CONVERSATIONS[0], GREEDY, 3, {}, llm.media)


def test_an_image_whose_vectors_see_each_other_must_fit_in_a_step(tmp_path):
    with LLM(saved(tmp_path, "gemma3"), **OPTIONS, max_num_batched_tokens=15) as llm:
        with pytest.raises(RequestError, match=r"more positions than the 15 of a step.*max_num_batched_tokens"):
            llm.chat(CONVERSATIONS[1], GREEDY)
        vectors = llm.model.loaded.module.get_input_embeddings().weight[5:25].numpy()  # text sees no later tokens
        outputs = llm.generate([list(range(5, 25)), {"prompt_embeds": vectors * 32**0.5}], GREEDY, progress=False)
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
        for at, value in ((4, 0.5), (19, 1), (3, 2)):
            wide = np.zeros((20, 33), np.float32)
            wide[at, -1] = value
            message = rf"prompt_embeds\[{at}, -1\].*is not a valid count of following vectors"
            with pytest.raises(RequestError, match=message):
                llm.generate([{"prompt_embeds": wide}], GREEDY)


def test_places_and_images_of_a_prompt_must_agree(tmp_path):
    with LLM(saved(tmp_path, "llava"), **OPTIONS, media=MediaLimits(max_images=2)) as llm:
        for content, reason in (
            ([PART_A, {"type": "text", "text": "<image>"}], r"content\[1\].*has <image>, the place of an image"),
            ([PART_A] * 3, r"content\[2\].*may have 2 parts of this kind"),
            ([{"type": "image"}], r"content\[0\].*has no image"),
            ([{"type": "input_file"}], r"content\[0\].*only text and image"),
            ([{"type": "input_audio", "input_audio": {}}], r"content\[0\].*the model takes no audio: .*no encoder"),
        ):
            with pytest.raises(RequestError, match=reason):
                llm.chat([{"role": "user", "content": content}])
        with pytest.raises(RequestError, match="cannot be cut"):
            llm.chat(CONVERSATIONS[1], SamplingParams(truncate_prompt_tokens=5))


def test_embeddings_of_tokens_are_prompts_like_the_tokens(tmp_path):
    prompt = list(range(5, 30))
    with LLM(saved(tmp_path, "llava"), **OPTIONS, max_num_batched_tokens=8) as llm:
        vectors = llm.model.loaded.module.get_input_embeddings().weight[prompt].numpy()
        outputs = llm.generate([prompt, {"prompt_embeds": vectors}], GREEDY, progress=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_every_tiny_model_is_tested():
    assert {*SEEING, *NATIVE, "glmasr"} == set(MODELS)
