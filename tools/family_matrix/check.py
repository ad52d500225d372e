"""Serves a tiny random model of every native family, in every executor and format, against transformers.

    PYTHONPATH=src:tests python tools/family_matrix/check.py            or: make families
    PYTHONPATH=src:tests python tools/family_matrix/check.py llama3 qwen3
    PYTHONPATH=src:tests python tools/family_matrix/check.py --draws 5 --seed 7 gemma3

The models are those of tests/data/models/make_tiny.py, and for each ``--draws`` others of its type with random sizes
and options (draw.py; a configuration that transformers does not take, or that is refused, is skipped), in the columns
without GGUF files, which cannot express every value. Each run has prompts in chunks, mixed steps, more requests than
there is memory for, and prompts with cached prefixes; the check fails if none was preempted or none found a prefix.

What is compared:

- in float32, with and without drafts: the log-probability of every token with an eager forward pass of transformers,
  and that the token is the most likely one, within a tolerance; of equal numbers, transformers takes the first ones;
- in other formats: every token with that of the same format for each request alone, and the median difference of the
  log-probabilities from transformers' within a tolerance for the format, or for models that are more sensitive;
- with an adapter of all linear layers: as in float32 and other formats, with a checkpoint with merged weights;
- from quantised checkpoints: the median difference from transformers' with the same weights as floats;
- from GGUF files that the package `gguf` writes, in float32 and in its Q8_0 and F16: as above. Keys that such files
  cannot express have the values of `models.gguf_models.EXPRESSIBLE`.

A refusal, a ConfigError or a ModelError, is printed. Any other difference is printed and fails the check.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "data" / "models"))

import gguf  # noqa: E402
import make_tiny  # noqa: E402
from draw import drawn  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from foreword import LLM, SamplingParams  # noqa: E402
from foreword.engine import EngineMetrics, RequestOutput  # noqa: E402
from foreword.errors import ConfigError, ModelError  # noqa: E402
from foreword.models.loader import load_model  # noqa: E402
from models import gguf_models  # noqa: E402
from models import quantized_checkpoints as stored  # noqa: E402
from models.lora_files import every_factor, is_turned, merged, write_peft  # noqa: E402
from models.recorded import TINY  # noqa: E402
from models.tiny import random_tensors, write_model  # noqa: E402

FLOATS: Mapping[str, Mapping[str, Any]] = {
    "numpy": {},
    "native": {"weight_format": "fp32", "kv_format": "fp32"},
    "torch": {"dtype": "fp32"},
}
FORMATS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "bf16": ({"weight_format": "bf16"}, 0.05),
    "int8": ({"weight_format": "int8"}, 0.1),
    "int8 keys": ({"weight_format": "fp32", "kv_format": "int8"}, 0.1),
    "q4": ({"weight_format": "q4"}, 1.0),
}
"""Of the native executor, with the largest median difference of log-probabilities."""
QUANTISED: Mapping[str, tuple[Mapping[str, Any], Callable[..., Any], Callable[[Any], Any], tuple[int, int]]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda random, *shape: stored.draw_awq(random, *shape, 32), lambda parts: stored.awq(parts, 32), (8, 1),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda random, *shape: stored.draw_gptq(random, *shape, 32), lambda parts: stored.gptq(parts, 32), (1, 8),
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 24]},
        lambda random, *shape: stored.draw_fp8(random, *shape, (16, 24), "weight_scale_inv"),
        lambda parts: stored.fp8(parts, (16, 24)), (1, 1),
    ),
    "compressed fp8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        lambda random, *shape: stored.draw_fp8(random, *shape, (1, shape[1])),
        lambda parts: stored.fp8(parts, (1, parts["weight"].shape[1])), (1, 1),
    ),
    "compressed words": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "0": {"weights": {"num_bits": 4, "symmetric": False, "group_size": 32}}}},
        lambda random, *shape: stored.draw_packed(random, *shape, 32, symmetric=False),
        lambda parts: stored.compressed_integers(parts, 32), (1, 1),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, stored.draw_modelopt, stored.nvfp4, (1, 16),
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        stored.draw_bitsandbytes, stored.bitsandbytes, (1, 1),
    ),
}  # fmt: skip
"""The quantization_config, what draws a matrix of some shape and what reads it, and the numbers of which its rows and
columns are multiples, otherwise it has floats.
"""
GGUF_FILES = {"gguf": None, "gguf Q8_0": gguf.GGMLQuantizationType.Q8_0}
COLUMNS = (*FLOATS, "device", *FORMATS, "drafts", "adapter", *QUANTISED, *GGUF_FILES)
DRAFTS: Mapping[str, Any] = {"speculation": "ngram", "speculation_min_match": 1}
TOLERANCE = 2e-3
"""The largest difference of log-probabilities in float32."""
MOST_BLOCKS, BLOCK_SIZE = 90, 4
PROMPTS, MAX_TOKENS = (3, 9, 14, 17, 5), 20
MAX_LEN, MAX_BATCHED, PREFIX_BATCHED = 40, 14, 22
"""The most tokens of a request and of a step, and of a step if a prompt is computed in one."""
YES, ERROR = "yes", "error"
DRAWN = " #"
"""Before the seed of a random model in its name."""
KINDS = {
    "u16": gguf.GGUFValueType.UINT16, "u32": gguf.GGUFValueType.UINT32, "i32": gguf.GGUFValueType.INT32,
    "f32": gguf.GGUFValueType.FLOAT32, "bool": gguf.GGUFValueType.BOOL, "str": gguf.GGUFValueType.STRING,
}  # fmt: skip
Tiny = Mapping[str, Any]
"""A configuration, and the shapes of the tensors of its checkpoint."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--draws", type=int, default=0, help="random other models of each type (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them (default: %(default)s)")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    wrong = []
    columns = options.columns.split(",")
    for given, known in ((options.names, TINY), (columns, COLUMNS)):
        if unknown := [one for one in given if one not in known]:
            parser.error(f"{', '.join(unknown)}: must be of {', '.join(known)}")
    for name, tiny in models(options.names or TINY, range(options.seed, options.seed + options.draws)):
        found = dict(cells(name, tiny, columns))
        for column, result in found.items():
            if result != YES:
                print(f"{name}, {column}: {result}", flush=True)
            if result.startswith(ERROR):
                wrong.append(f"{name}, {column}")
        print(f"{name}: {sum(result == YES for result in found.values())} of {len(found)}", flush=True)
    if wrong:
        sys.exit(f"not as transformers: {'; '.join(wrong)}")


