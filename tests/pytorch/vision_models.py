"""Tiny random models of transformers that see or hear, each saved with a processor and a tokenizer of bytes."""

import json

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from foreword.executors.transformers.media import load_processor
from pytorch.pillow_resizing import processor_by_pillow, unchecked

TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
SPECIAL = [
    "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<boi>", "<eoi>",
    "<sound>", *[f"<row_{i}_col_{j}>" for i in (1, 2, 3) for j in (1, 2, 3)], "<|image_start|>", "<|image_end|>",
    "<|img_thumbnail|>", *[f"<|img_row_{i}_col_{j}|>" for i in (1, 2, 3) for j in (1, 2, 3)],
]  # fmt: skip
TOKENS = {text: 256 + i for i, text in enumerate(SPECIAL)}
QWEN = {
    "image_token_id": TOKENS["<|image_pad|>"],
    "video_token_id": TOKENS["<|video_pad|>"],
    "vision_start_token_id": TOKENS["<|vision_start|>"],
    "vision_end_token_id": TOKENS["<|vision_end|>"],
}
QWEN_PIXELS = {"min_pixels": 256, "max_pixels": 2048}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] in ('image', 'audio') %}PLACE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def _qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7}
    config = hf.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": MROPE}, vision_config=vision, **QWEN)
    return hf.Qwen2VLForConditionalGeneration(config), hf.Qwen2VLImageProcessor(patch_size=7, **QWEN_PIXELS)


def _qwen2_5_vl():
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 7,
        "window_size": 28, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": MROPE}, vision_config=vision, **QWEN)
    return hf.Qwen2_5_VLForConditionalGeneration(config), hf.Qwen2VLImageProcessor(patch_size=7, **QWEN_PIXELS)


def _qwen3_vl(kind="Qwen3VL", **more):
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 7,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
    }  # fmt: skip
    text = {**TEXT, "head_dim": 8, "rope_parameters": MROPE, **more}
    config = getattr(hf, f"{kind}Config")(text_config=text, vision_config=vision, **QWEN)
    model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    return model, hf.Qwen2VLImageProcessor(patch_size=7, **QWEN_PIXELS)


def _qwen3_vl_moe():
    return _qwen3_vl("Qwen3VLMoe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def _qwen3_5():
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 7,
        "num_position_embeddings": 64,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    config = hf.Qwen3_5Config(text_config=text, vision_config=vision, **QWEN)
    model = hf.Qwen3_5ForConditionalGeneration(config)
    return model, hf.Qwen2VLImageProcessor(patch_size=7, **QWEN_PIXELS)


def _llava():
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**TEXT),
        vision_config=hf.CLIPVisionConfig(**VISION),
        image_token_index=TOKENS["<image>"],
        vision_feature_select_strategy="default",
    )
    size = {"shortest_edge": 28}
    return hf.LlavaForConditionalGeneration(config), hf.CLIPImageProcessor(size=size, crop_size=28)


def _pixtral():
    vision = hf.PixtralVisionConfig(**{**VISION, "image_size": 56}, head_dim=16)
    config = hf.LlavaConfig(
        text_config=hf.MistralConfig(**TEXT, head_dim=8),
        vision_config=vision,
        image_token_index=TOKENS["[IMG]"],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    processor = hf.PixtralImageProcessor(patch_size=7, size={"longest_edge": 35})
    return hf.LlavaForConditionalGeneration(config), processor


def _idefics3(kind="Idefics3"):
    vision = getattr(hf, f"{kind}VisionConfig")(**VISION)
    config = getattr(hf, f"{kind}Config")(
        text_config=hf.LlamaConfig(**TEXT), vision_config=vision, image_token_id=TOKENS["<image>"], scale_factor=2
    )
    model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    return model, getattr(hf, f"{kind}ImageProcessor")(**sizes)


def _smolvlm():
    return _idefics3("SmolVLM")


def _gemma3(**crops):
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(
            **TEXT, head_dim=8, sliding_window=12, layer_types=["sliding_attention", "full_attention"]
        ),
        vision_config=hf.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=16,
        image_token_id=TOKENS["<image>"],
        boi_token_index=TOKENS["<boi>"],
        eoi_token_index=TOKENS["<eoi>"],
        tie_word_embeddings=False,
    )
    processor = hf.Gemma3ImageProcessor(size={"height": 28, "width": 28}, image_seq_length=16, **crops)
    return hf.Gemma3ForConditionalGeneration(config), processor


