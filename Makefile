# kvbench: `make demo` and `make test` set up everything they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# By exact version and first: a bare or ranged torch pulls gigabytes of CUDA where no GPU is.
TORCH ?= torch==2.13.0
RESULTS ?= results
LONGEVAL ?= ../shared/data/longeval_lines
ESSAYS ?= ../shared/data/paul_graham_essays
BIN = $(VENV)/bin
# How the jobs of the reproduce targets run: LAUNCHER=local, gpus or slurm; each split into SHARDS.
LAUNCHER ?= local
LAUNCH = launcher=$(LAUNCHER) $(if $(PARTITION),launcher.partition=$(PARTITION)) $(if $(SHARDS),shards=$(SHARDS))
VENV_REFERENCES ?= .venv-references
PIP_REFERENCES = $(VENV_REFERENCES)/bin/pip install --quiet --disable-pip-version-check \
  -c tests/references/constraints.txt

.PHONY: help setup demo test test-slow test-slurm test-references lint results reproduce-theory reproduce-table1 reproduce-table5 \
  reproduce-table6 reproduce-subgen-table2 report figures wandb-report train-recall-mini bench bench-kvpress clean

help: ## show the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 25

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("kvbench needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

setup: $(VENV)/.ready ## create the virtual environment

demo: setup ## the shipped model x all methods x tasks; tables, and results/demo/report.html
	$(BIN)/python -m kvbench experiment=demo results_dir=$(RESULTS)

test: setup lint ## lint, types, tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: setup ## the long tests: many kill points, fuzzing, a sweep on Slurm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

test-slurm: setup ## a sweep on a Slurm of this machine (root; installs slurm-wlm where it is missing)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -rs tests/slow/test_slurm.py

test-references: $(VENV_REFERENCES)/.ready ## compare with the real kvpress and minference packages, in $(VENV_REFERENCES)
	$(VENV_REFERENCES)/bin/python -m pytest tests/references tests/methods/test_adapters.py \
	  tests/methods/test_methods_conf.py tests/engine/test_engine.py

# kvpress needs transformers < 5.3, so it has an environment of its own. minference imports only where
# CUDA is; its Python files are all that is wanted, without what it would pull in.
$(VENV_REFERENCES)/.ready: pyproject.toml tests/references/constraints.txt
	test -x $(VENV_REFERENCES)/bin/python || $(PYTHON) -m venv $(VENV_REFERENCES)
	$(PIP_REFERENCES) $(TORCH)
	$(PIP_REFERENCES) $(TORCH) setuptools wheel pytest hypothesis -e '.[kvpress]'
	MINFERENCE_SKIP_CUDA_BUILD=TRUE MINFERENCE_FORCE_BUILD=TRUE \
	  $(PIP_REFERENCES) --no-build-isolation --no-deps minference
	@touch $@

.PHONY: wheel
wheel: setup ## build an sdist and a wheel; use the wheel outside the checkout
	rm -rf dist
	$(BIN)/python -m build --outdir dist . > /dev/null
	bash scripts/try_wheel.sh $(BIN)/python dist/*.whl

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

RUN = $(BIN)/python -m kvbench results_dir=$(RESULTS) batch_size=8
OFFICIAL = experiment=demo_official 'task.files=[$(LONGEVAL)/200_lines.jsonl]'
DRAWING = [uniform,subgen,balancekv,balancekv_needle]
results: setup ## results/ as committed: 200 examples a task, six draws, official cases, four rates; README's tables
	$(RUN) experiment=demo limit=200
	$(RUN) experiment=demo_seeds limit=200
	$(RUN) $(OFFICIAL)
	$(RUN) $(OFFICIAL) 'method=$(DRAWING)' seed=0,1,2,3,4,5
	$(RUN) experiment=demo task=layer_error_synthetic
	$(RUN) experiment=demo_rates limit=100
	$(RUN) experiment=needle_pooling
	$(RUN) experiment=joint_survival
	$(BIN)/python scripts/readme_tables.py

reproduce-theory: setup ## error against memory, discrepancy, clusters, ablation; results/theory/report.html
	$(BIN)/python -m kvbench experiment=walk_discrepancy results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=subgen_clusters results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=error_scaling results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=error_scaling_streaming results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=balancekv_ablation results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=balancekv_needle_ablation results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=balancekv_confirm results_dir=$(RESULTS)

# The experiment's folder: RESULTS=results/demo, or EXPERIMENT=demo in RESULTS, or the demo.
REPORTED = $(if $(EXPERIMENT),$(RESULTS)/$(EXPERIMENT),$(if $(filter results,$(RESULTS)),results/demo,$(RESULTS)))

# make reproduce-table1 MODEL=recall_mini LIMIT=2 task.data=tests/data/longbench ARGS='device=cpu'
# MInference's SnapKV and PyramidKV, per query head as in the paper, beside ours (pip install minference):
# make reproduce-table1 ARGS='method=[exact,streaming_llm,minference_pyramidkv,minference_snapkv,uniform,balancekv]'
# LAUNCHER=slurm PARTITION=gpu SHARDS=8: on a cluster. MODEL: of conf/model; LIMIT: examples of every dataset; ARGS: any further overrides.
NARROW = results_dir=$(RESULTS) $(LAUNCH) $(if $(MODEL),model=$(MODEL)) $(if $(LIMIT),task.per_dataset=$(LIMIT)) \
  $(if $(task.data),task.data=$(task.data)) $(ARGS)

reproduce-table1: setup ## BalanceKV's Table 1: three models on LongBench-E; narrow it by MODEL=, LIMIT=, ARGS=
	$(BIN)/python -m kvbench experiment=table1 $(NARROW)

reproduce-table5: setup ## BalanceKV's Table 5: rates 0.8, 0.9 and 0.95
	$(BIN)/python -m kvbench experiment=table5 $(NARROW)

reproduce-table6: setup ## BalanceKV's Table 6: SubGen on LongBench-E
	$(BIN)/python -m kvbench experiment=table6 $(NARROW)

reproduce-subgen-table2: setup ## SubGen's Table 2: LongBench, categories summed
	$(BIN)/python -m kvbench experiment=subgen_table2 $(NARROW)

# The two below have one dataset each: LIMIT counts its examples.
WHOLE = results_dir=$(RESULTS) $(LAUNCH) $(if $(MODEL),model=$(MODEL)) $(if $(LIMIT),limit=$(LIMIT)) $(ARGS)

.PHONY: reproduce-subgen-table1 reproduce-figure4
# MODEL=recall_mini makes fewer tokens of the cases, too few for 2,048 recent ones; there with
# ARGS='methods.subgen_recent_2048.recent=1024 methods.subgen_recent_3072.recent=1536'
reproduce-subgen-table1: setup ## SubGen's Table 1: LongEval's lines; LONGEVAL= the folder with its cases
	$(BIN)/python -m kvbench experiment=subgen_table1 task_label=longeval_200 'task.files=[$(LONGEVAL)/200_lines.jsonl]' budget.total_rate=0.65 $(WHOLE)
	$(BIN)/python -m kvbench experiment=subgen_table1 task_label=longeval_300 'task.files=[$(LONGEVAL)/300_lines.jsonl]' budget.total_rate=0.58 $(WHOLE)
	$(BIN)/python -m kvbench experiment=subgen_table1 task_label=longeval_400 'task.files=[$(LONGEVAL)/400_lines.jsonl]' budget.total_rate=0.5 $(WHOLE)

reproduce-figure4: setup ## BalanceKV's Figure 4: needle in a haystack; ESSAYS= the folder with the essays
	$(BIN)/python -m kvbench experiment=figure4 'task.haystack_files=[$(ESSAYS)/*.txt]' $(WHOLE)

report: setup ## rebuild tables, figures and page from records: make report RESULTS=results/demo
	$(BIN)/python -m kvbench.report $(REPORTED)

figures: setup ## every figure as PDF and PNG, every table as LaTeX: make figures RESULTS=results/demo
	$(BIN)/python -m kvbench.report --list $(REPORTED)

wandb-report: setup ## a W&B report, sent if WANDB_API_KEY is set: make wandb-report RESULTS=results/demo
	$(BIN)/python -m kvbench.report.wandb.report $(REPORTED)

train-recall-mini: setup ## train the shipped model again (an hour on one core)
	$(BIN)/python scripts/train_recall_mini.py

.PHONY: reproduce-table2 reproduce-h2o-table3 reproduce-h2o-table5 bench-throughput
reproduce-table2: setup ## BalanceKV's Table 2: seconds of prefill and decoding (a GPU of 40 GB)
	$(BIN)/python -m kvbench experiment=throughput_balancekv_table2 results_dir=$(RESULTS)

reproduce-h2o-table3: setup ## H2O's Table 3: tokens/s at the largest batch that fits (OPT-30B: 80 GB)
	$(BIN)/python -m kvbench experiment=throughput_h2o_table3 results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=throughput_h2o_table3 model=opt_30b results_dir=$(RESULTS)

reproduce-h2o-table5: setup ## H2O's Table 5: latency at equal batch (a GPU of 80 GB)
	$(BIN)/python -m kvbench experiment=throughput_h2o_table5 results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=throughput_h2o_table5 model=opt_13b \
	  'task.settings=[[5000,5000,4,0.4]]' results_dir=$(RESULTS)
	$(BIN)/python -m kvbench experiment=throughput_h2o_table5 model=opt_30b \
	  'task.settings=[[7000,1024,1,0.22]]' results_dir=$(RESULTS)

# On a GPU with the real architecture: make bench-throughput MODEL=llama31_8b_instruct CONTEXT=4096,16384,65536,130816
CONTEXT ?= 1024,2048,4096
bench-throughput: setup ## seconds and memory by context, beside transformers' caches: MODEL=, CONTEXT=
	$(BIN)/python -m kvbench experiment=throughput_context model=$(or $(MODEL),recall_mini) \
	  'task.prompt_tokens=[$(CONTEXT)]' results_dir=$(RESULTS)

bench: setup ## what sharing a prefill saves, what compression costs, every kernel against its floor
	$(BIN)/python scripts/bench_sharing.py
	$(BIN)/python scripts/bench_compress.py
	$(BIN)/python scripts/bench_kernels.py
	$(BIN)/python scripts/bench_store.py --folder .

bench-kvpress: $(VENV_REFERENCES)/.ready ## six methods in kvpress and in kvbench: seconds, answers, bytes
	OMP_NUM_THREADS=1 $(VENV_REFERENCES)/bin/python scripts/bench_kvpress.py $(ARGS)

clean: ## remove the virtual environment and caches, not the results
	rm -rf $(VENV) $(VENV_REFERENCES) .pytest_cache .mypy_cache .ruff_cache .hypothesis
