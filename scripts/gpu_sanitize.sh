#!/usr/bin/env bash
# gpu_sanitize.sh [PYTEST ARGUMENTS]: compute-sanitizer over the tests of kernels on a GPU, at their small shapes.
# TOOL=memcheck (the default) looks for addresses out of bounds or misaligned, TOOL=racecheck for races in shared memory;
# one tool a call, since each takes minutes. racecheck does not see global memory, where the programs of the walk
# and of the clusters' finish meet: of these, barriers and tests are the evidence.
# Exit status 1: the tool found something. PYTHON names the interpreter, SANITIZER the program.
set -uo pipefail
cd "$(dirname "$0")/.."
sanitizer=${SANITIZER:-compute-sanitizer}
if [ -z "${SANITIZER:-}" ] && ! command -v "$sanitizer" > /dev/null; then
  sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
fi
if ! command -v "$sanitizer" > /dev/null; then
  echo "gpu_sanitize.sh needs compute-sanitizer, of the CUDA toolkit, and $sanitizer is not there; allowed: SANITIZER=<path>" >&2
  exit 2
fi
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_sanitize.sh needs a GPU: torch.cuda.is_available() is False" >&2
  exit 2
fi
tests=("$@")
[ $# -gt 0 ] || tests=(tests/kernels/test_{attention_mass,balanced_cut,balanced_walk,choice,decode_attention,eviction,online_clusters,kernels_cuda}.py)
# every allocation of its own, so that memcheck sees where each ends
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# without the full-size shapes, which take a sanitizer hours
export KVBENCH_SMALL_SHAPES=1
tool=${TOOL:-memcheck}
"$sanitizer" --tool "$tool" --target-processes all --error-exitcode 1 \
  "$python" -m pytest -o addopts= -q -p no:cacheprovider "${tests[@]}" || { echo "$tool: FAILED"; exit 1; }