def _gemma3_crops():
    return _gemma3(
        do_pan_and_scan=True, pan_and_scan_min_crop_size=8, pan_and_scan_max_num_crops=3,
        pan_and_scan_min_ratio_to_activate=1.3,
    )  # fmt: skip


LFM2 = {
    "downsample_factor": 2, "encoder_patch_size": 8, "tile_size": 32, "min_tiles": 2, "max_tiles": 4,
    "min_image_tokens": 2, "max_image_tokens": 6, "max_pixels_tolerance": 1.5,
}  # fmt: skip
"""Those of the processor of LFM2-VL, as published but for smaller numbers."""


def _lfm2_vl(**more):
    text = {**TEXT, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    vision = {key: value for key, value in VISION.items() if key != "image_size"} | {"patch_size": 8}
    config = hf.Lfm2VlConfig(
        text_config=hf.Lfm2Config(**text),
        vision_config=hf.Siglip2VisionConfig(**vision, num_patches=25, vision_use_head=False),
        image_token_id=TOKENS["<image>"],
        projector_hidden_size=40,
        tie_word_embeddings=False,
        **more,
    )
    return hf.Lfm2VlForConditionalGeneration(config), LFM2


def _lfm2_vl_plain():
    return _lfm2_vl(projector_use_layernorm=False, projector_bias=False)


def _gemma4(vision, **text):
    ids = {f"{key}_token_id": TOKENS[f"<{key}>"] for key in ("image", "boi", "eoi")}
    config = hf.Gemma4Config(
        text_config=hf.Gemma4TextConfig(**{
            **TEXT, "head_dim": 8, "global_head_dim": 16, "sliding_window": 12, "pad_token_id": 0,
            "vocab_size_per_layer_input": 320, **text,
        }),
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "patch_size": 4, **vision,
            "position_embedding_size": 280 * vision["pooling_kernel_size"],
        },
        audio_config=None,
        tie_word_embeddings=False,
        **ids,
    )  # fmt: skip
    own = {"patch_size": 4, "pooling_kernel_size": vision["pooling_kernel_size"], "max_soft_tokens": 70}
    return hf.Gemma4ForConditionalGeneration(config), Gemma4ImageProcessorPil(**own)


def _gemma4_e2b():
    """As published, layers have inputs of their own and share keys, and products have bounds."""
    vision = {
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2,
        "use_clipped_linears": True,
    }  # fmt: skip
    layers = ["sliding_attention", "full_attention"]
    return _gemma4(
        vision, num_hidden_layers=4, layer_types=2 * layers, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        use_double_wide_mlp=True,
    )  # fmt: skip


def _gemma4_large():
    """As published, the vectors of an image see each other, and are standardized."""
    vision = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 3,
        "standardize": True,
    }  # fmt: skip
    return _gemma4(
        vision, layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision", attention_k_eq_v=True, num_global_key_value_heads=1,
    )  # fmt: skip


def _glmasr():
    audio = {
        "num_mel_bins": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
        "hidden_size": 32, "max_position_embeddings": 200,
    }  # fmt: skip
    config = hf.GlmAsrConfig(
        audio_config=audio, text_config={"model_type": "llama", **TEXT}, audio_token_id=TOKENS["<sound>"]
    )
    extractor = hf.WhisperFeatureExtractor(feature_size=16, sampling_rate=8000, chunk_length=4, n_fft=200)
    return hf.GlmAsrForConditionalGeneration(config), extractor


