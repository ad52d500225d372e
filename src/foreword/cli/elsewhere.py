"""The options of other servers, for `foreword migrate`: how many words follow each, and what it is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

MANY = 99


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Options of another server that have one answer.

    names: each with a mark: ``--x`` is a switch, ``--x=`` has a value, ``--x=?`` may have one, ``--x=*`` has several.
    ``--x!`` is a switch that ``--no-x`` turns off.
    remark: why there is no counterpart. Without it, `here` is the counterpart; without both, the same name is, or that
    of `foreword.names.OTHERS`.
    here: an option of `foreword serve`, or a parameter of requests. unit: what the value counts; "n": a number with k,
    M or G. separator: of several values in one, "json" for a list as JSON. values: how a value is written here.
    left_out: values that the option here does not have, and why. is_off: the switch turns off what `here` turns on.
    """

    names: str
    remark: str = ""
    here: str = ""
    unit: str = ""
    separator: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    most: int = 0
    least: int = 0
    is_off: bool = False


DEFAULT = "It is so by default; leave it out."
ANY_SEED = "It means another seed in each run: give each request its own seed."
DEVICES = "A whole model is on one device: --executor device or torch. Leave it out."
ALWAYS = "It always is so; leave it out."
LOGS = "Errors are logged, and with --access-log each request as a line of JSON; leave it out."
KERNELS = "The executor chooses its kernels; leave it out."
ROPE = "It is read from the model's files; leave it out."
FILES = "It is found in the model's files; leave it out."
METRICS = "/metrics has all that is measured; leave it out."
LOADING = "Weights are read, and packed if necessary, in one way; leave it out."
HOSTS = "All processes of a server are on one host; foreword.ray serves on several."
EXPERTS = "Experts are not divided among processes; leave it out."
DRAFT = "A draft model runs with the settings of the model; leave it out."
NGRAM = "The longest match from --speculation-min-match to --speculation-max-match tokens is taken."
WORDS = "Give it in each request, or write it into the model's generation_config.json."
TEMPLATE = "The chat template is read from the model's files; chat_template.jinja in its directory takes precedence."
DOWNLOAD = "Give org/model, or download the file and give its path."
NO_CODE = "Code of a model's directory is never run; leave it out."
MEDIA = "Images are encoded by the executor of the model; leave it out."
CHAT_PAGE = "The chat page at / has no settings; leave it out."
CORS = "--cors-origin alone says which pages may call the server; leave it out."
STATES = "States are kept at the borders of blocks while there is memory; leave it out."
SLEEP = "--model-keep-alive unloads a model without requests, if --models-dir or --config serves several."

