#!/usr/bin/env bash
# Makes an environment with SGLang, once, where launch.local, launch.slurm, launch.ray and test_external.sh look:
#   bash launch/sglang_environment.sh [FOLDER]         for CPUs, of 3 GB; FOLDER is .venv-sglang by default
#   bash launch/sglang_environment.sh --gpu [FOLDER]   for NVIDIA GPUs with CUDA 13, of 15 GB; needs no GPU itself
# For CPUs empty modules (empty_modules.py) stand in it for the CUDA packages that SGLang imports. All other packages come
# from the indexes that pip is configured with. Exit code 2 where it cannot be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

VERSION=0.5.23 TORCH=2.13.0+cpu NEEDED_KB=5000000 GPU=
if [ "${1:-}" = --gpu ]; then
  GPU=' gpu' NEEDED_KB=25000000
  shift
fi
FOLDER=${1:-.venv-sglang}
# what the server of a text model imports, of the packages that SGLang names; the others are for CUDA, or are not used
PACKAGES="transformers==5.24.0 tokenizers safetensors fastapi uvicorn orjson uvloop pyzmq psutil setproctitle pydantic \
partial_json_parser python-multipart einops requests aiohttp msgspec ipython numpy prometheus-client interegular pybase64 \
openai tiktoken sentencepiece loguru compressed-tensors dill pillow packaging jsonschema gguf hf_transfer watchfiles scipy \
xgrammar==0.2.8 nvidia-ml-py openai-harmony torchao==0.18.0"

prepare_folder SGLang AREAL_JAX_SGLANG_PYTHON || exit 0
if [ -n "$GPU" ]; then
  # SGLang's own requirements pin torch, its kernels and flashinfer
  install "sglang==$VERSION" || refuse "SGLang $VERSION cannot be installed: pip's message is above"
  require_cuda_torch
else
  install "torch==$TORCH" || refuse "no index of pip has torch $TORCH, or none can be reached: pip's message is above; \
torch's own index is PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
  install --no-deps "sglang==$VERSION" || refuse "SGLang $VERSION cannot be installed: pip's message is above"
  echo "torch==$TORCH" >"$FOLDER/constraints.txt"
  # shellcheck disable=SC2086
  install $PACKAGES --constraint "$FOLDER/constraints.txt" ||
    refuse "what SGLang needs cannot be installed: pip's message is above"
  # a .pth file is read by every process of the interpreter, the scheduler that the server spawns included
  MODULES=$("$FOLDER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp launch/empty_modules.py "$MODULES/areal_jax_empty_modules.py"
  echo 'import areal_jax_empty_modules; areal_jax_empty_modules.provide()' >"$MODULES/areal_jax_empty_modules.pth"
  SGLANG_USE_CPU_ENGINE=1 "$FOLDER/bin/python" -c 'import sglang.srt.entrypoints.http_server' >"$FOLDER/import.log" 2>&1 ||
    refuse "SGLang is installed and cannot be imported: $FOLDER/import.log says why"
fi
echo "$VERSION$GPU" >"$FOLDER/installed"
