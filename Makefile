# `make demo` and `make test` set everything up by themselves, in .venv.
# PYTHON=/path/to/python picks the interpreter; CUDA=cuda13 the CUDA of test-gpu.

RUN := .venv/bin/python
CUDA ?= cuda12
export PROMPT ?= class Point:\n    """A point in the plane."""\n\n    def __init__(self, x, y):\n

.PHONY: help demo test lint test-gpu setup

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /make \1\t/p' Makefile

demo: setup  ## generate text with the bundled model
	@.venv/bin/openjet-jax generate tiny --prompt "$$PROMPT" --max-new-tokens 96 \
		--temperature 0.6 --top-k 20 --top-p 0.95 --seed 1
	@echo "This was a model of 17 million parameters: it writes plausible code, not right code."
	@echo "Next: .venv/bin/openjet-jax chat tiny"

test: setup  ## lint, then every test that needs no GPU
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(RUN) -m pytest -n 2 --dist loadgroup -rs || status=1; \
	exit $$status

lint: setup  ## ruff and pyright
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(RUN) -m pyright --pythonpath $(RUN)

test-gpu:  ## the tests that need an NVIDIA GPU
	@command -v nvidia-smi >/dev/null || { echo "no nvidia-smi here: test-gpu needs an NVIDIA GPU" >&2; exit 1; }
	@.ci/setup.sh $(CUDA)
	@$(RUN) -m pytest -m gpu

setup:
	@.ci/setup.sh