MODELS = {
    "qwen2-vl": (_qwen2_vl, "Qwen2VLProcessor", "<|image_pad|>", {}),
    "qwen2.5-vl": (_qwen2_5_vl, "Qwen2_5_VLProcessor", "<|image_pad|>", {}),
    "qwen3-vl": (_qwen3_vl, "Qwen3VLProcessor", "<|image_pad|>", {}),
    "qwen3.5": (_qwen3_5, "Qwen3VLProcessor", "<|image_pad|>", {}),
    "qwen3-vl-moe": (_qwen3_vl_moe, "Qwen3VLProcessor", "<|image_pad|>", {}),
    "llava": (
        _llava, "LlavaProcessor", "<image>",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "pixtral": (_pixtral, "PixtralProcessor", "[IMG]", {"patch_size": 7}),
    "idefics3": (_idefics3, "Idefics3Processor", "<image>", {"image_seq_len": 4}),
    "smolvlm": (_smolvlm, "SmolVLMProcessor", "<image>", {"image_seq_len": 4}),
    "lfm2-vl": (_lfm2_vl, "Lfm2VlProcessor", "<image>", {}),
    "lfm2-vl-plain": (_lfm2_vl_plain, "Lfm2VlProcessor", "<image>", {}),
    "gemma4": (_gemma4_e2b, "Gemma4Processor", "<image>", {}),
    "gemma4-large": (_gemma4_large, "Gemma4Processor", "<image>", {}),
    "glmasr": (_glmasr, "GlmAsrProcessor", "<sound>", {"audio_token": "<sound>"}),
    "gemma3": (_gemma3, "Gemma3Processor", "<boi>", {"image_seq_length": 16}),
    "gemma3-crops": (_gemma3_crops, "Gemma3Processor", "<boi>", {"image_seq_length": 16}),
}  # fmt: skip
"""Name → model and image processor or its settings, class of processor, placeholder of an image, settings of the
processor.
"""


def save(folder, name):
    """Write a model. Returns it."""
    make, processor, place, settings = MODELS[name]
    torch.manual_seed(0)
    model, images = make()
    for weight in model.parameters():  # such that outputs depend on inputs
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    model.generation_config = hf.GenerationConfig(eos_token_id=256, pad_token_id=256)
    model.save_pretrained(folder)
    tokenizer(place if not name.startswith("gemma3") else "<image>").save_pretrained(folder)
    if isinstance(images, dict):  # transformers has none without torchvision
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
    else:
        images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor, **settings}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", place))
    return model.eval()


def load(folder):
    """The model in float32, and its processor."""
    model = hf.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if model.config.model_type == "gemma4":
        return model.eval(), _gemma4_processor(folder)
    by_pillow = model.config.model_type == "lfm2_vl"
    return model.eval(), processor_by_pillow(folder, "lfm2_vl") if by_pillow else load_processor(folder, model)


def _gemma4_processor(folder):
    """The processor of Gemma 4 of images alone: that of videos needs torchvision."""
    texts = hf.AutoTokenizer.from_pretrained(folder)
    texts.boa_token = texts.eoa_token = "<sound>"  # the processor of messages wants them without sounds, too
    return unchecked(hf.Gemma4Processor)(None, Gemma4ImageProcessorPil.from_pretrained(folder), texts, None)


def texts_of(folder, conversations):
    """The prompts of conversations by the chat template of a directory."""
    template = hf.AutoTokenizer.from_pretrained(folder).apply_chat_template
    texts = [template(one, tokenize=False, add_generation_prompt=True) for one in map(_plain, conversations)]
    assert all(isinstance(text, str) for text in texts)
    return texts


def _plain(messages):
    """The messages with the only type of images that the templates know."""
    return [
        {**m, "content": [{"type": "image"} if part["type"] == "image_url" else part for part in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]


def conversation_tokens(model, processor, texts, images):
    """The tokens of prompts with images, and those of transformers' own generate after each."""
    prompts, tokens = [], []
    configured = processor.image_processor.to_dict()  # the processor reads none of those of pan and scan
    crops = {key: value for key, value in configured.items() if "pan_and_scan" in key and value is not None}
    for text, given in zip(texts, images, strict=True):
        inputs = processor(text=[text], images=given or None, return_tensors="pt", add_special_tokens=False, **crops)
        output = model.generate(
            **inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=256
        )
        prompts.append(inputs["input_ids"][0].tolist())
        tokens.append(output[0, len(prompts[-1]) :].tolist())
    return prompts, tokens


def tokenizer(image):
    """A token per byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<eos>",
        extra_special_tokens={"image_token": image, "boi_token": "<boi>", "eoi_token": "<eoi>"},
    )  # fmt: skip
