PYTHON ?= python3
PY := .venv/bin/python
OUT ?= out

.PHONY: demo ask test test-slow lint setup speed report help

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

ask: setup ## the same on the command line, about a photograph, and a picture of where it looked
	mkdir -p $(OUT)
	$(PY) -m arr_coc examples/astronaut.jpg "What colour is most of the picture?" --budget 0.2 --out $(OUT)/demo.png

test: setup lint ## the fast tests
	$(PY) -m pytest tests

test-slow: setup ## the long ones
	$(PY) -m pytest tests -m slow

lint: setup
	$(PY) -m ruff check .

speed: setup ## prefill of Qwen3-VL-2B's shapes, stock against chosen tokens
	$(PY) -m benchmarks speed --methods stock,arr_coc_texture,arr_coc --size 1024 --budgets 200 --rounds 5 --out $(OUT)/speed

report: setup ## the cards' tables and plots from the rows
	$(PY) -m benchmarks report
