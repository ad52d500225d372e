"""Flat options and nested settings."""

from __future__ import annotations

import pytest
from engine_rig import make_engine

from foreword import LLM
from foreword.engine import EngineConfig, engine_config
from foreword.errors import ConfigError
from foreword.scheduler import SchedulerConfig


def test_flat_options_are_split_by_the_fields_of_the_settings():
    config = engine_config({"max_num_seqs": 7, "block_size": 4, "policy": "priority"})
    assert config == EngineConfig(scheduler=SchedulerConfig(max_num_seqs=7, policy="priority"), block_size=4)
    assert engine_config({}) == EngineConfig()


def test_a_flat_option_overrides_the_nested_one():
    scheduler = SchedulerConfig(max_num_seqs=7, watermark=0.5)
    assert engine_config({"scheduler": scheduler, "max_num_seqs": 3}).scheduler == SchedulerConfig(
        max_num_seqs=3, watermark=0.5
    )


@pytest.mark.parametrize(
    ("name", "close"),
    [("max_num_seq", "max_num_seqs"), ("blocksize", "block_size"), ("kv_cache_byte", "kv_cache_bytes")],
)
def test_an_unknown_option_is_refused_with_the_closest_name(name, close):
    with pytest.raises(ConfigError, match=rf"{name}=3: unknown option. Did you mean '{close}'\?"):
        engine_config({name: 3})


def test_the_offline_interface_refuses_unknown_options_before_it_loads_a_model():
    with pytest.raises(ConfigError, match="Here it is 'num_threads'"):
        LLM("no such model", num_thread=2)


def test_unknown_options_of_a_request_are_refused():
    with pytest.raises(TypeError, match=r"no option .prio.. Did you mean .priority."):
        make_engine().add_request("a", [1], prio=3)
