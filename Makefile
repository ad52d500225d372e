# `make help` lists the targets. A build needs Python 3.11 or newer, make and a C++20 compiler; everything else is
# installed in .venv. Only `native` uses other tools: the cmake and ninja on the PATH and the nanobind of $(PYTHON).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := .stamps

.PHONY: help demo docs serve attack clients stubs lock lock-vllm test thorough coverage test-oldest slow-tests smoke schemas fuzz native-calls storms shadow soak soak-server sanitize proofs recipes replicas browser ray torch transformers families device gpu vllm sglang wheel wheels check bench bench-regress native pages arm emulate throughput vllm-compat deploy-check container workflow upgrade soak-models tools clean
.DEFAULT_GOAL := demo

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

$(BIN)/python:  ## the virtual environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Foreword needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== An environment in $(VENV), with the tools of the build (10 s)"
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml CMakeLists.txt $(shell find src native -type f ! -name '*.so' ! -name '*.pyc')
# Modules are compiled to bytecode when they are first imported: most of those installed never are. The bytecode is
# kept, since the tests start the commands hundreds of times.
export PYTHONDONTWRITEBYTECODE :=
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Packages as they were locked (`make lock`), each file verified by its hash.
LOCKED = $(PIP) --require-hashes -r
# Packages whose build depends on the index (for a kind of GPU, or none): they are of one version, and have no hash.
TORCH = $(PIP) -c tools/locked/torch.txt

# The build's own tools are in .venv, so that a second build compiles only what changed.
$(STAMPS)/build-tools: tools/locked/build.txt $(BIN)/python  ## cmake, ninja and the build backend
	$(LOCKED) $<
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/install: tools/locked/foreword.txt $(STAMPS)/build-tools $(SOURCES)  ## the package
	@echo "== The package: dependencies, and the native module (1 minute on two cores; nothing is shown meanwhile)"
	$(LOCKED) $<
	$(PIP) --no-build-isolation --no-deps .
	@touch $@

$(STAMPS)/test: tests/requirements.txt $(STAMPS)/install  ## what the tests need
	$(LOCKED) $<
	@touch $@

# A file has all that its packages need but those of $(TORCH), and for `make tools` and `make sglang` one package alone.
$(STAMPS)/%: tools/locked/%.txt $(STAMPS)/test  ## what one verb needs beside the tests
	$(LOCKED) $< --no-deps
	@touch $@

$(STAMPS)/lock: tools/locked/lock.txt $(BIN)/python  ## uv
	$(LOCKED) $<
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/serve: tools/locked/serve.txt $(STAMPS)/install  ## what the server needs
	$(LOCKED) $<
	@touch $@

demo: $(STAMPS)/install  ## build, get the default model, answer a prompt, show the first steps' tables
	@echo "== The model, 98 MB (once; as fast as the network)"
	$(BIN)/foreword models pull smollm2
	@echo "== An answer on this machine's processor, and the steps that made it (3 s)"
	$(BIN)/foreword run "What is the capital of France? Answer in one sentence." --max-tokens 24 --explain

serve: $(STAMPS)/serve  ## install what the server needs and serve the default model at http://127.0.0.1:8000
	$(BIN)/foreword serve $(MODEL)

test: $(STAMPS)/test  ## every layer, the default model included, on all cores; the slowest tests are listed
	$(BIN)/python -m pytest -n auto --dist worksteal --durations 15 -m "not long"

thorough: $(STAMPS)/test  ## `make test` with its long tests, all cases, and five times the examples of properties (an hour)
	$(BIN)/python -m pytest -n auto --dist worksteal --durations 30 --hypothesis-profile thorough $(TESTS)

COVERAGE = $(BIN)/python -m coverage
coverage: $(STAMPS)/coverage  ## the share of statements that the tests run, at least 80 %; TESTS="tests/server" (minutes)
	rm -rf build/coverage && mkdir -p build/coverage
	$(COVERAGE) run -m pytest -n auto --dist worksteal -m "not long" $(TESTS)
	$(COVERAGE) combine --quiet
	$(COVERAGE) report --skip-covered --sort=cover --fail-under=80

