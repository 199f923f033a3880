# The commands of the README. Each sets up what it needs; a second run repeats no work.
#
#   make train         set up, get data, train the example with two ranks, print a table
#   make test          set up, lint, types and all tests
#   make setup         only the environment (VENV), with Horovod built for it
#   make lint          lint and types
#   make bench         the benchmarks (docs and benchmarks/ say how to read them)
#   make docker        the image tf_mp
#   make wheelhouse    one folder with all wheels and data, for machines without the net
#   make gpu-check     job, proof and both ways of reduction on a machine with GPUs; under 5 minutes
#   make docs-pictures the pictures in docs/
#
# Variables: PYTHON=python3.12  VENV=.venv  DEVICE=cpu|gpu  MPI=system  WHEELHOUSE=DIR
#            DATA_DIR=DIR  ARGS="--stages 2 ..." (passed on to scripts/train.py or the benchmark)

SHELL := /bin/bash
VENV ?= .venv
ARGS ?=
IMAGE ?= tf_mp
export PYTHON VENV DEVICE MPI WHEELHOUSE DATA_DIR ARGS

.PHONY: train test setup lint bench docker wheelhouse gpu-check docs-pictures
.DEFAULT_GOAL := setup

setup:
	@bash scripts/bootstrap.sh

train: setup
	@bash scripts/run_train.sh

test: setup
	@bash scripts/run_tests.sh

lint: setup
	@bash scripts/run_tests.sh lint

bench: setup
	@bash scripts/run_in_venv.sh python scripts/bench.py $(ARGS)

gpu-check: setup
	@bash scripts/gpu_check.sh

docs-pictures: setup
	@bash scripts/run_in_venv.sh python scripts/docs_pictures.py $(ARGS)

wheelhouse:
	@bash scripts/make_wheelhouse.sh

docker:
	docker build --tag $(IMAGE) $(ARGS) .
