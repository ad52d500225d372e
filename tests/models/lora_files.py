"""Random LoRA adapters: as PEFT directories, as GGUF files, and merged into the tensors of a checkpoint."""

import json
import re

import numpy as np

from foreword.models.quants import Quant
from models import gguf_writer
from models.gguf_models import architecture_of, gguf_tensors
from models.tiny import write_safetensors

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")
"""The ends of the names of linear layers of attention and of a dense MLP, in most families."""
NOT_CHANGED = (
    r"[qk]_norm\.|(?<!un)embed|word_emb|\.wte|\.wpe|lm_head(?!\.dense)|^output\.|conv1d|\.conv\.conv|experts\.mlp\."
)
"""Parts of the names of other matrices: of embeddings and logits, convolutions, and the experts of DBRX."""
STACKED = r"(.*\.\d+)\..*(experts\.(gate_up_proj|down_proj|fc1\.weight|fc2\.weight)|(in|out)put_linear\.weight)"
"""The names of tensors of all experts of a layer, and the beginning of those of the layer."""


def is_idle(shapes, name):
    """Return whether a matrix is of an expert whose output is its input: it has no down projection."""
    expert = re.match(r".*\.mlp\.experts\.\d+\.", name)
    return expert is not None and f"{expert[0]}down_proj.weight" not in shapes


