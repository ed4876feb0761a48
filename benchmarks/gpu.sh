#!/usr/bin/env bash
# What one GPU can show: benchmarks/gpu.sh DATA_ROOT (the folder of CIFAR-10's official files). Trainings take at most fourteen minutes; whole studies,
# which come first where Ray, Optuna and MLflow are installed, another twenty-five at most (STUDIES=0 leaves them out).
# Needs torch, numpy, hydra-core and scikit-learn's digits file; with schedulefree, pytest, pytest-xdist and hypothesis it runs the gpu tests too.
set -uo pipefail
cd "$(dirname "$0")/.."
root=${1:?usage: benchmarks/gpu.sh DATA_ROOT}
python=${PYTHON:-python3}
failed=()

step() {  # step NAME SECONDS COMMAND...: run one part, however the others end
    echo "== $1"
    timeout "$2" "${@:3}" || failed+=("$1")
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || exit 1
"$python" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda); assert torch.cuda.is_available()' || exit 1

if [ "${STUDIES:-1}" = 1 ] && "$python" -c 'import ray, optuna, mlflow' 2>/dev/null; then
    step "whole studies" 1500 "$python" -m benchmarks.gpu_studies --data-root "$root"
else
    echo "== whole studies: left out"
fi
step "equal numbers" 130 "$python" -m benchmarks.equal_numbers --device cuda
if "$python" -c 'import pytest, hypothesis, xdist, schedulefree' 2>/dev/null; then
    mapfile -t files < <(grep -rl --include='test_*.py' mark.gpu tests)  # the others import what a machine for this may lack
    step "gpu tests" 300 "$python" -m pytest -q -m gpu -n0 --session-timeout=270 "${files[@]}"
else
    echo "== gpu tests: left out, since pytest, hypothesis, pytest-xdist or schedulefree is not installed"
fi
step "training speed" 60 "$python" -m benchmarks.training_speed --device cuda --pairs 10
speed=("$python" -m benchmarks.cifar10_speed --data-root "$root")
step "cifar10_speed" 240 "${speed[@]}" --max-seconds 190
step "cifar10_speed in CUDA graphs" 110 "${speed[@]}" --max-seconds 90 --name cifar10_speed_graphs --textbook-runs 0 runtime.cuda_graph=true

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all parts passed; figures are in benchmarks/results/"
