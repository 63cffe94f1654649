#!/usr/bin/env bash
# try_wheel.sh PYTHON WHEEL: unpacks the wheel into an empty folder and uses it there, outside the checkout,
# with the libraries that PYTHON has. Fails where the package itself lacks something.
set -euo pipefail
python=$(realpath --no-symlinks "$1") wheel=$(realpath "$2") data=$(realpath "$(dirname "$0")/../tests/data/longbench")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/site" "$wheel"
cd "$folder"
export PYTHONPATH=$folder/site
kvbench() { "$python" -m kvbench "$@"; }
"$python" -c 'import kvbench, pathlib, sys; here = pathlib.Path(kvbench.__file__); sys.exit("site" not in here.parts)'
kvbench list methods | grep balancekv > /dev/null
kvbench task=needle 'task.lengths=[512]' method=[exact,snapkv] limit=1 logger=none > /dev/null
kvbench -m launcher=gpus launcher.workers=2 device=cpu budget.rate=0.25,0.5 method=[exact,snapkv] 'task.num_lines=[20]' limit=2 \
  experiment_name=sweep logger=none > /dev/null
kvbench experiment=table1 model=recall_mini hydra.mode=RUN method=[exact,snapkv] task.data="$data" task.per_dataset=1 \
  'task.datasets=[qasper]' confirm=false logger=none  > /dev/null
"$python" -m kvbench.report runs/table1 > /dev/null
grep -q 42.87 runs/table1/report.html  # the published score of the exact cache on qasper
echo "the wheel works outside the checkout: list, needle, sweep with workers, report with published numbers"
