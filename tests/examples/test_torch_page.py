"""The code of docs/torch.md runs, and what the page says about sharing memory is so."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestError, RequestStates, prepare_inputs

torch = pytest.importorskip("torch", reason="torch is not installed")

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the page's program defines. A warning is an error."""
    scope: dict = {}
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, "docs/torch.md", "exec"), scope)
    return scope


def test_the_page_has_a_program():
    assert len(re.findall(r"```python\n", PAGE)) >= 6


def test_the_device_views_equal_the_buffers(page):
    """… in every tensor, after one copy of the arena."""
    page["device_arena"].copy_(page["host_arena"])
    assert page["inputs"].keys() == page["buffers"].arrays.keys()
    for name, array in page["buffers"].arrays.items():
        pairs = (
            zip(page["inputs"][name], array, strict=True)
            if isinstance(array, tuple)
            else [(page["inputs"][name], array)]
        )
        for view, source in pairs:
            np.testing.assert_array_equal(view.cpu().numpy(), source)
            assert view.cpu().numpy().dtype == source.dtype


def test_a_padded_step_gives_the_samples_of_the_step_alone(page):
    """… for the page's model, which reads padding too."""
    states, buffers, arena = page["states"], page["buffers"], page["device_arena"]
    plan = {"a": 1}
    prepare_inputs(states, plan, buffers)
    arena.copy_(page["host_arena"])
    alone = page["forward"](1, 1).tolist()
    prepare_inputs(states, plan, buffers, pad_to=(8, 8))
    arena.copy_(page["host_arena"])
    assert page["forward"](8, 8)[:1].tolist() == alone


def test_the_samples_were_committed(page):
    states = page["states"]
    assert states.num_tokens[states.row_of("a")] == 5
    assert "a" in states


@pytest.fixture
def states() -> RequestStates:
    states = RequestStates(
        max_num_reqs=2, max_model_len=12, vocab_size=100, kv_groups=[KVGroup(block_size=2)], max_num_draft_tokens=2
    )
    for name, blocks in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        states.add_request(NewRequest(name, torch.tensor([11, 12, 13]), block_ids=[torch.tensor(blocks)]))
    return states


def test_views_and_buffers_share_memory(states):
    buffers = InputBuffers.for_states(states, 16)
    batch = prepare_inputs(states, {"a": 3, "b": 3}, buffers)
    address = buffers["input_ids"].ctypes.data
    assert torch.from_numpy(buffers["input_ids"]).data_ptr() == address
    assert torch.from_dlpack(batch.input_ids).data_ptr() == address
    assert torch.tensor(batch.input_ids).data_ptr() != address
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.as_tensor(batch.input_ids).data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plans_drafts_and_samples_may_be_tensors(states, dtype):
    buffers = InputBuffers.for_states(states, 16)
    rows = torch.tensor([states.row_of("a"), states.row_of("b")], dtype=dtype)
    batch = prepare_inputs(states, (rows, torch.tensor([3, 3], dtype=dtype)), buffers)
    states.commit(batch, torch.tensor([42, 43], dtype=dtype))
    drafts = torch.tensor([[7, 8], [9, -1]], dtype=dtype)
    batch = prepare_inputs(states, (rows, torch.tensor([3, 2], dtype=dtype)), buffers, draft_tokens=drafts)
    assert batch.input_ids.tolist() == [42, 7, 8, 43, 9]
    states.commit(batch, torch.tensor([[7, 1, -1], [2, -1, -1]], dtype=dtype))
    assert states.num_tokens[:2].tolist() == [6, 5]


def test_numbers_in_mappings_may_be_0d_tensors(states):
    buffers = InputBuffers.for_states(states, 16)
    batch = prepare_inputs(states, {"a": torch.tensor(3), "b": 3}, buffers)
    states.commit(batch, {"a": torch.tensor([42]), "b": [torch.tensor(43)]})
    batch = prepare_inputs(states, {"a": torch.tensor(2), "b": 1}, buffers, draft_tokens={"a": torch.tensor([7])})
    assert batch.input_ids.tolist() == [42, 7, 43]


@pytest.mark.parametrize("token", [torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(100)])
def test_a_tensor_that_is_not_a_token_id_is_named(states, token):
    batch = prepare_inputs(states, {"a": 3}, InputBuffers.for_states(states, 16))
    with pytest.raises(RequestError, match=r"request 'a': sampled = .*: must be a token id; the vocabulary has 100"):
        states.commit(batch, {"a": [token]})


def test_a_tensor_outside_host_memory_raises_the_error_of_torch(states):
    batch = prepare_inputs(states, {"a": 3}, InputBuffers.for_states(states, 16))
    with pytest.raises((TypeError, NotImplementedError), match="meta"):
        states.commit(batch, torch.empty(1, dtype=torch.int32, device="meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_pinned_memory_needs_an_accelerator():
    with pytest.raises(RuntimeError, match=r"accelerator|CUDA"):
        torch.empty(4, dtype=torch.uint8, pin_memory=True)
