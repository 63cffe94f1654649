#!/usr/bin/env bash
# gpu_sanitize.sh [PYTEST ARGUMENTS]: compute-sanitizer over the tests of kernels on a GPU, memcheck (addresses out of
# bounds, misaligned) and racecheck (races in shared memory) one after the other. 1: one of them found something.
# PYTHON names the interpreter, SANITIZER the program, TOOLS the tools.
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
[ $# -gt 0 ] || tests=(tests/kernels/test_kernels.py tests/kernels/test_kernels_cuda.py tests/kernels/test_kernels_eviction.py)
# every allocation of its own, so that memcheck sees where each ends
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for tool in ${TOOLS:-memcheck racecheck}; do
  echo "== $tool"
  "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 1 \
    "$python" -m pytest -o addopts= -q -p no:cacheprovider "${tests[@]}" || { echo "$tool: FAILED"; status=1; }
done
exit $status
