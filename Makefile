# `make` alone lists the targets. Everything runs in .venv, which is set up on first use.

PYTHON ?= python3
CONFIG ?= configs/sft.yaml
NPROC ?= 2
ARGS ?=
VERSION ?= 0.19.2
REPOSITORY ?=

BIN := .venv/bin
TRITON := build/triton
STAMP := .venv/.installed

# Without a GPU, ranks share the cores: a thread pool per rank would fight over them.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
export OMP_NUM_THREADS ?= 1
endif

.DEFAULT_GOAL := help
.PHONY: golden docs lock release sbom gpu kernels bench-gpu card families foreign-keys help install train dpo orpo simpo kto rm distill grpo images quick test test-all test-mcore pythons lint bench chaos fuzz mutations wrong-inputs clean

help:  ## this list
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## set up .venv (PYTHON=python3.12 picks the interpreter)

# torch has no hash: its wheel differs by platform and index
$(STAMP): setup.cfg pyproject.toml constraints.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

lock: $(STAMP)  ## write requirements.lock, with hashes, from setup.cfg and constraints.txt
	$(BIN)/python -m pip install uv
	$(BIN)/python -m tests.tools.lock

sbom: $(STAMP)  ## print the software bill of materials (CycloneDX JSON), from requirements.lock
	@$(BIN)/python -m tests.tools.lock --sbom

release: $(STAMP)  ## all checks of a release, then dist/: REPOSITORY=https://host/owner/name ARGS="build train" for some steps
	REPOSITORY=$(REPOSITORY) $(BIN)/python -m tests.tools.release $(ARGS)

docs: $(STAMP)  ## the public names' docstrings as pages, into build/docs
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	$(BIN)/python -m tests.tools.docs

train: $(STAMP)  ## train: CONFIG=configs/sft.yaml NPROC=2 ARGS="learning_rate=1e-3 max_steps=50"
	$(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node $(NPROC) train.py $(CONFIG) $(ARGS)
ifneq ($(filter $(CONFIG),configs/sft.yaml configs/sft_lora.yaml),)
	$(BIN)/python -m mca_lite generate $(CONFIG) $(ARGS) --before
endif

dpo orpo simpo kto: $(STAMP)  ## preference training of what `make train` wrote, on the embedded pairs or answers
	$(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node $(NPROC) train.py configs/$@.yaml $(ARGS)
	$(BIN)/python configs/tiny/preference.py $(or $(patsubst output_dir=%,%,$(filter output_dir=%,$(ARGS))),output/$@) output/sft

distill: $(STAMP)  ## a student of half the layers learns from a teacher, which is trained first if it is not there
	test -f output/teacher/config.json || $(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node $(NPROC) \
		train.py configs/sft.yaml train_on_prompt=true max_steps=300 save_strategy=no output_dir=output/teacher
	$(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node $(NPROC) train.py configs/distill.yaml $(ARGS)

rm: $(STAMP)  ## a reward model from what `make train` wrote, on the embedded pairs
	$(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node $(NPROC) train.py configs/rm.yaml $(ARGS)

grpo: $(STAMP)  ## GRPO on the embedded dates, in a loop of its own on a Session, in about two minutes
	$(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node $(NPROC) configs/examples/grpo.py configs/sft.yaml use_mca=false \
		eval_dataset=null val_size=256 per_device_train_batch_size=32 max_steps=40 learning_rate=3e-4 output_dir=output/grpo $(ARGS)

images: $(STAMP)  ## a tiny model learns to count squares in pictures drawn on the spot, in about a minute
	$(BIN)/python configs/images_demo/make.py
	$(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node $(NPROC) train.py configs/images_demo/sft.yaml $(ARGS)
	$(BIN)/python -m mca_lite generate configs/images_demo/sft.yaml $(ARGS)

quick: $(STAMP)  ## in 20 s of CPU time: structure, arguments, and the loss of one family at tp2 pp2
	$(BIN)/python -m pytest -q tests/test_quick.py tests/test_structure.py tests/test_args.py \
		-k "not homes_of_public_names and not private_name_of_the_package"

test: $(STAMP)  ## run the tests (CPU, no network): every capability and layout, products of both thinned
	$(BIN)/python -m tests.tools.suite

test-all: $(STAMP)  ## the same and more: every cell of the products that `make test` thins, slow tests, `make fuzz`
	$(BIN)/python -m tests.tools.suite -m "full or not full"

test-mcore: $(STAMP)  ## run the tests with another megatron-core: VERSION=0.19.2 ARGS="--subset"
	$(BIN)/python -m tests.tools.minors $(VERSION) $(ARGS)

pythons: $(STAMP)  ## what pip takes for Python 3.10 to 3.13, into tests/README.md
	$(BIN)/python -m tests.tools.pythons $(ARGS)

lint: $(STAMP)  ## ruff: lint and format; mypy: types of the public surface; the number of its strict errors
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m tests.tools.strict

bench: $(STAMP)  ## measure speed and memory: ARGS="..." goes to tests/tools/bench.py
	$(BIN)/python -m tests.tools.bench $(ARGS)

chaos: $(STAMP)  ## break ranks, disks and files in every phase, and score what is said and left: ARGS=all, goodput, "kills --kills 200"
	$(BIN)/python -m tests.tools.faults $(ARGS)

fuzz: $(STAMP)  ## train random configurations on both backends: ARGS="--count 300 --seed 7"
	$(BIN)/python -m tests.tools.fuzz $(ARGS)

mutations: $(STAMP)  ## wrong changes, each of which a test must notice, in minutes: ARGS="adapter stream" for some of them
	$(BIN)/python -m tests.tools.mutations $(ARGS)

wrong-inputs: $(STAMP)  ## wrong keys, files, worlds, limits and calls, each in words: ARGS="config world"
	$(BIN)/python -m tests.tools.wrong_inputs $(ARGS)

bench-gpu: $(STAMP)  ## speed on one GPU beside Hugging Face's Trainer, with and without Liger and float32 weights: ARGS="1.5B ours"
	$(BIN)/python -m pip install -c constraints.txt -e '.[bench]'
	$(BIN)/python -m tests.tools.bench_gpu $(ARGS)

# Triton before 3.9 indexes by arrays of one number, which numpy 2.4 refuses; in a folder of its own it leaves torch's alone
kernels: $(STAMP)  ## the kernels of a GPU against float64, on a CPU by Triton's interpreter (Triton into build, 1 GB)
	test -d $(TRITON)/triton || $(BIN)/python -m pip install --no-deps --target $(TRITON) 'triton>=3.9'
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -W ignore -m tests.tools.gpu_kernels

gpu: $(STAMP)  ## on a machine with CUDA: kernels, memory that stays, what plan says, parity with the torch backend, Transformer Engine; ARGS="plan", ... for one part
	$(BIN)/python -m tests.tools.gpu $(ARGS)

card: $(STAMP)  ## on a GPU, what a model of a real shape does here, into tests/cards: MODEL=Qwen3-8B
	$(BIN)/python -m tests.tools.cards $(MODEL)

golden: $(STAMP)  ## write the golden runs of tests/golden anew: ARGS="qwen3 gemma2" for some families
	$(BIN)/python -m tests.tools.golden $(ARGS)

families: $(STAMP)  ## measure every family against transformers, and write the table in tests/FAMILIES.md
	$(BIN)/python -m tests.tools.family_table

foreign-keys: $(STAMP)  ## before a release: the arguments of the newest other trainers, for the tests (downloads 20 MB)
	$(BIN)/python -m tests.tools.foreign_keys

clean:  ## remove what training, tests and the build left behind (keeps .venv)
	rm -rf output build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
