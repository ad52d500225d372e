"""Tiny random Whispers of windows of one second, with a tokenizer of bytes, languages, tasks and timestamps."""

from io import BytesIO

import numpy as np
import soundfile
import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

RATE = 16000
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|fr|>", "<|de|>", "<|translate|>", "<|transcribe|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
IDS = {text: 256 + i for i, text in enumerate(SPECIAL)}
FIRST_TIMESTAMP = 256 + len(SPECIAL)
VOCAB_SIZE = FIRST_TIMESTAMP + 51
RULES = {
    "suppress_tokens": [
        *range(10, 40),
        *(IDS[f"<|{name}|>"] for name in ("startoftranscript", "translate", "nospeech")),
    ],
    "begin_suppress_tokens": [*range(60, 120), IDS["<|endoftext|>"]],
    "max_initial_timestamp_index": 20,
}
MULTILINGUAL = {
    "is_multilingual": True,
    "lang_to_id": {f"<|{code}|>": IDS[f"<|{code}|>"] for code in ("en", "fr", "de")},
    "task_to_id": {task: IDS[f"<|{task}|>"] for task in ("transcribe", "translate")},
}
ENGLISH = {"is_multilingual": False}


def save(folder, *, seed=0, rules=RULES, languages=MULTILINGUAL, **generation):
    """Write a model. Returns it. generation: more of its generation config."""
    config = hf.WhisperConfig(
        vocab_size=VOCAB_SIZE, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=50,
        max_target_positions=64, pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=257,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = hf.WhisperForConditionalGeneration(config)
    for weight in model.parameters():  # such that outputs depend on inputs
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.5)
    with torch.no_grad():  # timestamps are about as likely as text
        model.model.decoder.embed_tokens.weight[FIRST_TIMESTAMP:] *= 1.3
    model.generation_config = hf.GenerationConfig(
        pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=257, max_length=64,
        no_timestamps_token_id=IDS["<|notimestamps|>"], prev_sot_token_id=IDS["<|startofprev|>"],
        **rules, **languages, **generation,
    )  # fmt: skip
    model.save_pretrained(folder)
    hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model.eval()


def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(f"<|{0.02 * i:.2f}|>", special=False) for i in range(51)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def samples(seed, seconds, rate=RATE):
    """Noise of changing loudness and colour, float32 in [−1, 1]."""
    noise = np.random.default_rng(seed)
    count = int(rate * seconds)
    white = noise.standard_normal(count)
    pieces = np.repeat(noise.uniform(0.05, 1, count // 800 + 1), 800)[:count]
    tone = np.sin(np.arange(count) * noise.uniform(0.05, 1.5))
    return (0.2 * pieces * (white * noise.uniform(0.1, 1) + tone)).clip(-1, 1).astype(np.float32)


def encoded(values, format="WAV", subtype="FLOAT", rate=RATE):
    """A file of samples."""
    file = BytesIO()
    soundfile.write(file, values, rate, format=format, subtype=subtype)
    return file.getvalue()


def features_of(values):
    """Return the features of transformers' own extractor, as its pipelines give them to generate: longer sounds are not
    filled up.
    """
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    whole = {} if len(values) <= RATE else {"truncation": False, "padding": "longest"}
    return extractor(values, sampling_rate=RATE, return_tensors="pt", **whole)["input_features"]


def own_tokens(model, values, **options):
    """The decoder's prompt and the tokens of transformers' own generate for one window."""
    with torch.inference_mode():
        found = model.generate(features_of(values), do_sample=False, force_unique_generate_call=True, **options)
    return found[0].tolist()


def own_segments(model, values, **options):
    """The segments (start, end, tokens) of transformers' own generate for a sound of any length."""
    with torch.inference_mode():
        found = model.generate(features_of(values), return_segments=True, do_sample=False, **options)
    segments = [(one["start"], one["end"], one["tokens"].tolist()) for one in found["segments"][0]]
    return [(round(float(start), 3), round(float(end), 3), _once(tokens)) for start, end, tokens in segments if tokens]


def _once(tokens):
    """Transformers ends a window's last segment with the timestamp at which the next window begins, too."""
    return tokens[:-1] if len(tokens) > 1 and min(tokens[-2:]) >= FIRST_TIMESTAMP else tokens