VLLM = (
    Elsewhere("-h --help", "It prints its help and ends; leave it out."),
    Elsewhere("--dtype= --kv-cache-dtype=", left_out={"auto": DEFAULT}),
    Elsewhere("--model= --seed= --host= --port= --max-logprobs= --block-size= --watermark= "
              "--scheduling-policy= --speculative-config= --num-gpu-blocks-override= --long-prefill-token-threshold= "
              "--gpu-memory-utilization= --load-format= --tokenizer= --tokenizer-mode= "
              "--max-lora-rank= --max-loras= --max-cpu-loras= --swap-space= --lora-modules=* --served-model-name=* "
              "--tensor-parallel-size= --pipeline-parallel-size= --data-parallel-size= --otlp-traces-endpoint= "
              "--decode-context-parallel-size= --speculative-model= "
              "--num-speculative-tokens= --ngram-prompt-lookup-min= --ngram-prompt-lookup-max= --enable-lora! "
              "--enable-prefix-caching! --enable-chunked-prefill! --async-scheduling! --enforce-eager! "
              "--trust-remote-code! --disable-log-stats --max-num-seqs="),
    Elsewhere("--device-memory-utilization=", here="gpu_memory_utilization"),
    Elsewhere("--max-model-len=", unit="n", left_out={"auto": DEFAULT, "-1": DEFAULT}),
    Elsewhere("--max-num-batched-tokens=", unit="n"),
    Elsewhere("-tp=", here="tensor_parallel_size"),
    Elsewhere("-dp=", here="replicas"),
    Elsewhere("-dcp=", here="context_parallel_size"),
    Elsewhere("-pp=", "A model is divided by tensor_parallel_size, not by layers; leave it out."),
    Elsewhere("-q= --quantization=",
              "Quantised files are read as they are; --weight-format chooses the numbers of others."),
    Elsewhere("--override-generation-config=", WORDS),
    Elsewhere("--kv-cache-memory-bytes=", here="kv_cache_bytes", unit="n"),
    Elsewhere("--kv-offloading-size=", here="host_cache_bytes", unit="GiB"),
    Elsewhere("--mm-processor-cache-gb=", here="media_cache_bytes", unit="GiB"),
    Elsewhere("--scheduler-reserve-full-isl!", here="reserve_full_prompt"),
    Elsewhere("--generation-config=", here="generation_config", values={"auto": "model", "vllm": "ignore"}),
    Elsewhere("-sc=", here="speculative_config"),
    Elsewhere("--spec-method=", here="speculation"),
    Elsewhere("--spec-model=", here="speculation_model"),
    Elsewhere("--spec-tokens=", here="speculation_num_tokens"),
    Elsewhere("--kv-events-config= --limit-mm-per-prompt="),
    Elsewhere("--api-key=*", here="api_key"),
    Elsewhere("--ssl-keyfile=", here="tls_key"),
    Elsewhere("--ssl-certfile=", here="tls_certificate"),
    Elsewhere("--allowed-origins=", here="cors_origin", separator="json"),
    Elsewhere("--allowed-media-domains=*", here="media_host"),
    Elsewhere("--sse-keep-alive-interval=", here="keep_alive"),
    Elsewhere("--shutdown-timeout=", here="drain_timeout"),
    Elsewhere("--h11-max-incomplete-event-size=", here="max_header_bytes"),
    Elsewhere("--enable-log-requests!", here="access_log"),
    Elsewhere("--disable-log-requests!", here="access_log", is_off=True),
    Elsewhere("--max-num-queued-reqs=", here="max_requests"),
    Elsewhere("--max-num-queued-tokens=", here="max_prompt_tokens", unit="n"),
    Elsewhere("--config=", "It is a YAML file of vLLM's options: translate them, and write them to a TOML file."),
    Elsewhere("--grpc --grpc-port= --uds= --root-path= --middleware=",
              "The server speaks HTTP on --host and --port, at the root; a proxy in front can do the rest."),
    Elsewhere("--chat-template= --chat-template-content-format= --trust-request-chat-template! "
              "--reasoning-parser-plugin= --tool-parser-plugin=", TEMPLATE),
    Elsewhere("--tool-call-parser= --reasoning-parser= --reasoning-config= --cohere-format= "
              "--cohere-is-reasoning-model!",
              "The format of calls and of reasoning is found in the chat template; leave it out."),
    Elsewhere("--enable-auto-tool-choice! --exclude-tools-when-tool-choice-none! --enable-reasoning!",
              "Calls and reasoning are read whenever a request has them; leave it out."),
    Elsewhere("--tool-strict-level=", "Calls follow a grammar where a request asks for it: tool_choice, strict."),
    Elsewhere("--tool-server=", "Tools are run by the client, which gets the calls."),
    Elsewhere("--default-chat-template-kwargs= --anthropic-disabled-thinking-effort=",
              "A field of each request: chat_template_kwargs, or reasoning_effort."),
    Elsewhere("--structured-outputs-config= --guided-decoding-backend=",
              "Grammars are compiled by one library; leave it out."),
    Elsewhere("--trust-request-mm-kwargs! --media-io-kwargs= --mm-processor-kwargs= --mm-processor-cache-type= "
              "--mm-hasher-algorithm= --mm-shm-cache-max-object-size-mb= --mm-encoder-only! --mm-encoder-tp-mode= "
              "--mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= "
              "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= --interleave-mm-strings! "
              "--skip-mm-profiling! --mm-tensor-ipc= --mm-processor-device= --mm-ipc-gpu-memory-gb= "
              "--mm-device-do-normalize! --language-model-only! --enable-mm-embeds! --ec-transfer-config= "
              "--ec-manager-config= --io-processor-plugin=", MEDIA),
    Elsewhere("--video-pruning-rate= --video-pruning-method=", "Videos are refused."),
    Elsewhere("--allowed-local-media-path=", "Files of the server are never read for a request; send them in it."),
    Elsewhere("--response-role= --return-tokens-as-token-ids! --enable-prompt-tokens-details! "
              "--enable-force-include-usage! --enable-tokenizer-info-endpoint! --enable-request-id-headers! "
              "--tokens-only! --enable-scale-out! --fingerprint-mode= --fingerprint-value= --disable-fastapi-docs! "
              "--enable-offline-docs! --enable-flash-late-interaction! --stream-interval=",
              "Routes and the fields of answers are always the same; leave it out."),
    Elsewhere("--max-log-len= --enable-log-outputs! --enable-log-deltas! --log-error-stack! --uvicorn-log-level= "
              "--disable-uvicorn-access-log! --disable-access-log-for-endpoints= --logging-config= --log-level= "
              "--log-config-file= --aggregate-engine-logging --enable-logging-iteration-details! "
              "--use-tqdm-on-load! --fail-on-environ-validation! --jit-monitor-mode= --jit-monitor-verbose!", LOGS),
    Elsewhere("--enable-per-request-metrics! --enable-server-load-tracking! --show-hidden-metrics-for-version= "
              "--per-request-spec-decode-metrics= --kv-cache-metrics! --kv-cache-metrics-sample= "
              "--custom-histogram-buckets= --cudagraph-metrics! --enable-mfu-metrics! "
              "--collect-detailed-traces=*", METRICS),
    Elsewhere("--profiler-config= --enable-layerwise-nvtx-tracing! --ray-workers-use-nsight!",
              "foreword replay and foreword bench show where the time of steps goes; leave it out."),
    Elsewhere("--allow-credentials! --allowed-methods= --allowed-headers=", CORS),
    Elsewhere("--ssl-ca-certs= --enable-ssl-refresh! --ssl-cert-reqs= --ssl-ciphers=",
              "Clients are known by their keys, not by certificates; a proxy can require them."),
    Elsewhere("--h11-max-header-count=", "--max-header-bytes limits the size of all headers."),
    Elsewhere("--runner= --convert= --task= --pooler-config= --override-pooler-config=",
              "What a model can do is found in its files, and all of its routes are served; leave it out."),
    Elsewhere("--hf-config-path= --config-format= --hf-overrides= --model-class-overrides= --model-impl= "
              "--quantization-config= --allow-deprecated-quantization! --disable-sliding-window! "
              "--diffusion-config= -dc= --engram-config= --skip-tokenizer-init! --rope-scaling= --rope-theta=", FILES),
    Elsewhere("--revision= --tokenizer-revision=", "Write it behind the model: org/model@COMMIT."),
    Elsewhere("--code-revision=", NO_CODE),
    Elsewhere("--hf-token=?", "Set HF_TOKEN in the environment."),
    Elsewhere("--download-dir=", "Set HF_HOME, the folder of downloads, in the environment."),
    Elsewhere("--safetensors-load-strategy= --safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= "
              "--model-loader-extra-config= --ignore-patterns=* --pt-load-map-location= "
              "--max-parallel-loading-workers= --weight-transfer-config=", LOADING),
    Elsewhere("--enable-return-routed-experts! --return-sampling-mask! --aux-output-config= --enable-trace-replay! "
              "--use-fp64-gumbel! --logprobs-mode= --watermark-config=",
              "Outputs have the fields of RequestOutput; recordings (--record) have the steps."),
    Elsewhere("--enable-prompt-embeds!", "LLM takes prompt embeddings; the server does not."),
    Elsewhere("--enable-sleep-mode! --sleep-mode-offload-cudagraph! --sleep-preserve-parameter-names=* "
              "--enable-cumem-allocator! --enable-nccl-comm-suspend!", SLEEP),
    Elsewhere("--logits-processors=*", "A processor has other methods here: see --logits-processor."),
    Elsewhere("--scheduler-cls= --worker-cls= --worker-extension-cls= --additional-config=",
              "Plug-ins have other interfaces here: --policy, --executor, --observer."),
    Elsewhere("--attention-backend= --attention-config= -ac= --mamba-backend= --mamba-ssu-algorithm= "
              "--gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= --moe-backend= --linear-backend= "
              "--sparse-indexer-topk-backend= --ir-op-priority= --kernel-config= --enable-flashinfer-autotune! "
              "--disable-cascade-attn! --enable-hc-sp! --use-replayssm! --replayssm-buffer-len= "
              "--optimization-level= -O= --performance-mode= --use-v2-block-manager! --enable-shm-tensor-arena! "
              "--renderer-num-workers= --preemption-mode= --num-scheduler-steps= --num-lookahead-slots= "
              "--disable-frontend-multiprocessing", KERNELS),
    Elsewhere("--compilation-config= -cc= --cudagraph-capture-sizes=* --max-cudagraph-capture-size= "
              "--max-seq-len-to-capture=",
              "Graphs are captured by --executor device, up to --max-graph-tokens; --compile is of torch."),
    Elsewhere("--enable-mamba-cache-stochastic-rounding! --mamba-cache-philox-rounds= --mamba-cache-dtype= "
              "--mamba-ssm-cache-dtype= --mamba-block-size= --mamba-cache-mode= --prefix-cache-retention-interval= "
              "--enable-mamba-shared-prefix-checkpoint!", STATES),
    Elsewhere("--calculate-kv-scales!", "Keys and values in 8 bit have a scale per token and head; leave it out."),
    Elsewhere("--prefix-match-unit=", "--partial-reuse reuses a part of a block, token by token; it is on."),
    Elsewhere("--prefix-caching-hash-algo=", "Prefixes are found by one hash; leave it out."),
    Elsewhere("--kv-cache-dtype-skip-layers=* --kv-sharing-fast-prefill! --swa-bounded-replay! "
              "--disable-hybrid-kv-cache-manager!", "Each kind of layer has its own group of KV blocks; leave it out."),
    Elsewhere("--kv-offloading-backend= --kv-transfer-config=",
              "--host-cache-bytes and --cache-dir keep blocks outside the pool; --tier is for places of your own."),
    Elsewhere("--offload-backend= --cpu-offload-gb= --cpu-offload-params=* --offload-group-size= "
              "--offload-num-in-group= --offload-prefetch-step= --offload-params=* --device-ids= --device=", DEVICES),
    Elsewhere("--numa-bind! --numa-bind-nodes=* --numa-bind-cpus=*",
              "--numa-nodes divides weights and threads among the nodes."),
    Elsewhere("--distributed-executor-backend= --worker-use-ray!",
              "--tensor-parallel-size starts processes of its own; leave it out."),
    Elsewhere("--headless --api-server-count= -asc= --master-addr= --master-port= --nnodes= -n= --node-rank= -r= "
              "--data-parallel-rank= -dpn= --data-parallel-start-rank= -dpr= --data-parallel-size-local= -dpl= "
              "--data-parallel-address= -dpa= --data-parallel-rpc-port= -dpp= --data-parallel-backend= -dpb= "
              "--data-parallel-hybrid-lb! -dph --data-parallel-external-lb! -dpe --enable-fault-tolerance! "
              "--data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port= --fault-tolerance-config= "
              "--dp-supervisor-probe-interval-s= --dp-supervisor-probe-timeout-s= --dp-sync-interval= "
              "--dp-supervisor-probe-failure-threshold= --prefill-schedule-interval=", HOSTS),
    Elsewhere("--distributed-timeout-seconds= --cpu-distributed-timeout-seconds=", here="rank_timeout"),
    Elsewhere("--prefill-context-parallel-size= -pcp= --dcp-comm-backend= --dcp-q-replicate! "
              "--dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size= --disable-custom-all-reduce! "
              "--disable-nccl-for-dp-synchronization! --enable-batch-sharded-sampling! --enable-dbo! --ubatch-size= "
              "--dbo-decode-token-threshold= --dbo-prefill-token-threshold=",
              "--tensor-parallel-size and --context-parallel-size divide a model in one way; leave it out."),
    Elsewhere("--enable-expert-parallel! -ep --enable-ep-weight-filter! --all2all-backend= --enable-elastic-ep! "
              "--elastic-ep-max-dp-size= --enable-eplb! --eplb-config= --expert-placement-strategy=", EXPERTS),
    Elsewhere("--lora-dtype= --enable-tower-connector-lora! --fully-sharded-loras! --lora-target-modules=* "
              "--specialize-active-lora! --enable-mixed-moe-lora-format! --enable-moe-shared-loras! "
              "--max-lora-cls-labels= --lora-extra-vocab-size=", "It is read from the adapter's files; leave it out."),
    Elsewhere("--default-mm-loras=", "A request names its adapter as its model; there is none by default."),
    Elsewhere("--max-num-scheduled-tokens= --disable-chunked-mm-input! --long-prefill-token-threshold-adaptive! "
              "--max-num-partial-prefills= --max-long-partial-prefills=",
              "--max-num-batched-tokens and --long-prefill-threshold limit a step; leave it out."),
    Elsewhere("--max-num-active-seqs=", "--max-num-seqs is the number of requests that run; give the smaller one."),
)  # fmt: skip