def linear_modules(shapes, ends=("",)):
    """The linear layers among the tensors of a checkpoint: {module: (outputs, inputs)}. ends: of their names."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(tuple(f"{end}.weight" for end in ends))
        and len(shape) == 2
        and not is_idle(shapes, name)
        and re.search(NOT_CHANGED, name) is None
    }


def is_turned(shapes, name):
    """Return whether a checkpoint has the matrix of a module as [in, out], as those of GPT-2."""
    rows, cols = shapes.get("transformer.h.0.attn.c_attn.weight", (1, 1))
    return cols == 3 * rows and ".c_" in name


TURNED = {"llama4_text", "gpt_oss", "aria_text"}


def are_turned(shapes):
    """Return whether a checkpoint has all experts of a layer in a tensor [experts, in, out]."""
    ends = ("feed_forward.experts.down_proj", "down_proj_bias", "experts.fc1.weight")
    return any(name.endswith(ends) for name in shapes)


def random_expert_factors(shapes, rank=4, seed=1):
    """{tensor of all experts of a layer: (A [experts, rank, in], B [experts, out, rank])}"""
    rng, factors = np.random.default_rng(seed), {}
    for name, shape in sorted(shapes.items()):
        if len(shape) == 3 and re.fullmatch(STACKED, name):
            rows, cols = shape[:0:-1] if are_turned(shapes) else shape[1:]
            a = rng.standard_normal((shape[0], rank, cols)) / np.sqrt(cols)
            b = rng.standard_normal((shape[0], rows, rank)) / np.sqrt(rank)
            factors[name] = a.astype("<f4"), b.astype("<f4")
    return factors


def as_parameters(factors, count, idle=0):
    """The factors of a layer's ``count`` experts as PEFT has them for one parameter: those of gate and up with ranks of
    their own, B in blocks. idle: experts behind these in the parameter of gate and up.
    """
    kept = {name: both for name, both in factors.items() if ".experts." not in name}
    layers = dict.fromkeys(name.partition(".experts.")[0] for name in factors.keys() - kept.keys())
    for layer in layers:
        gate, up, down = (
            [factors.get(f"{layer}.experts.{e}.{part}") for e in range(count)]
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        first = {"up_proj": up}
        if gate[0] is not None:
            both = [(np.concatenate([g[0], u[0]]), _blocks(g[1], u[1])) for g, u in zip(gate, up, strict=True)]
            first = {"gate_up_proj": both + both[:1] * idle}
        for leaf, own in {**first, "down_proj": down}.items():
            kept[f"{layer}.experts.{leaf}"] = tuple(np.stack(both) for both in zip(*own, strict=True))
    return kept


def _blocks(one, other):
    """A matrix of two blocks along its diagonal."""
    return np.block([[one, np.zeros((len(one), other.shape[1]))], [np.zeros((len(other), one.shape[1])), other]])


def random_factors(shapes, rank=4, seed=1, ends=("",)):
    """{module: (A [rank, in], B [out, rank])}; rank: a number, or a function of the module. Those of Zamba 2 and
    HRM-Text are small: with larger ones, equal weights already give logits that differ by 1e-2 among executors.
    """
    small = 0.25 if any("shared_transformer" in name or "_module.layers." in name for name in shapes) else 1
    rng = np.random.default_rng(seed)
    factors = {}
    for name, shape in sorted(linear_modules(shapes, ends).items()):
        rows, cols = shape[::-1] if is_turned(shapes, name) else shape
        r = rank(name) if callable(rank) else rank
        a, b = rng.standard_normal((r, cols)) / np.sqrt(cols), rng.standard_normal((rows, r)) / np.sqrt(r)
        factors[name] = a.astype("<f4"), (small * b).astype("<f4")
    return factors


def merged(tensors, factors, scale):
    """The checkpoint with W + scale · B A. scale: a number, or a function of the module."""
    out = dict(tensors)
    for name, (a, b) in factors.items():
        change = b.astype(np.float64) @ a * (scale(name) if callable(scale) else scale)
        if a.ndim == 3:
            is_own = are_turned(tensors)
            out[name] = (tensors[name] + (change.swapaxes(1, 2) if is_own else change)).astype("<f4")
            continue
        if is_turned({key: value.shape for key, value in tensors.items()}, name):
            change = change.T
        out[name + ".weight"] = (tensors[name + ".weight"] + change).astype("<f4")
    return out


def peft_tensors(factors, *, swapped=False):
    """The tensors by the names of the modules of transformers. swapped: PEFT takes the inputs of parameters of experts
    for outputs.
    """
    written, parameters = {}, parameters_of(factors)
    for name, (a, b) in factors.items():
        module = of_module(name, factors)
        if a.ndim == 3:
            place, leaf = parameters[name].rsplit(".", 1)
            is_inner = leaf != "down_proj" and f"{place}.down_proj" in parameters.values()
            module = place + ".base_layer" * is_inner
            if swapped:
                a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
            a, b = a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        for letter, factor in (("A", a), ("B", b)):
            written[f"base_model.model.{module}.lora_{letter}.weight"] = np.ascontiguousarray(factor, "<f4")
    return written


def parameters_of(factors):
    """The parameters of all experts that classes of transformers have for tensors of checkpoints."""
    leafs = {"fc1.weight": "gate_up_proj", "fc2.weight": "down_proj", "input_linear.weight": "experts.gate_up_proj",
             "output_linear.weight": "experts.down_proj"}  # fmt: skip
    found = {name: name for name, (a, _) in factors.items() if a.ndim == 3}
    for end, leaf in leafs.items():
        found = {name: own.removesuffix(end) + leaf if own.endswith(end) else own for name, own in found.items()}
    return found


def of_module(name, names):
    """The name that transformers has for a module of latent attention, and of the MLP beside it."""
    if not any("kv_a_proj_with_mqa" in other for other in names):
        return name
    name = re.sub(r"\.block_sparse_moe\.(\w+_proj)$", r".mlp.\1", name).replace(".linear_gate", ".gate_proj")
    return name.replace(".attention.dense", ".self_attn.o_proj").replace(".attention.", ".self_attn.")


def with_copies(factors, sign=1):
    """The changes of a block that layers of Zamba 2 share, with those in the layers whose copies a checkpoint leaves
    out: sign times as much.
    """
    beside = sorted({int(found[1]) for name in factors if (found := re.fullmatch(r".*\.(\d+)\.linear", name))})
    named = sorted({int(found[1]) for name in factors if (found := re.match(_IN_BLOCK, name))})
    layers = dict(zip(beside[len(named) :], named * len(beside), strict=False)) if named else {}
    copies = {
        name.replace(f".{of}.", f".{layer}.", 1): (a, sign * b)
        for layer, of in layers.items()
        for name, (a, b) in factors.items()
        if (found := re.match(_IN_BLOCK, name)) and int(found[1]) == of
    }
    return factors | copies


_IN_BLOCK = r".*?\.(\d+)\.shared_transformer\."


def of_modules(factors):
    """The changes of matrices that a checkpoint of HRM-Text has in one tensor, which are modules of their own."""
    parts = {".attn.gqkv_proj": [f".self_attn.{name}_proj" for name in ("gate", "q", "k", "v")],
             ".attn.o_proj": [".self_attn.o_proj"],
             ".mlp.gate_up_proj": [".mlp.gate_proj", ".mlp.up_proj"]}  # fmt: skip
    found = dict(factors)
    for name, (a, b) in factors.items():
        end = next((end for end in parts if name.endswith(end) and "_module.layers." in name), None)
        if end is not None:
            del found[name]
            rows = zip(parts[end], np.split(b, len(parts[end])), strict=True)
            found |= {name.removesuffix(end) + module: (a, own) for module, own in rows}
    return found


def every_factor(shapes):
    """Random changes of all linear layers, those of experts included."""
    return random_factors(shapes) | random_expert_factors(shapes)


def write_peft(folder, factors, *, swapped=None, **config):
    """A PEFT directory; rank and alpha are 4 and 8 unless ``config`` says otherwise. swapped: see `peft_tensors`; None:
    for Llama 4.
    """
    if swapped is None:
        swapped = any(name.endswith(".feed_forward.experts.down_proj") for name in factors)
    folder.mkdir(parents=True, exist_ok=True)
    factors = of_modules(factors)
    if config.get("target_modules") == "all-linear":
        factors = with_copies(factors)
    linear = [name for name, (a, _) in factors.items() if a.ndim == 2]
    targets = sorted({of_module(name, factors).rpartition(".")[2] for name in linear})
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": targets}
    if ends := {".".join(name.split(".")[-2:]) for name in parameters_of(factors).values()}:
        written |= {"target_parameters": sorted(ends), "peft_version": "0.21.2"}
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    write_safetensors(folder / "adapter_model.safetensors", peft_tensors(factors, swapped=swapped))
    return folder


def gguf_parts(config, factors, alpha=8.0):
    """Metadata and tensors of the adapter as llama.cpp converts it: the rows of B are those of the weight, the inputs
    of A its columns.
    """
    architecture, tensors = architecture_of(config), {}
    experts = {name: both for name, both in factors.items() if ".experts." in name and both[0].ndim == 2}
    a_of, b_of = (gguf_tensors(config, {f"{name}.weight": both[i] for name, both in experts.items()}) for i in (0, 1))
    for stem, part in b_of.items():
        for letter, factor in (("a", a_of[stem]), ("b", part)) if stem != "rope_freqs.weight" else ():
            tensors[f"{stem}.lora_{letter}"] = Quant.F32, factor.shape, gguf_writer.f32(factor).ravel()
    for name, (a, b) in factors.items():
        weight = f"{name}.weight" if a.ndim == 2 else name
        if name in experts:
            continue
        if a.ndim == 3:
            parts = gguf_tensors(config, {weight: b.swapaxes(1, 2) if config["model_type"] in TURNED else b})
        elif name.endswith("linear_attn.out_proj"):
            [(stem, a)] = gguf_tensors(config, {weight: a}).items()
            parts = {stem: b}
        else:
            parts = gguf_tensors(config, {weight: b.T if architecture == "gpt2" else b})
        for stem, part in parts.items():
            for letter, factor in (("a", a), ("b", part)) if stem != "rope_freqs.weight" else ():
                tensors[f"{stem}.lora_{letter}"] = Quant.F32, factor.shape, gguf_writer.f32(factor).ravel()
    metadata = {"general.architecture": ("str", architecture), "general.type": ("str", "adapter"),
                "adapter.type": ("str", "lora"), "adapter.lora.alpha": ("f32", alpha)}  # fmt: skip
    return metadata, tensors
