# The reference arrays of the tests, see tests/references/README.md. `make references` makes those that differ anew,
# `make references CHECK=1` compares and writes nothing, and REAL=1 does the same for SmolLM2 and kvpress.
CHECK ?=
REAL ?=
REFERENCES := tests/references
# torch has a build without CUDA for this Python.
PYTHON311 ?= $(shell for one in python3.11 $(HOME)/.pyenv/versions/3.11.*/bin/python3.11 python3; do \
    "$$one" -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" 2>/dev/null && echo "$$one" && break; done)
MAKE_REFERENCES = $(REFERENCES)/make.py $(if $(CHECK),--check)

.PHONY: references
references: .venv311/.references $(if $(CHECK),,$(BIN)/.setup) $(if $(REAL),.venv311-kvpress/.references $(BIN)/.demo)
	.venv311/bin/python $(MAKE_REFERENCES) tiny
	$(if $(CHECK),,PYTHONPATH=$(REFERENCES) $(BIN)/python $(REFERENCES)/saved.py)
	$(if $(CHECK),,.venv311/bin/python $(MAKE_REFERENCES) --check tiny)
	$(if $(REAL),$(BIN)/python checkpoints/fetch_smollm2.py)
	$(if $(REAL),.venv311/bin/python $(MAKE_REFERENCES) smollm2 --model $(MODEL))
	$(if $(REAL),.venv311-kvpress/bin/python $(MAKE_REFERENCES) kvpress --model $(MODEL))

# torch comes first and by exact version: a range would bring the build with CUDA.
.venv311/.references: $(REFERENCES)/requirements.txt
.venv311-kvpress/.references: $(REFERENCES)/requirements-kvpress.txt
.venv311/.references .venv311-kvpress/.references:
	@[ -n "$(PYTHON311)" ] || { echo "make references needs Python 3.11: pyenv install 3.11" >&2; exit 1; }
	$(PYTHON311) -m venv $(@D)
	$(@D)/bin/python -m pip install -q torch==2.13.0
	$(@D)/bin/python -m pip install -q -r $<
	@touch $@