LLAMA_CPP = (
    Elsewhere("-h --help --usage --version -cl --cache-list --completion-bash --list-devices",
              "It prints and ends; leave it out."),
    Elsewhere("-m= --model= -hf= --hf-repo= --host= "
              "--port= --mlock --no-mmap -fa=? --flash-attn=? --rope-scaling= --rope-freq-base= --cache-prompt! "
              "--mmproj= --slot-save-path= --models-dir= -ngl= --gpu-layers= --n-gpu-layers= -md= "
              "--model-draft= --draft= --draft-n= --draft-max="),
    Elsewhere("--predict= --n-predict= --temp= --temperature= --top-k= --top-p= --min-p= --top-n-sigma= "
              "--xtc-probability= --xtc-threshold= --typical-p= --repeat-penalty= --presence-penalty= "
              "--frequency-penalty= --dry-multiplier= --dry-base= --dry-allowed-length= --ignore-eos --mirostat= "
              "--grammar= --json-schema= --logit-bias="),
    Elsewhere("-t= --threads= -np= --parallel=", left_out={"-1": DEFAULT}),
    Elsewhere("-c= --ctx-size=", left_out={"0": DEFAULT}),
    Elsewhere("-hfr=", here="model"),
    Elsewhere("--lora=", separator=","),
    Elsewhere("-n=", here="max_tokens"),
    Elsewhere("-s= --seed=", here="seed", left_out={"-1": ANY_SEED}),
    Elsewhere("-l=", here="logit_bias"),
    Elsewhere("-r= --reverse-prompt=", here="stop"),
    Elsewhere("--top-nsigma=", here="top_n_sigma"),
    Elsewhere("--typical=", here="typical_p"),
    Elsewhere("--dry-penalty-last-n=", here="dry_range"),
    Elsewhere("--dry-sequence-breaker=", here="dry_sequence_breakers"),
    Elsewhere("--reasoning-budget=", here="thinking_budget"),
    Elsewhere("--grammar-file= -j= --json-schema-file= -jf=", here="structured_outputs"),
    Elsewhere("-b= --batch-size=", here="max_num_batched_tokens"),
    Elsewhere("-ctk= -ctv= --cache-type-k= --cache-type-v=", here="kv_format", values={"f32": "fp32", "q8_0": "int8"}),
    Elsewhere("-mm=", here="mmproj"),
    Elsewhere("-a= --alias=", here="served_model_name", separator=","),
    Elsewhere("--api-key=", here="api_key", separator=","),
    Elsewhere("--cors-origins=", here="cors_origin", separator=","),
    Elsewhere("--ssl-key-file=", here="tls_key"),
    Elsewhere("--ssl-cert-file=", here="tls_certificate"),
    Elsewhere("--sse-ping-interval=", here="keep_alive"),
    Elsewhere("-cram= --cache-ram=", here="host_cache_bytes", unit="MiB"),
    Elsewhere("--spec-draft-model= --spec-draft-hf= -hfd= -hfrd= --hf-repo-draft=", here="speculation_model"),
    Elsewhere("--spec-draft-n-max= --spec-ngram-mod-n-max=", here="speculation_num_tokens"),
    Elsewhere("--spec-type=", here="speculation",
              values={"none": "off", "draft-simple": "draft_model", "draft-mtp": "head",
                      **dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
                                      "ngram")}),
    Elsewhere("--spec-default", "Drafting is on by default with the native executor; leave it out."),
    Elsewhere("-to= --timeout=",
              "It limits each read and write of a connection: --receive-timeout and --send-timeout."),
    Elsewhere("-ub= --ubatch-size=", "A step computes up to --max-num-batched-tokens; leave it out."),
    Elsewhere("-tb= --threads-batch=", "--num-threads is the number for prompts and for answers; leave it out."),
    Elsewhere("--threads-http=", "One thread serves all connections; leave it out."),
    Elsewhere("-C= --cpu-mask= -Cr= --cpu-range= --cpu-strict= --prio= --poll= -Cb= --cpu-mask-batch= -Crb= "
              "--cpu-range-batch= --cpu-strict-batch= --prio-batch= --poll-batch=",
              "Threads are bound to nodes by --numa-nodes; taskset and nice do the rest."),
    Elsewhere("--numa=", "--numa-nodes divides weights and threads among the nodes."),
    Elsewhere("--keep=", "A prompt is never cut in the middle; truncate_prompt_tokens keeps its end. Leave it out."),
    Elsewhere("--swa-full", "Blocks outside the window are freed unless a prefix needs them; leave it out."),
    Elsewhere("--rope-scale= --rope-freq-scale= --yarn-orig-ctx= --yarn-ext-factor= --yarn-attn-factor= "
              "--yarn-beta-slow= --yarn-beta-fast=", ROPE),
    Elsewhere("--override-kv= --pooling= --check-tensors -mmu= --mmproj-url= --mmproj-auto! --no-mmproj "
              "--image-min-tokens= --image-max-tokens= --spm-infill", FILES),
    Elsewhere("-kvo --kv-offload! -nkvo --op-offload! -dev= --device= -ot= --override-tensor= -cmoe --cpu-moe -ncmoe= "
              "--n-cpu-moe= -sm= --split-mode= -ts= --tensor-split= -mg= --main-gpu= -fit=? --fit=? -fitt= "
              "--fit-target= -fitc= --fit-ctx= --mmproj-offload! --no-host -bs --backend-sampling", DEVICES),
    Elsewhere("--repack! -nr --mmap -dio --direct-io! -ndio -lm= --load-mode= --warmup!", LOADING),
    Elsewhere("-dt= --defrag-thold= -kvu --kv-unified! -no-kvu --cache-idle-slots!",
              "All requests take blocks from one pool, which does not fragment; leave it out."),
    Elsewhere("--rpc=", HOSTS),
    Elsewhere("--lora-scaled= --lora-init-without-apply --control-vector= --control-vector-scaled=",
              "An adapter has the scale of its files, and applies to the requests that name it; --adapter."),
    Elsewhere("--control-vector-layer-range=*", "There are no control vectors."),
    Elsewhere("-mu= --model-url= -dr= --docker-repo= -hff= --hf-file= --embd-gemma-default --fim-qwen-1.5b-default "
              "--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
              "--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
              "--vision-gemma-12b-default", DOWNLOAD),
    Elsewhere("-hft= --hf-token=", "Set HF_TOKEN in the environment."),
    Elsewhere("--offline", "Set HF_HUB_OFFLINE=1 in the environment."),
    Elsewhere("--log-disable --log-file= --log-colors=? -v --verbose --log-verbose -lv= --verbosity= --log-verbosity= "
              "--log-prefix! --log-timestamps! --log-prompts-dir= --perf!", LOGS),
    Elsewhere("-e --escape! -sp --special", "It is of llama-cli; leave it out."),
    Elsewhere("--samplers= --sampler-seq= --sampling-seq=",
              "Parameters apply in one order, that of the page of sampling parameters; leave it out."),
    Elsewhere("--repeat-last-n=", "Penalties count the whole text; dry_range limits those of sequences."),
    Elsewhere("--adaptive-target= --adaptive-decay= --dynatemp-range= --dynatemp-exp= --mirostat-lr= --mirostat-ent=",
              "There is no mirostat, adaptive-p or dynamic temperature; min_p or top_n_sigma serve the same purpose."),
    Elsewhere("--spec-draft-type-k= -ctkd= --cache-type-k-draft= --spec-draft-type-v= -ctvd= --cache-type-v-draft= "
              "--spec-draft-threads= -td= --threads-draft= --spec-draft-threads-batch= -tbd= --threads-batch-draft= "
              "--spec-draft-cpu-mask= -Cd= --cpu-mask-draft= --spec-draft-cpu-range= -Crd= --cpu-range-draft= "
              "--spec-draft-cpu-strict= --cpu-strict-draft= --spec-draft-prio= --prio-draft= --spec-draft-poll= "
              "--poll-draft= --spec-draft-cpu-mask-batch= -Cbd= --cpu-mask-batch-draft= "
              "--spec-draft-cpu-strict-batch= --cpu-strict-batch-draft= --spec-draft-prio-batch= --prio-batch-draft= "
              "--spec-draft-poll-batch= --poll-batch-draft= --spec-draft-override-tensor= -otd= "
              "--override-tensor-draft= --spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-n-cpu-moe= "
              "--spec-draft-ncmoe= -ncmoed= --n-cpu-moe-draft= --spec-draft-backend-sampling! --spec-draft-device= "
              "-devd= --device-draft= --spec-draft-ngl= -ngld= --gpu-layers-draft= --n-gpu-layers-draft=", DRAFT),
    Elsewhere("--spec-draft-n-min= --spec-draft-p-split= --draft-p-split= --spec-draft-p-min= --draft-p-min= "
              "--draft-min= --draft-n-min= --spec-ngram-mod-n-min=",
              "--speculation-adaptive chooses the number of drafts by what was accepted; it is on."),
    Elsewhere("--spec-ngram-mod-n-match= --spec-ngram-simple-size-n= --spec-ngram-simple-size-m= "
              "--spec-ngram-simple-min-hits= --spec-ngram-map-k-size-n= --spec-ngram-map-k-size-m= "
              "--spec-ngram-map-k-min-hits= --spec-ngram-map-k4v-size-n= --spec-ngram-map-k4v-size-m= "
              "--spec-ngram-map-k4v-min-hits= --spec-ngram-size-n= --spec-ngram-size-m= --spec-ngram-min-hits= "
              "-lcs= --lookup-cache-static= -lcd= --lookup-cache-dynamic=", NGRAM),
    Elsewhere("-ctxcp= --ctx-checkpoints= --swa-checkpoints= -cms= --checkpoint-min-step=", STATES),
    Elsewhere("--context-shift!", "A request ends when its context is full; leave it out."),
    Elsewhere("-cb --cont-batching! -nocb --jinja! --metrics --props --slots! --embedding --embeddings "
              "--rerank --reranking --models-autoload!", ALWAYS),
    Elsewhere("--mtmd-batch-max-tokens=", MEDIA),
    Elsewhere("--tags= --reuse-port --path= --api-prefix=",
              "The server serves its own routes at the root; a proxy in front can do the rest."),
    Elsewhere("--embd-normalize=", "A field of each request for embeddings: normalize."),
    Elsewhere("--cors-methods= --cors-headers= --cors-credentials!", CORS),
    Elsewhere("--ui! --webui! --ui-config= --webui-config= --ui-config-file= --webui-config-file=", CHAT_PAGE),
    Elsewhere("--ui-mcp-proxy! --webui-mcp-proxy! --tools= --tools-runtime= --mcp-servers-config= --mcp-servers-json= "
              "-ag --agent! -no-ag", "Tools are run by the client, which gets the calls."),
    Elsewhere("--api-key-file=", "Write the keys, one per line, into FOREWORD_SERVE_API_KEY."),
    Elsewhere("--chat-template-kwargs= --reasoning-effort= -rea=? --reasoning=? --reasoning-preserve!",
              "A field of each request: chat_template_kwargs, or reasoning_effort."),
    Elsewhere("--chat-template= --chat-template-file=", TEMPLATE),
    Elsewhere("--reasoning-format= --reasoning-budget-message= --skip-chat-parsing! --prefill-assistant!",
              "The format of calls and of reasoning is found in the chat template; leave it out."),
    Elsewhere("--cache-reuse=", "--partial-reuse reuses equal prefixes, token by token; it is on."),
    Elsewhere("-sps= --slot-prompt-similarity=", "A request has no slot: any prefix is reused; leave it out."),
    Elsewhere("--media-path=", "Files of the server are never read for a request; send them in it."),
    Elsewhere("--models-preset=", "Write a [[model]] table for each model into the file of --config."),
    Elsewhere("--models-max=", "--ram-budget limits the memory of the loaded models, not their number."),
    Elsewhere("--sleep-idle-seconds=", SLEEP),
)  # fmt: skip

