"""Every setting is checked by its declaration, and None, sizes and names of other systems are understood."""

from __future__ import annotations  # the types of settings are texts

from dataclasses import dataclass, replace
from decimal import Decimal

import pytest

from foreword import LLM
from foreword.declared import Declared
from foreword.engine.config import FLAT, EngineConfig, engine_config
from foreword.engine.option_types import EngineOptions
from foreword.engine.options import PARTS, LLMOptions, executor_settings, split_options
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError
from foreword.executors.kinds import KINDS
from foreword.media.limits import MediaLimits
from foreword.names import OTHERS, advice
from foreword.scheduler import SchedulerConfig
from foreword.server.config import ServerConfig
from foreword.settings import bytes_of, check_settings, setting, settings_of


def every_setting():
    """(name, its declaration, what makes the settings of one value) of every setting there is."""
    for name, known in FLAT.items():
        if name.startswith("speculation_"):
            yield name, known, lambda value, name=name: engine_config({"speculation": "ngram", name: value})
        else:
            yield name, known, lambda value, name=name: engine_config({name: value})
    for kind in KINDS.values():
        for name, known in settings_of(kind.options).items():
            yield f"{kind.name} {name}", known, lambda value, kind=kind, name=name: kind.read_options({name: value})
    for owner in (ServerConfig, MediaLimits, SpeculationConfig):
        for name, known in settings_of(owner).items():
            yield f"{owner.__name__} {name}", known, lambda value, owner=owner, name=name: owner(**{name: value})


SETTINGS = {label: (known, make) for label, known, make in every_setting()}


def wrong_values(known):
    """Values of another type or out of range."""
    yield object()
    if known.kind.collect:
        yield from (3, [3], ["x", ""], "x")
    elif known.choices:
        yield from ("nonsense", 3, True, "")
    elif known.type == "bool":
        yield from ("no", 1, 0, "true")
    elif known.kind.is_number:
        yield from ("x", "4", True, float("nan"), float("inf"), known.least - 1, known.most + 1)
        if known.type == "int":
            yield from (2.5, 1e3)
    elif known.convert is None:
        yield from ("", 3, True)


@pytest.mark.parametrize("label", SETTINGS)
def test_a_value_of_another_type_or_out_of_range_is_refused_by_name(label):
    known, make = SETTINGS[label]
    for value in wrong_values(known):
        if known.unit == "bytes" and value == "4":
            continue
        with pytest.raises(ConfigError, match=rf"^(\w+, )?{known.name.removeprefix('speculation_')}|^{known.name}"):
            make(value)


@pytest.mark.parametrize("label", SETTINGS)
def test_every_setting_has_a_sentence_of_help_and_a_valid_default(label):
    known, _ = SETTINGS[label]
    assert known.help[0].isupper()
    assert known.help.endswith(".")
    assert known.checked(known.default) == known.default


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"least": 1, "most": 9}, "from 1 to 9"),
        ({"least": -(2**63), "most": 2**63 - 1}, "from -2^63 to 2^63 - 1"),
        ({"least": 0, "most": 2**24}, "from 0 to 2^24"),
        ({"least": 2**20 + 1}, "≥ 1048577"),
        ({"type": "float", "above": 0.0, "most": 1.0}, "> 0 and ≤ 1"),
        ({"type": "float", "above": 0.5}, "> 0.5"),
        ({"type": "str"}, ""),
    ],
)
def test_limits_are_said_in_one_form(facts, text):
    assert Declared(**{"type": "int", **facts}).limits == text


def test_the_types_for_editors_name_every_option():
    assert set(LLMOptions.__annotations__) >= FLAT.keys() | executor_settings().keys() | set(PARTS)
    assert set(EngineOptions.__annotations__) <= FLAT.keys() | executor_settings().keys()


@pytest.mark.parametrize(
    ("text", "number"),
    [("512", 512), ("2GiB", 2 << 30), ("2Gi", 2 << 30), ("1.5GB", 1_500_000_000), ("1 kb", 1000), ("3 MiB", 3 << 20)],
)
def test_a_size_may_be_a_text(text, number):
    assert bytes_of(text) == number
    assert engine_config({"kv_cache_bytes": text}).kv_cache_bytes == number
    assert ServerConfig(max_body_bytes=text).max_body_bytes == number


@pytest.mark.parametrize("name", ["cache_dir", "answer_log", "record", "flight_folder", "speculation_model"])
def test_a_path_of_an_engine_may_be_an_object(name, tmp_path):
    more = {"speculation": "draft_model"} if name == "speculation_model" else {}
    made = [engine_config({name: given, **more}) for given in (tmp_path / "x", str(tmp_path / "x"))]
    assert made[0] == made[1]


