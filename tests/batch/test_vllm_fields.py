"""Each field of vLLM's request data, and where it is in ours."""

import re
import warnings
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_vllm_apply import cached_data, make, new_data, output

from foreword.batch import LoraRequest, SamplingParams, prepare_inputs
from foreword.batch.adapters import vllm
from foreword.batch.adapters.vllm import apply
from foreword.batch.adapters.vllm_fields import READ, REFUSED, WITHOUT_EFFECT
from foreword.batch.adapters.vllm_requests import new_request
from foreword.errors import PlanError
from vllm_compat.releases import Releases


def test_each_field_of_new_request_data_is_in_the_request():
    mask = np.array([True, False, True])
    place = SimpleNamespace(offset=1, length=2, is_embed=[True, False])
    params = SimpleNamespace(temperature=0.7, top_k=-1, seed=11, max_tokens=9, stop=None, stop_token_ids=[4])
    embeds = np.arange(6, dtype=np.float32).reshape(3, 2)
    got = new_request(
        new_data(
            "a", [5, 6, 7], ([1, 2], [3]), num_computed_tokens=2, sampling_params=params,
            lora_request=SimpleNamespace(lora_int_id=6, lora_name="legal", lora_path="/l"),
            prompt_embeds=embeds, prompt_is_token_ids=mask,
            mm_features=[SimpleNamespace(identifier="h", modality="video", mm_position=place)],
            pooling_params=SimpleNamespace(task="score", dimensions=3, normalize=False),
            prefill_token_ids=[5, 6, 7, 8, 9],
        ),
        bidirectional=("video",),
    )  # fmt: skip
    assert (got.req_id, got.num_computed_tokens) == ("a", 2)
    assert (got.lora_id, got.lora_request) == (0, LoraRequest(6, "legal", "/l"))
    assert list(got.prompt_token_ids) == [5, 6, 7]
    assert list(got.output_token_ids) == [8, 9]
    assert [list(ids) for ids in got.block_ids] == [[1, 2], [3]]
    assert got.sampling_params == SamplingParams(temperature=0.7, seed=11, max_tokens=9, stop_token_ids=(4,))
    assert np.array_equal(got.prompt_embeds, embeds)
    assert np.array_equal(got.prompt_is_token_id, mask)
    (feature,) = got.mm_features
    assert (feature.identifier, feature.offset, feature.length, feature.modality) == ("h", 1, 2, "video")
    assert feature.is_embed.tolist() == [True, False]
    assert [list(ends) for ends in got.bidirectional_ranges] == [[1, 2]]
    assert (got.pooling_params.task, got.pooling_params.dimensions, got.pooling_params.normalize) == ("score", 3, False)
    # vLLM's data has none of these.
    assert (got.mrope_positions, got.mrope_delta) == (None, 0)
    assert (got.encoder_len, got.encoder_input) == (0, None)


def test_tokens_sent_with_a_resumed_request_count_even_where_they_were_not_known():
    states, buffers = make()
    apply(states, output([new_data("a", [1, 2], ([1], [1]))], scheduled={"a": 2}))
    apply(states, output(preempted=["a"]))
    cached = cached_data([("a", ([5], [6, 7]), 0, 2)], resumed=["a"], all_token_ids={"a": [1, 2, 8, 9]})
    batch = prepare_inputs(states, apply(states, output(cached=cached, scheduled={"a": 4})), buffers)
    assert batch.input_ids.tolist() == [1, 2, 8, 9]
    row = states.row_of("a")
    assert (states.prompt_len[row], states.prefill_len[row], states.last_sampled_token[row]) == (2, 4, 9)


def of_release(**more):
    """An output whose type is a dataclass, as vLLM's is."""
    values = vars(output([new_data("a", [1, 2], ([1], [1]))], scheduled={"a": 2})) | more
    return make_dataclass("SchedulerOutput", list(values))(**values)


def test_every_field_of_every_recorded_scheduler_output_is_read_not_needed_or_refused():
    fields = set(Releases.read().fields("v1.core.sched.output.SchedulerOutput"))
    known = [*READ, *WITHOUT_EFFECT, *REFUSED]
    assert len(known) == len(set(known))
    assert fields == set(known)


def test_the_fields_that_are_read_are_those_that_the_code_names():
    files = [path for path in Path(vllm.__file__).parent.glob("vllm*.py") if path.name != "vllm_fields.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = {name for name in (*READ, *WITHOUT_EFFECT, *REFUSED) if re.search(rf'\.{name}\b|"{name}"', text)}
    assert named == READ


def test_an_unknown_field_gives_one_warning_and_known_ones_none():
    states, _ = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(states, of_release(skip_drafts=True))
    states, _ = make()
    first = of_release(colour=1, taste=2)
    message = "SchedulerOutput has fields that are not known here: colour, taste"
    with pytest.warns(RuntimeWarning, match=message) as seen:
        apply(states, first)
    assert seen[0].filename == __file__
    first.scheduled_new_reqs, first.num_scheduled_tokens = [], {}
    apply(states, first)  # a second warning would be an error


def test_a_value_in_a_field_that_is_not_followed_is_refused_before_anything_is_applied():
    states, _ = make()
    with pytest.raises(PlanError, match=r"SchedulerOutput.block_table_updates: block tables of running requests"):
        apply(states, of_release(block_table_updates={"a": ([3], [3])}))
    assert "a" not in states
    apply(states, of_release(block_table_updates=None))
    assert "a" in states