OLLAMA = (
    Elsewhere("seed=", left_out={"-1": ANY_SEED}),
    Elsewhere("num_ctx= num_thread=", left_out={"0": DEFAULT}),
    Elsewhere("from= adapter= num_batch= num_gpu= num_keep= penalize_newline="),
    Elsewhere("num_predict= temperature= stop= top_k= top_p= min_p= typical_p= repeat_penalty= "
              "presence_penalty= frequency_penalty= mirostat= tfs_z="),
    Elsewhere("draft=", here="speculation_model"),
    Elsewhere("draft_num_predict=", here="speculation_num_tokens"),
    Elsewhere("system=", "Send it as the first message of each conversation, with the role system."),
    Elsewhere("message=", "Send it in the messages of each conversation."),
    Elsewhere("template=", TEMPLATE),
    Elsewhere("renderer= parser=", "Prompts, calls and reasoning follow the chat template; leave it out."),
    Elsewhere("license=", "It stays with the model's files."),
    Elsewhere("requires=", "It is a version of Ollama; leave it out."),
    Elsewhere("repeat_last_n=", "Penalties count the whole text; dry_range limits those of sequences."),
    Elsewhere("mirostat_eta= mirostat_tau=", "There is no mirostat; min_p or top_n_sigma serve the same purpose."),
    Elsewhere("main_gpu= low_vram=", DEVICES),
    Elsewhere("use_mmap= use_mlock= f16_kv= logits_all= vocab_only= numa=", LOADING),
)  # fmt: skip

