#!/usr/bin/env bash
# try_wheel.sh WHEEL [TORCH]: installs the wheel into an empty environment outside the checkout, as somebody without the
# repository would, and uses what it must bring along: names and settings, the shipped model, page, launchers, published
# tables. TORCH: the requirement installed first, e.g. torch==2.13.0 (make's TORCH).
set -euo pipefail
here=$(dirname "$0")
wheel=$(realpath "$1") data=$(realpath "$here/../tests/data/longbench") constraints=$(realpath "$here/../constraints.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH PYTHONDONTWRITEBYTECODE  # what is imported is compiled once, not at every start
"${PYTHON:-python3}" -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "$@"; }
pip ${2:-torch}
pip -c "$constraints" "$wheel"
cd "$folder"
kvbench() { "$folder/venv/bin/kvbench" "$@"; }
kvbench list methods | grep balancekv > /dev/null
kvbench task=needle model=recall_mini 'task.lengths=[512]' 'method=[exact,snapkv]' limit=1 logger=none > /dev/null
test -s runs/needle-recall_mini/report.html
"$folder/venv/bin/python" -c "import kvbench; print(kvbench.load('runs').groupby('method').score.mean())" > /dev/null
# what is an extra is one line that names the command
for words in "launcher=slurm device=cpu" "experiment=balancekv_table1 model=recall_mini task.data=$data"; do
  if kvbench -m $words logger=none > /dev/null 2> said; then echo "kvbench -m $words: works without its extra?"; exit 1; fi
  grep -q "pip install 'kvbench\[" said || { cat said; exit 1; }
done
pip -c "$constraints" "$wheel[slurm,lm-eval]"
kvbench -m launcher=gpus launcher.workers=2 experiment=balancekv_table1 model=recall_mini 'method=[exact,snapkv]' task.data="$data" \
  task.per_dataset=1 'task.datasets=[qasper]' logger=none > /dev/null
"$folder/venv/bin/kvbench-report" runs/balancekv_table1 > /dev/null
grep -q 42.87 runs/balancekv_table1/report.html  # the published score of the exact cache on qasper
echo "the wheel works in an empty environment: list, needle and its page, workers, a report with published numbers"
