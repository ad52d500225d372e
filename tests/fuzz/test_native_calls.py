"""A short run of the native functions with damaged arguments."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foreword
from foreword.native import available

TESTS = Path(__file__).parents[1]
SCENES = (
    "batch/test_native_paths.py",
    "kernels/test_kernel_arguments.py::test_blocks",
    "batch/test_step_fields.py::test_every_tensor_of_every_step_is_at_one_address[native]",
    "batch/test_vllm_apply.py::test_arrivals_are_all_or_nothing_in_native_code",
    "batch/test_vllm_apply.py::test_a_preempted_request_that_finishes_is_dropped",
    "vllm_kernels/test_native_logits.py::test_native_functions_refuse_to_write_arrays_of_other_types",
    "vllm_kernels/test_native_logits.py::test_a_grammar_masks_logits_of_two_bytes_as_numpy_does[uint16]",
    "vllm_kernels/test_native_logits.py::test_native_code_gives_the_bits_of_numpy[penalties-37]",
    "models/test_families.py::test_logits_equal_those_of_transformers[gemma3n-native]",
    "models/test_pooling_models.py::test_vectors_equal_those_of_transformers[roberta-native]",
    "executors/test_packed_weights.py::test_mapped_weights_give_the_logits_of_packed_ones[phi3]",
    "engine/test_loras.py::test_a_crowd_with_several_adapters_answers_as_models_with_merged_weights[chunks-native]",
    "engine/test_head.py::test_a_head_in_a_gguf_file_is_that_of_the_directory[glm4-moe]",
)


@pytest.mark.long
@pytest.mark.skipif(not available(), reason="needs the native module")
def test_no_argument_ends_the_process():
    source = Path(foreword.__file__).parents[1]
    command = [sys.executable, TESTS / "fuzz" / "native_calls.py", "--some", "--most", "1", "--calls", "40"]
    done = subprocess.run(
        [*command, *(TESTS / scene for scene in SCENES)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(r"^(\d+) functions; (\d+) processes of 40 calls; 0 ended otherwise", done.stdout, re.MULTILINE)
    assert counts
    assert int(counts[2]) >= int(counts[1]) - 18  # the others are called by other tests
