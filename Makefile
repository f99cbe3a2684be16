# make demo: generate text privately with a real model.   make test: run the tests.   Both set the environment up first.
.PHONY: demo test test-ray test-docs setup lint browser docs links reproduce
BIN := .venv/bin

demo: setup
	$(BIN)/spu-llm run configs/experiment/quickstart.yaml --out results/quickstart

test: setup browser
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Every command of README.md and docs/ exactly as it is shown; `make test` runs long ones with smaller amounts.
test-docs: setup
	SPU_LLM_DOCS=whole $(BIN)/python -m pytest tests/docs/test_commands.py

# The quick set of experiments, and results/index.html, the page of all.
reproduce: setup
	$(BIN)/spu-llm reproduce

docs: setup
	$(BIN)/sphinx-build -q -W --keep-going -n -c docs -b html . results/docs

# Links to other sites; needs a network. Those between pages are checked by `make docs`, and so by `make test`.
links: setup
	$(BIN)/sphinx-build -q -c docs -b linkcheck . results/links

# SecretFlow on Ray, in an environment of its own (see requirements/ray.txt).
test-ray: .venv-ray/installed
	.venv-ray/bin/python -m pytest tests/plugin/test_secretflow_ray.py

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/installed

browser:
	@requirements/find-browser

# The stamp is written last, so an interrupted installation is done again.
.venv/installed: setup.cfg pyproject.toml requirements/find-python requirements/py310.txt requirements/py311.txt
	@python=$$(requirements/find-python) && rm -rf .venv && "$$python" -m venv .venv
	@version=$$($(BIN)/python -c 'import sys; print("%d%d" % sys.version_info[:2])') && \
	echo "Installing the pinned packages of requirements/py$$version.txt (about a minute)" && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/py$$version.txt && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . && \
	touch $@

.venv-ray/installed: setup.cfg pyproject.toml requirements/find-python requirements/ray.txt
	@python=$$(requirements/find-python) && rm -rf .venv-ray && "$$python" -m venv .venv-ray
	@echo "Installing the pinned packages of requirements/ray.txt (about two minutes)" && \
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/ray.txt && \
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . && \
	touch $@