TABLES = {"vllm": VLLM, "llama.cpp": LLAMA_CPP, "ollama": OLLAMA}
_WORDS = {"": (0, 0), "!": (0, 0), "=": (1, 1), "=?": (0, 1), "=*": (1, MANY)}
"""Mark → the least and most words that follow the option."""


def elsewhere(name: str, table: Mapping[str, Elsewhere]) -> Elsewhere | None:
    """Return what is known of an option, also where its words are joined by _, as in ``--max_num_seqs``; for a key of a
    JSON object, as in ``--compilation-config.mode``, what is known of the object.
    """
    written = name.replace("_", "-")
    return next((table[one] for one in (name, written, written.partition(".")[0]) if one in table), None)


@cache
def options_of(engine: str) -> Mapping[str, Elsewhere]:
    """Return the options of an engine's server by their names, each with the numbers of words that follow it."""
    return dict(_each(TABLES[engine]))


def _each(table: tuple[Elsewhere, ...]) -> Iterator[tuple[str, Elsewhere]]:
    for group in table:
        for marked in group.names.split():
            name = marked.rstrip("=?*!")
            least, most = _WORDS[marked[len(name) :]]
            yield name, replace(group, names=name, least=least, most=most)
            if marked.endswith("!"):
                yield f"--no-{name[2:]}", replace(group, names=name, is_off=not group.is_off)