def test_every_setting_that_is_a_path_takes_an_object(tmp_path):
    rows = [row for owner in (EngineConfig, ServerConfig) for row in settings_of(owner).values()]
    paths = [row for row in rows if row.unit == "path"]
    assert {row.value_name for row in paths} == {"DIR", "FILE", "FILE[:SIZE]", "FOLDER"}
    assert all(row.unit == "path" for row in rows if row.value_name in ("DIR", "FILE", "FILE[:SIZE]", "FOLDER"))
    for row in paths:
        assert row.checked(tmp_path / "x") == str(tmp_path / "x")
        with pytest.raises(ConfigError, match=row.name):
            row.checked(7)


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1e9", "1.5", "2 PB", "0x10", "1..2", "9" * 5000, "9" * 5000 + ".5GB"]
)
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"kv_cache_bytes=.*a size such as"):
        engine_config({"kv_cache_bytes": text})


def test_none_stands_for_the_default_unless_it_is_a_value():
    config = engine_config({"max_num_seqs": None, "seed": None, "num_blocks": None})
    assert (config.scheduler.max_num_seqs, config.seed, config.num_blocks) == (256, None, None)
    assert KINDS["native"].read_options({"weight_format": None}) == KINDS["native"].read_options({})


@pytest.mark.parametrize(
    ("options", "method", "num_tokens"),
    [
        ({}, "auto", 8),
        ({"speculation": "suffix"}, "suffix", 8),
        ({"speculation": {"method": "ngram", "num_tokens": 2}}, "ngram", 2),
        ({"speculation": "ngram", "speculation_num_tokens": 7}, "ngram", 7),
        ({"speculation": {"num_tokens": 2}, "speculation_num_tokens": 7}, "ngram", 7),
        ({"speculation_num_tokens": 7}, "auto", 7),
    ],
)
def test_speculation_is_given_by_its_method_a_mapping_or_flat_options(options, method, num_tokens):
    speculation = engine_config(options).speculation
    assert (speculation.method, speculation.num_tokens) == (method, num_tokens)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculation": "ngrm"}, r"speculation='ngrm': must be one of .*Did you mean 'ngram'\?"),
        ({"speculation": True}, "speculation=True: expected one of 'auto', 'off', 'ngram'"),
        ({"speculation": {"num_token": 2}}, r"speculation\['num_token'\]: unknown option. Did you mean 'num_tokens'"),
        (
            {"speculation": "off", "speculation_num_tokens": 2},
            "speculation_num_tokens=2: speculation is off; leave one",
        ),
        ({"speculation": "ngram", "speculation_num_tokens": 0}, "speculation_num_tokens=0: must be from 1 to 1024"),
        ({"speculation": "draft_model"}, "a draft model goes with 'draft_model'"),
        ({"scheduler": 3}, "scheduler=3: expected a SchedulerConfig"),
    ],
)
def test_speculation_that_cannot_be_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        engine_config(options)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gpu_memory_utilization", "Here it is 'kv_cache_bytes' (a number of bytes, not a share)."),
        ("enforce_eager", "Nothing is captured or compiled unless compile is given; leave it out."),
        ("num_ctx", "Here it is 'max_model_len' (a setting of the engine)."),
        ("n_predict", "Here it is 'max_tokens'. It is a parameter of a request: pass SamplingParams(max_tokens=…)."),
        ("temperature", "It is a parameter of a request: pass SamplingParams(temperature=…)."),
        ("--max-num-seq", "Did you mean 'max_num_seqs'?"),
        ("foo", "Nothing."),
        ("logits", "Nothing."),
    ],
)
def test_advice_about_a_name(name, sentence):
    found = advice(name, {*FLAT, *executor_settings(), *PARTS}, "Nothing.", of_requests={"max_tokens", "temperature"})
    assert found == sentence


@pytest.mark.parametrize(
    ("name", "close"),
    [("max_num_seq", "max_num_seqs"), ("blocksize", "block_size"), ("kv_cache_byte", "kv_cache_bytes")],
)
def test_an_unknown_option_is_refused_with_the_closest_name(name, close):
    with pytest.raises(ConfigError, match=rf"{name}=3: unknown option. Did you mean '{close}'\?"):
        engine_config({name: 3})


def test_names_of_other_systems_are_no_names_of_ours():
    ours = FLAT.keys() | executor_settings().keys()
    assert OTHERS.keys() & ours == set()
    for names, remark in OTHERS.values():
        assert names or remark.endswith(".")


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("numpy", {"num_threads": 2}, "num_threads=2: executor 'numpy' has no such option; give executor 'native' or"),
        ("native", {"num_threads": 2.5}, "num_threads=2.5: expected an integer from 1 to 1024, or None"),
        ("native", {"weight_format": "fp8"}, "weight_format='fp8': must be one of 'auto', 'fp32'"),
    ],
)
def test_an_option_that_a_kind_of_executor_does_not_have_is_refused(kind, options, reason):
    with pytest.raises(ConfigError, match=reason):
        KINDS[kind].read_options(options)