def models(names: Iterable[str], seeds: Iterable[int]) -> Iterator[tuple[str, Tiny]]:
    """Yield the recorded models of these names, and random others of their types."""
    for name in names:
        tiny = TINY[name]
        yield name, tiny
        for seed in seeds if name not in make_tiny.SAME_ARITHMETIC else ():
            config = drawn(tiny["config"], seed)
            try:
                yield f"{name}{DRAWN}{seed}", {"config": config, "shapes": shapes_of(config)}
            except Exception as error:  # configurations raise errors of any type
                print(f"{name}{DRAWN}{seed}: not taken by transformers: {' '.join(str(error).split()):.80}", flush=True)


def shapes_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of the tensors that transformers saves, but for those that follow from the configuration or
    have no elements.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place) / "empty", config, {})
        made = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            names = (name for name in sorted(file.keys()) if not name.endswith(make_tiny.BUFFERS))
            shapes = {name: list(file.get_slice(name).get_shape()) for name in names}
            return {name: shape for name, shape in shapes.items() if 0 not in shape}


def cells(name: str, tiny: Tiny, columns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each column with its result."""
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place) / "model", tiny["config"], random_tensors(tiny["shapes"]))
        try:
            load_model(folder)
            rig = Rig(folder, tiny["config"]["vocab_size"], oracle_of(folder, name))
        except ModelError as error:
            yield "all", str(error).replace(f"{folder}/", "")
            return
        for column in columns:
            if column in GGUF_FILES and DRAWN in name:
                continue
            try:
                if column in GGUF_FILES:
                    checked_gguf(column, name, tiny, Path(place) / column)
                elif column in QUANTISED:
                    checked_quantised(column, name, tiny, Path(place) / column)
                elif column == "adapter":
                    checked_adapter(name, tiny, rig)
                else:
                    checked(column, rig)
            except (ConfigError, ModelError) as error:
                yield column, str(error).replace(f"{folder}/", "")
            except Exception as error:  # models fail in many ways
                traceback.print_exc(limit=-2)
                yield column, f"{ERROR}: {' '.join(str(error).split()):.200}"
            else:
                yield column, YES


def oracle_of(folder: Path, name: str) -> transformers.PreTrainedModel:
    """Return the model of transformers in a folder; for a recorded name its own type computes.

    Longrope has the long frequencies, and their scale, for every length, as `MAX_LEN` selects for all requests.
    """
    same = make_tiny.SAME_ARITHMETIC.get(name)
    is_other = same is not None
    config = copy.deepcopy(make_tiny.MODELS[name]) if is_other else transformers.AutoConfig.from_pretrained(folder)
    rules = getattr(config, "rope_parameters", None) or {}
    if rules.get("rope_type") == "longrope" and rules["original_max_position_embeddings"] < MAX_LEN:
        rules["short_factor"] = rules["long_factor"]
        if "long_mscale" in rules:
            rules["short_mscale"] = rules["long_mscale"]
    options: dict[str, Any] = {
        "config": config, "attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32
    }  # fmt: skip
    if same is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with tempfile.TemporaryDirectory() as place:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
        with safe_open(Path(place) / "model.safetensors", "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        with safe_open(folder / "model.safetensors", "np") as file:
            tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
        other = write_model(Path(place) / "other", config.to_dict(), same.as_other(shapes, tensors))
        return transformers.AutoModelForCausalLM.from_pretrained(other, **options).eval()


def checked_gguf(column: str, name: str, tiny: Tiny, place: Path) -> None:
    """Serve the model from a GGUF file and compare. Raise ConfigError or ModelError for what is refused."""
    config = tiny["config"]
    changed = gguf_models.expressible(config)
    if config["model_type"] not in gguf_models.ARCHITECTURES:
        raise ModelError("GGUF files have no such architecture")
    if changed != config and name in make_tiny.SAME_ARITHMETIC:
        raise ModelError("GGUF files cannot express it")
    shapes = tiny["shapes"] if changed == config else shapes_of(changed)
    tensors = random_tensors(shapes)
    oracle = oracle_of(write_model(place / "model", changed, tensors), name)
    file = place / "model.gguf"
    write_gguf(file, changed, tensors, GGUF_FILES[column])
    rig = Rig(file, changed["vocab_size"], oracle)
    if GGUF_FILES[column] is None:
        compare(rig.serve("native", FLOATS["native"]), oracle)
    else:
        compare_in_the_median(rig.serve("native", {"kv_format": "bf16"}), oracle, 0.1)


def write_gguf(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], quant: gguf.GGMLQuantizationType | None
) -> None:
    """Write a file as converters of llama.cpp name its parts, with the package `gguf`. quant: the format of matrices
    whose rows are whole blocks of it; the others have F16.
    """
    more, divisors = gguf_models.rotary(config)
    writer = gguf.GGUFWriter(path, gguf_models.architecture_of(config))
    for key, (kind, value) in (gguf_models.metadata(config) | gguf_models.xielu(tensors) | more).items():
        if key == "general.architecture":
            continue
        if kind.startswith("["):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, KINDS[kind])
    for name, array in (gguf_models.gguf_tensors(config, tensors) | divisors).items():
        array, stored = np.ascontiguousarray(array, np.float32), None
        if quant is not None and array.ndim > 1 and not any(part in name for part in gguf_models.AS_FLOATS):
            half = gguf.GGMLQuantizationType.F16
            stored = quant if array.shape[-1] % gguf.GGML_QUANT_SIZES[quant][0] == 0 else half
            array = gguf.quants.quantize(array, stored)
        writer.add_tensor(name, array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def checked_quantised(column: str, name: str, tiny: Tiny, place: Path) -> None:
    """Serve the model from a quantised checkpoint and compare. Raise ConfigError or ModelError for what is refused."""
    config, (quantization, draw, loop, units) = tiny["config"], QUANTISED[column]

    def is_drawn(name: str, shape: tuple[int, ...]) -> bool:
        return stored.is_linear(name, shape) and not any(n % unit for n, unit in zip(shape, units, strict=True))

    plain, turned = random_tensors(tiny["shapes"]), partial(is_turned, tiny["shapes"])
    tensors, floats = stored.drawn_instead(plain, draw, loop, is_drawn, turned)
    oracle = oracle_of(write_model(place / "floats", config, floats), name)
    folder = write_model(place / "model", {**config, "quantization_config": quantization}, tensors)
    rig = Rig(folder, config["vocab_size"], oracle)
    for executor, options in {"numpy": {}, "native": {}, "torch": {"dtype": "fp32"}}.items():
        compare_in_the_median(rig.run(executor, options, MOST_BLOCKS)[0], oracle, 0.1)


def checked_adapter(name: str, tiny: Tiny, rig: Rig) -> None:
    """Serve the model with an adapter and compare. Raise ConfigError or ModelError for what is refused."""
    factors = every_factor(tiny["shapes"])
    adapter = write_peft(rig.path.with_name("adapter"), factors, target_modules="all-linear")
    weights = merged(random_tensors(tiny["shapes"]), factors, 8 / 4)
    oracle = oracle_of(write_model(rig.path.with_name("merged"), tiny["config"], weights), name)
    for executor in FLOATS:
        for settings in ({}, DRAFTS):
            compare(rig.serve(executor, FLOATS[executor], adapter=adapter, **settings), oracle)
    for column in FORMATS:
        checked_format(column, rig, oracle, adapter=adapter)


def checked_format(column: str, rig: Rig, oracle: transformers.PreTrainedModel, **settings: Any) -> None:
    """Serve the model natively in a format and compare."""
    options, tolerance = FORMATS[column]
    options = {"kv_format": "bf16", **options}
    outputs = rig.serve("native", options, **settings)
    alone, _ = rig.run("native", options, MOST_BLOCKS, max_num_seqs=1, prefix_caching=False, **settings)
    same_tokens(outputs, alone)
    quants = gguf.GGMLQuantizationType
    compare_in_the_median(outputs, oracle, tolerance, quants.Q4_0 if column == "q4" else quants.Q8_0)


def checked(column: str, rig: Rig) -> None:
    """Serve the model as the column says and compare. Raise ConfigError or ModelError for what is refused."""
    oracle = rig.oracle
    if column in FLOATS:
        compare(rig.serve(column, FLOATS[column]), oracle)
    elif column == "device":  # one short text, since Triton's interpreter is slow
        options = {"dtype": "fp32", "device": "cpu", "check": "off"}
        compare(rig.run("device", options, MOST_BLOCKS, is_short=True)[0], oracle)
    elif column in FORMATS:
        checked_format(column, rig, oracle)
    else:
        for executor in FLOATS:
            compare(rig.serve(executor, FLOATS[executor], **DRAFTS), oracle)


class Rig:
    """A tiny model whose requests are served."""

    def __init__(self, path: Path, vocab: int, oracle: transformers.PreTrainedModel) -> None:
        self.path, self.vocab, self.oracle = path, vocab, oracle
        self._num_blocks: dict[str, tuple[int, bool]] = {}  # by the format of keys and values

    def serve(self, executor: str, options: Mapping[str, Any], **settings: Any) -> list[RequestOutput]:
        """Return the outputs of all requests, with as many blocks as there may be so that some are preempted, or with
        the fewest that a request needs. Raise AssertionError if none is with the former, or none has a cached prefix.
        """
        kv_format = options.get("kv_format", "fp32")
        if kv_format not in self._num_blocks:
            self._num_blocks[kv_format] = self._that_preempt({**FLOATS["native"], "kv_format": kv_format})
        num_blocks, preempts = self._num_blocks[kv_format]
        for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5) if preempts else (1.0,):  # other tokens find other prefixes
            try:
                outputs, metrics = self.run(executor, options, int(num_blocks * share), **settings)
            except ConfigError:  # one request does not fit
                if share == 1:
                    raise
                break
            if metrics.num_cached_tokens and (metrics.num_preemptions or not preempts):
                return outputs
        raise AssertionError(f"{metrics.num_preemptions} preemptions, {metrics.num_cached_tokens} cached tokens")

    def _that_preempt(self, options: Mapping[str, Any]) -> tuple[int, bool]:
        """Return a number of blocks with which requests are preempted on the native executor, and whether they are: the
        fewest that a request needs may suffice for all, since windows free blocks, and states alone do not grow.
        """
        if not load_model(self.path).spec.num_slots:  # its blocks are states; with the fewest none is kept for others
            return MOST_BLOCKS, False
        num_blocks = MOST_BLOCKS
        while not self.run("native", options, num_blocks)[1].num_preemptions:
            fewer = min(num_blocks - 1, int(num_blocks * 0.9))
            try:
                self.run("native", options, fewer, is_short=True)
            except ConfigError:
                return num_blocks, False
            num_blocks = fewer
        return num_blocks, True

    def run(
        self,
        executor: str,
        options: Mapping[str, Any],
        num_blocks: int,
        *,
        adapter: Path | None = None,
        is_short: bool = False,
        **settings: Any,
    ) -> tuple[list[RequestOutput], EngineMetrics]:
        """Return the outputs of three waves of requests, and what the engine counted."""
        rng, metrics = np.random.default_rng(0), EngineMetrics()
        prompts = [rng.integers(3, self.vocab, length).tolist() for length in PROMPTS]
        longer = [*prompts[3], *rng.integers(3, self.vocab, 5).tolist()]
        three = [(prompts, MAX_TOKENS), (prompts[3:4], 2), ([longer], 4)]
        waves = [(prompts[1:2], 3)] if is_short else three
        more: dict[str, Any] = {"num_threads": 1} if executor in ("native", "torch") else {}
        more |= {} if adapter is None else {"loras": {"one": str(adapter)}}
        more |= {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "check": "full"}
        most = PREFIX_BATCHED if sees_prompt(self.oracle) else MAX_BATCHED
        more |= {"max_num_seqs": 5, "max_num_batched_tokens": most, "watermark": 0.0, **options, **settings}
        outputs: list[RequestOutput] = []
        with LLM(str(self.path), executor=executor, observers=[metrics], **more) as llm:
            for wave, max_tokens in waves:
                params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)
                outputs += llm.generate(wave, params, lora=None if adapter is None else "one", progress=False)
        if failed := next((output.error for output in outputs if output.error), None):
            raise AssertionError(f"a request failed: {failed}")
        return outputs, metrics


def compare(outputs: list[RequestOutput], oracle: transformers.PreTrainedModel) -> None:
    """Raise AssertionError if a token is not the most likely one, or its log-probability differs."""
    if (error := max(errors(outputs, oracle))) > TOLERANCE:
        raise AssertionError(f"a log-probability differs by {error:.2g}")


def compare_in_the_median(
    outputs: list[RequestOutput],
    oracle: transformers.PreTrainedModel,
    tolerance: float,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
) -> None:
    """Raise AssertionError if the log-probabilities differ in the median by more than the tolerance, and by more than
    three times what rounding the weights to a format changes, since routers make some models sensitive.
    """
    error = float(np.median(list(errors(outputs, oracle))))
    if error > tolerance and error > (limit := 3 * float(np.median(changes(outputs, oracle, quant)))):
        raise AssertionError(f"log-probabilities differ by {error:.2g} in the median, more than {limit:.2g}")


def sees_prompt(oracle: transformers.PreTrainedModel) -> bool:
    """Return whether the tokens of a prompt see each other."""
    return getattr(oracle.config, "prefix_lm", False)


def logits_of(oracle: transformers.PreTrainedModel, output: RequestOutput) -> torch.Tensor:
    """Return the logits of prompt and output."""
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    inputs = {}
    if sees_prompt(oracle):
        inputs["token_type_ids"] = torch.tensor([[1] * len(prompt) + [0] * len(tokens)])
    return oracle(torch.tensor([[*prompt, *tokens]]), **inputs).logits[0]


def changes(
    outputs: list[RequestOutput], oracle: transformers.PreTrainedModel, quant: gguf.GGMLQuantizationType
) -> list[float]:
    """Return how much the log-probability of each token changes if the weights of the oracle are rounded."""
    rounded = copy.deepcopy(oracle)
    with torch.no_grad():
        for weight in rounded.parameters():
            if weight.dim() > 1 and weight.numel():
                last = weight.shape[-1]
                padded = np.zeros((weight.numel() // last, -(-last // 32) * 32), np.float32)
                padded[:, :last] = weight.reshape(-1, last).numpy()
                padded = gguf.quants.dequantize(gguf.quants.quantize(padded, quant), quant)
                weight.copy_(torch.from_numpy(padded[:, :last].reshape(weight.shape)))
    found = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.inference_mode():
            one, other = (torch.log_softmax(logits_of(m, output), -1) for m in (oracle, rounded))
        places = range(len(output.prompt_token_ids) - 1, len(tokens) - 1)
        found += [float(abs(one[i, tokens[i + 1]] - other[i, tokens[i + 1]])) for i in places]
    return found


class FirstOfEqual(TorchFunctionMode):
    """Makes topk take the first of equal numbers, which it does not promise. Indexers with few heads give many keys the
    score 0.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        return _first_largest(*args, **(kwargs or {}))


def _first_largest(x: torch.Tensor, k: int, dim: int = -1, *, sorted: bool = True) -> torch.return_types.topk:
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def errors(outputs: list[RequestOutput], oracle: transformers.PreTrainedModel) -> Iterator[float]:
    """Yield how far each token is from the most likely one of transformers, and from its log-probability."""
    for output in outputs:
        tokens = output.outputs[0].token_ids
        with torch.inference_mode(), FirstOfEqual():
            logits = logits_of(oracle, output).double()
        expected = torch.log_softmax(logits, -1).numpy()
        for i, (token, of_token) in enumerate(zip(tokens, output.outputs[0].logprobs or (), strict=True)):
            exact = expected[len(output.prompt_token_ids) + i - 1]
            yield float(max(abs(of_token[token].logprob - exact[token]), exact.max() - exact[token]))


def same_tokens(outputs: list[RequestOutput], others: list[RequestOutput]) -> None:
    """Raise AssertionError if tokens differ."""
    for one, other in zip(outputs, others, strict=True):
        if one.outputs[0].token_ids != other.outputs[0].token_ids:
            raise AssertionError(f"the tokens of request {one.request_id} are not those without others")


if __name__ == "__main__":
    main()
