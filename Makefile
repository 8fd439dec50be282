PYTHON ?= python3
PY := .venv/bin/python
OUT ?= out

.PHONY: demo ask test test-slow lint setup speed report help rehearse compat publish-check

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: .venv/.ready ## everything that is needed, in .venv

.venv/.ready: requirements.txt pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -r requirements.txt
	$(PY) -m pip install --quiet --no-deps -e .
	touch $@

demo: setup ## the app: stock and ARR-COC side by side, on your own image
	$(PY) -m arr_coc.app

ask: setup ## the same on the command line, about an example, and a picture of where it looked
	mkdir -p $(OUT)
	$(PY) -m arr_coc examples/one-thing.jpg "what is the cyan thing?" --budget 0.05 --out $(OUT)/demo.png

test: setup lint ## the fast tests
	$(PY) -m pytest tests

test-slow: setup .venv/olah/bin/olah-cli ## the long ones
	$(PY) -m pytest tests -m slow

lint: setup
	$(PY) -m ruff check .

speed: setup ## prefill of Qwen3-VL-2B's shapes, stock against chosen tokens
	$(PY) -m benchmarks speed --methods stock,arr_coc_texture,arr_coc --size 1024 --budgets 200 --rounds 5 --out $(OUT)/speed

report: setup ## the cards' tables and plots from the rows
	$(PY) -m benchmarks report

rehearse: setup .venv/olah/bin/olah-cli ## the first load of a full-size checkpoint from a Hub on loopback (9 GB of disk)
	$(PY) -W ignore tests/rehearse.py

compat: setup ## the suite's core against each transformers that we claim, and ZeroGPU's torch (a 5 GB download)
	$(PY) tests/compat.py

ORG ?= ORG
publish-check: setup ## stage the three repositories for ORG=..., and check each alone
	$(PY) -W ignore publish.py stage --org $(ORG)
	$(PY) -W ignore publish.py check

.venv/olah/bin/olah-cli: ## in an environment of its own: it serves the Hub's API from local git repositories
	$(PYTHON) -m venv .venv/olah
	.venv/olah/bin/python -m pip install --quiet olah==0.5.4