OLDEST = build/oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
build/oldest/installed: tools/locked/oldest/requirements.txt $(STAMPS)/build-tools $(SOURCES)  ## the package with the lowest versions that pyproject.toml names
	rm -rf build/oldest
	$(BIN)/python -m venv build/oldest
	$(OLDEST) --require-hashes -r $<
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w build/oldest/wheel .
	$(OLDEST) --no-deps build/oldest/wheel/*.whl
	@touch $@

test-oldest: build/oldest/installed  ## the tests with the lowest versions of the dependencies; TESTS="tests/server" (minutes)
	build/oldest/bin/python -m pytest -n auto --dist worksteal -m "not long" $(TESTS)

smoke: $(STAMPS)/test  ## a few quick tests of each layer, in seconds
	$(BIN)/python -m pytest -m smoke -rs

slow-tests: $(STAMPS)/test  ## tests whose processes are stopped most of the time, as on a busy machine; TESTS="tests/server --slower 5"
	$(BIN)/python tools/slow_tests.py $(or $(TESTS),tests/server tests/cluster tests/cli tests/engine tests/structured)

storms: $(STAMPS)/test  ## interrupts and failures at random moments of the engine, 2,000 of each (an hour)
	$(BIN)/python tests/storms/interrupt_storm.py --runs 2000
	$(BIN)/python tests/storms/fault_storm.py --runs 100
	$(BIN)/python tests/storms/async_storm.py --runs 50
	$(BIN)/python tests/storms/disk_storm.py --runs 100
	PYTHONPATH=tests:tests/cli $(BIN)/python tests/storms/restart_storm.py --runs 30
	PYTHONPATH=tests:tests/cli $(BIN)/python tests/storms/restart_storm.py --runs 30 --replicas 2

shadow: $(STAMPS)/test  ## another engine's random traffic under a shadow, healthy and with changed tensors (minutes)
	PYTHONPATH=tests/shadow $(BIN)/python tests/shadow/traffic.py --steps $(or $(STEPS),10000)

soak: $(STAMPS)/test  ## mixed traffic with failures, every output checked; MINUTES=10 or STEPS=1000000
	$(BIN)/python tests/storms/soak.py $(if $(STEPS),--steps $(STEPS),--minutes $(or $(MINUTES),10))

soak-server: $(STAMPS)/test  ## foreword serve under storms: 1,000 streams, closed, slow and silent connections; MINUTES=10
	PYTHONPATH=tests:tests/cli $(BIN)/python tests/server/soak.py --minutes $(or $(MINUTES),10)

soak-models: $(STAMPS)/test  ## models that load and unload under load: answers checked, flat memory; MINUTES=5
	PYTHONPATH=tests:tests/cli $(BIN)/python tests/server/soak_models.py --minutes $(or $(MINUTES),5)

attack: $(STAMPS)/test  ## hostile clients against foreword serve, alone and with replicas: answers, waits, memory (minutes)
	PYTHONPATH=tests:tests/cli $(BIN)/python tests/server/attack.py
	PYTHONPATH=tests:tests/cli $(BIN)/python tests/server/attack.py --replicas

schemas: $(STAMPS)/test  ## 1,000 outputs of the default model under public JSON schemas, each validated (minutes)
	$(BIN)/python tests/structured/schemas.py --outputs 1000

tools: $(STAMPS)/tools  ## calls of tools by the default model, on public cases that it installs: well formed, and right (minutes)
	PYTHONPATH=tests $(BIN)/python -m messages.tool_cases $(TOOLS)

fuzz: $(STAMPS)/test  ## damaged files and requests for every reader, for three minutes
	PYTHONPATH=tests:tests/cli $(BIN)/python -m fuzz $(FUZZ)

native-calls: $(STAMPS)/test  ## every function of the native module with damaged arguments, where tests call it (minutes)
	$(BIN)/python tests/fuzz/native_calls.py $(or $(TESTS),tests/kernels tests/batch tests/sampling tests/vllm_kernels \
	  tests/executors tests/engine/test_loras.py tests/engine/test_head.py tests/engine/test_tiers.py tests/device \
	  tests/models/test_families.py tests/models/test_pooling_models.py --most 20 -m "not model")

proofs: $(STAMPS)/test  ## corrupt each name of the reference pages, run its proof (minutes)
	$(BIN)/python tests/reference/prove.py

recipes: $(STAMPS)/test  ## recipes of CONTRIBUTING.md without each of their edits, and with native code that it builds (minutes)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest tests/recipes/needed.py tests/recipes/native.py

replicas: $(STAMPS)/test  ## foreword serve --replicas: kills, updates of all replicas under load, adapters
	$(BIN)/python -m pytest tests/cluster/test_replicas.py tests/cluster/updates.py

upgrade: $(STAMPS)/test  ## servers of two versions replaced under load, there and back; UPGRADE_FROM=COMMIT (minutes)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest tests/cluster/upgrade.py

browser: $(STAMPS)/browser  ## the pages in chromium-headless-shell or google-chrome: interaction, 390 pixels, 10,000 steps (minutes)
	@command -v chromium-headless-shell || command -v google-chrome || \
	  { echo "No browser is here: apt-get install chromium-headless-shell, or Google Chrome"; exit 1; }
	$(BIN)/python -m pytest -rs tests/insight/test_page_in_browser.py tests/insight/test_page_speed.py \
		tests/server/test_inspect_page.py tests/server/test_chat_page.py

ray: $(STAMPS)/ray  ## Ray Serve, Ray Data and batches on a Ray that the tests start (minutes)
	$(BIN)/python -m pytest tests/on_ray

torch: $(STAMPS)/test  ## every test that needs PyTorch, with PyTorch for the CPU (minutes)
	$(TORCH) torch
	$(BIN)/python -m pytest -n auto -k torch

device: $(STAMPS)/test  ## the kernels of GPUs in Triton's interpreter, and compiled for three of them (minutes)
	$(TORCH) torch triton
	$(BIN)/python -m pytest tests/device
	$(BIN)/python tools/device_table.py --models

gpu: $(STAMPS)/test  ## the tests of GPUs on the GPU of this machine (minutes)
	$(TORCH) torch triton
	TESTS_ON_GPU=1 $(BIN)/python -m pytest tests/device tests/pytorch/test_decoder.py tests/pytorch/test_integer_matrices.py

vllm: $(STAMPS)/test  ## a live vLLM checked, and its second model runner without Triton, in an environment that it makes, or in VLLM=DIRECTORY; TESTS="-k plain" (minutes)
	PYTHONPATH=benchmarks VLLM_ENVIRONMENT="$(VLLM)" $(BIN)/python tests/vllm_live $(TESTS)

build/sglang: tools/locked/sglang.txt $(BIN)/python  ## the wheel of SGLang, which is read and not installed
	rm -rf $@
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
	  -d $@ --require-hashes -r $<
	@touch $@

sglang: $(STAMPS)/test build/sglang  ## the plugin for SGLang against the names and signatures of its sources (a minute)
	SGLANG_WHEELS=build/sglang $(BIN)/python -m pytest tests/shadow/test_sglang_sources.py

transformers: $(STAMPS)/transformers  ## models of transformers: their tests, and every causal type of the library (minutes)
	$(TORCH) torch torchvision
	$(BIN)/python -m pytest tests/pytorch/test_transformers.py tests/pytorch/test_transformers_adapters.py \
		tests/pytorch/test_own_cache.py \
		tests/pytorch/test_transformers_memory.py tests/pytorch/test_transformers_compiled.py \
		tests/pytorch/test_reference_keys.py tests/pytorch/test_vision.py tests/pytorch/test_vision_commands.py \
		tests/pytorch/test_hearing.py tests/pytorch/test_encoder_decoder.py tests/pytorch/test_speech.py tests/server/test_vision_routes.py \
		tests/server/test_transcription_routes.py tests/server/test_hearing_routes.py tests/media
	$(BIN)/python tools/transformers_coverage/check.py

families: $(STAMPS)/families  ## every native family in all executors and formats, with drafts, adapters and GGUF files, against transformers (minutes)
	$(TORCH) torch
	PYTHONPATH=tests $(BIN)/python tools/family_matrix/check.py

clients: $(STAMPS)/clients  ## the server with clients of others: langchain-openai, llm, lm-eval, schemathesis (minutes)
	$(BIN)/python -m pytest tests/server/clients tests/server/test_tracing.py

wheel: $(BIN)/python  ## the wheel for this Python on other Linux machines in dist/, used without a compiler
	$(BIN)/python tools/wheels --here

wheels: $(BIN)/python  ## the files of a release in dist/: archive, wheels, the layer, lists of parts, hashes (minutes)
	$(BIN)/python tools/wheels $(WHEELS)

check: $(STAMPS)/check  ## format, lint, types, prose
	$(BIN)/ruff format --check src tests benchmarks tools examples
	$(BIN)/ruff check src tests benchmarks tools examples
	$(BIN)/codespell src docs examples benchmarks tools native *.md
	$(BIN)/python tools/prose.py
	$(BIN)/mypy

build/deploy-env: tools/locked/deploy.txt $(BIN)/python  ## the programs that check the files of a deployment
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r $<
	@touch $@

# apt-get reads lists of packages that it fetches here: a fresh machine has none, and only root may write its own.
APT = apt-get --quiet -oDir::State::lists=$(CURDIR)/build/promtool/lists -oDir::Cache=$(CURDIR)/build/promtool
build/promtool/usr/bin/promtool:  ## of Debian's or Ubuntu's package of Prometheus, which is unpacked and not installed
	mkdir -p build/promtool/lists/partial build/promtool/archives/partial
	cd build/promtool && $(APT) update >lists/log && $(APT) download prometheus && dpkg-deb -x prometheus_*.deb .

PROMTOOL = $(or $(shell command -v promtool),build/promtool/usr/bin/promtool)
deploy-check: build/deploy-env $(PROMTOOL)  ## workflows, container, manifests, unit and alerts, each by a program for its kind
	build/deploy-env/bin/actionlint
	build/deploy-env/bin/zizmor --quiet --offline .github
	build/deploy-env/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	build/deploy-env/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	build/deploy-env/bin/hadolint Dockerfile
	build/deploy-env/bin/kubernetes-validate --strict deploy/kubernetes.yaml
	$(PROMTOOL) check config --syntax-only deploy/prometheus.yaml
	$(PROMTOOL) check rules deploy/prometheus-alerts.yaml
	$(PROMTOOL) test rules deploy/prometheus-alerts.test.yaml
	sed 's,/opt/foreword/bin/foreword,/bin/true,' deploy/foreword.service > build/foreword.service
	if command -v systemd-analyze; then systemd-analyze verify build/foreword.service && \
	  systemd-analyze security --offline=true --no-pager --threshold=20 build/foreword.service >build/exposure; fi

workflow: build/deploy-env  ## the commands of a job of the workflows in a clone, JOB=docs.build; without JOB a list (minutes)
	build/deploy-env/bin/python tools/workflows.py $(JOB)

container: $(BIN)/python  ## build the image with buildah and use it; BASE=debian where no registry is reached (minutes)
	$(BIN)/python tools/container.py $(if $(BASE),--base $(BASE))

bench: $(STAMPS)/install  ## host cost of a step: Foreword's backends and Python lists
	$(BIN)/foreword bench host

bench-regress: $(STAMPS)/install  ## what the working tree makes faster or slower than the last tag or commit, or BASE=COMMIT (minutes)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/regress.py $(if $(BASE),--base $(BASE))

native:  ## build the native module in place, for work on the sources (PYTHONPATH=src)
	cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$$(command -v $(PYTHON)) >/dev/null
	cmake --build build/dev
	install build/dev/_native*.so src/foreword/

pages: $(STAMPS)/install  ## pages of docs/ and types of options, from the tables that they show
	PYTHONPATH=src:tools $(BIN)/python -m docpages

build/docs-env: tools/locked/docs.txt $(BIN)/python  ## the site's generator, in an environment of its own
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r $<
	@touch $@

docs: build/docs-env  ## the documentation as a site in build/docs, its links checked
	NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build
	@echo "build/docs/index.html: open it, or, to search, python3 -m http.server --directory build/docs"

vllm-compat: $(BIN)/python  ## what the newest release of vLLM changes of what the adapters read, from its wheel (a minute)
	PYTHONPATH=tools $(BIN)/python -m vllm_compat check

LOCK = $(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-header --no-annotate \
  --no-emit-index-url --no-emit-find-links --upgrade
# What a verb needs has the versions that the tests have, and leaves out what $(TORCH) installs. All of it is in $(VENV),
# so a package that several verbs need has one version.
LOCK_VERB = $(LOCK) --universal --constraints tests/requirements.txt --excludes tools/locked/torch.txt

lock: $(STAMPS)/lock  ## packages and hashes of the package, the server, the tests, each group of tools, and single verbs
	$(LOCK) --universal -o tools/locked/foreword.txt pyproject.toml
	$(LOCK) --universal --extra serve --extra hub --extra templates -o tools/locked/serve.txt pyproject.toml
	$(LOCK) --universal --extra test -o tests/requirements.txt pyproject.toml
	$(LOCK) --universal --extra test --resolution lowest-direct -o tools/locked/oldest/requirements.txt pyproject.toml
	for group in lock build wheel release check deploy docs arm; do \
	  $(LOCK) --universal --group $$group -o tools/locked/$$group.txt || exit 1; done
	for group in tools sglang; do $(LOCK) --universal --no-deps --group $$group -o tools/locked/$$group.txt || exit 1; done
	env -u UV_FIND_LINKS $(LOCK) --no-generate-hashes --python-platform x86_64-manylinux_2_28 --extra vision \
	  pyproject.toml | grep -E '^(torch|torchvision|triton)==' >tools/locked/torch.txt
	$(LOCK_VERB) --group browser -o tools/locked/browser.txt
	$(LOCK_VERB) --group coverage -o tools/locked/coverage.txt
	$(LOCK_VERB) --group clients --extra otel -o tools/locked/clients.txt pyproject.toml
	$(LOCK_VERB) --extra ray --constraints tools/locked/clients.txt -o tools/locked/ray.txt pyproject.toml
	$(LOCK_VERB) --group transformers --extra vision --extra speech -o tools/locked/transformers.txt pyproject.toml
	$(LOCK_VERB) --group families --extra transformers -o tools/locked/families.txt pyproject.toml

lock-vllm: $(STAMPS)/lock  ## packages and hashes of `make vllm`; UV_FIND_LINKS or UV_EXTRA_INDEX_URL has torch for CPUs
	PYTHONPATH=benchmarks $(BIN)/python -m peers.environments vllm_tests | $(LOCK) \
	  --python-platform x86_64-manylinux_2_28 --no-emit-package torch --no-emit-package torchaudio \
	  --no-emit-package torchcodec --no-emit-package triton -o benchmarks/peers/vllm_tests.txt - || { \
	  echo "vLLM for CPUs needs PyTorch's build for CPUs: set UV_FIND_LINKS to a folder that has it, or"; \
	  echo "UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu and UV_INDEX_STRATEGY=unsafe-best-match"; exit 1; }

stubs: $(STAMPS)/check  ## src/foreword/_native.pyi, the types of the native module, from the module
	$(BIN)/python tools/stubs.py

sanitize: $(STAMPS)/test  ## the native module's tests under the address, undefined-behaviour and thread sanitizers
	$(BIN)/python tools/sanitize.py

emulate: $(STAMPS)/test  ## the kernels for processors with AVX-VNNI, bf16 and AMX instructions, on one without
	$(BIN)/python tools/emulate.py

arm: $(BIN)/python  ## the NEON kernels against the scalar ones, cross-compiled and emulated
	$(BIN)/python tools/arm/check.py

throughput: $(STAMPS)/build-tools  ## inner loops of the kernels by llvm-mca: cycles and port pressure on six processors
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/throughput.py $(PROCESSORS)

clean:  ## delete the environment and everything built
	rm -rf $(VENV) $(STAMPS) build dist src/foreword/_native*.so