def test_an_option_that_only_decoders_have_is_refused_by_encoders():
    tried = 0
    for kind in KINDS.values():
        assert kind.read_options({}).of_encoder() == kind.read_options({})
        for name, known in settings_of(kind.options).items():
            if known.decoders_only:
                others = {"bool": not known.default, "str": "a.gguf"}
                other = known.choices[0] if known.choices else others.get(known.type, 2)
                shown = float(other) if known.type == "float" else other
                with pytest.raises(ConfigError, match=f"{name}={shown!r}: only decoders have it"):
                    kind.read_options({name: other}).of_encoder()
                tried += 1
    assert tried >= 6


def test_a_wrong_value_or_name_is_refused_before_the_model_is_looked_for():
    with pytest.raises(ConfigError, match="max_model_len='x': expected an integer"):
        LLM("no such model", max_model_len="x")
    with pytest.raises(ConfigError, match="Here it is 'num_threads'"):
        LLM("no such model", num_thread=2)


def test_options_are_sorted_by_what_they_concern():
    given = split_options({"num_threads": 2, "max_num_seqs": 3, "executor": "numpy", "loras": {"a": "b"}})
    assert (given.executor, given.of_executor, given.loras) == ("numpy", {"num_threads": 2}, {"a": "b"})
    assert given.config == EngineConfig(scheduler=SchedulerConfig(max_num_seqs=3))
    config = engine_config({"max_num_seqs": 7, "block_size": 4, "policy": "priority"})
    assert config == EngineConfig(scheduler=SchedulerConfig(max_num_seqs=7, policy="priority"), block_size=4)
    assert engine_config({}) == EngineConfig()


def test_a_flat_option_overrides_the_nested_one():
    config = engine_config({"scheduler": SchedulerConfig(max_num_seqs=7, watermark=0.5), "max_num_seqs": 3})
    assert config.scheduler == SchedulerConfig(max_num_seqs=3, watermark=0.5)


def test_a_class_of_settings_checks_its_values_when_it_is_made():
    @dataclass(frozen=True)
    class Own:
        size: int = setting(1, "A size.", least=1, most=9)

        def __post_init__(self) -> None:
            check_settings(self)

    assert Own(9).size == 9
    with pytest.raises(ConfigError, match="size=10: must be from 1 to 9"):
        Own(10)


class NoNumber:
    def __index__(self):
        raise RuntimeError("no number")

    __pos__ = __index__


@pytest.mark.parametrize("name", ["max_num_seqs", "watermark"])
@pytest.mark.parametrize(
    "value", [10**400, -(10**5000), NoNumber(), Decimal("sNaN")], ids=["large", "negative", "no number", "NaN"]
)
def test_a_number_that_python_cannot_convert_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}=.*from 0|^{name}=.*from 1"):
        engine_config({name: value})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"media": 3}, "media=3: expected MediaLimits"),
        ({"media": 0}, "media=0: expected MediaLimits"),
        ({"loras": "a=b"}, "loras='a=b': expected a dictionary of paths by name"),
        ({"loras": []}, r"loras=\[\]: expected a dictionary"),
        ({"drafter": 3}, "drafter=3: must be a function"),
        ({"speculation": "custom"}, "speculation='custom': there is no drafter; give drafter too"),
        ({"speculation": "ngram", "drafter": print}, "speculation='ngram': a drafter is given too; give 'custom', or"),
        ({"speculation": "ngram", "speculation_num_tokens": "3"}, "^speculation_num_tokens='3': expected an integer"),
        ({"speculation": "ngram", "speculation_min_match": 9}, "^speculation_min_match=9, speculation_max_match=8: "),
        ({"speculation": {"nonsense": 1}}, r"speculation\['nonsense'\]: unknown option. The options are method, num_"),
        ({"max_tokens": 5}, r"It is a parameter of a request: pass SamplingParams\(max_tokens=…\)"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(options, reason):
    with pytest.raises(ConfigError, match=reason):
        split_options(options)


def test_none_is_the_default_of_every_option():
    given = split_options(dict.fromkeys((*FLAT, *PARTS, "scheduler")))
    assert given.config == replace(engine_config({}), seed=None)
    assert (given.executor, given.drafter, given.loras) == ("auto", None, {})
    for kind in KINDS.values():
        assert kind.read_options(dict.fromkeys(executor_settings())) == kind.read_options({})


def test_a_drafter_means_the_method_custom():
    given = split_options({"drafter": print, "speculation_num_tokens": 2})
    assert (given.config.speculation.method, given.config.speculation.num_tokens) == ("custom", 2)
