#!/usr/bin/env bash
# Makes an environment with SGLang that serves on a CPU, once, of 3 GB:
#   bash launch/sglang_environment.sh [FOLDER]    .venv-sglang by default, where launch.local and test_external.sh look
# Empty modules (empty_modules.py) stand in it for the CUDA packages that SGLang imports. All other packages come from
# the indexes that pip is configured with. Exit code 2 where it cannot be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

VERSION=0.5.23 TORCH=2.13.0+cpu NEEDED_KB=5000000
FOLDER=${1:-.venv-sglang}
# what the server of a text model imports, of the packages that SGLang names; the others are for CUDA, or are not used
PACKAGES="transformers==5.24.0 tokenizers safetensors fastapi uvicorn orjson uvloop pyzmq psutil setproctitle pydantic \
partial_json_parser python-multipart einops requests aiohttp msgspec ipython numpy prometheus-client interegular pybase64 \
openai tiktoken sentencepiece loguru compressed-tensors dill pillow packaging jsonschema gguf hf_transfer watchfiles scipy \
xgrammar==0.2.8 nvidia-ml-py openai-harmony torchao==0.18.0"

refuse() {
  echo "error: $1" >&2
  exit 2
}

[ "$(cat "$FOLDER/installed" 2>/dev/null)" != "$VERSION" ] || exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || refuse "SGLang is installed for Linux on x86-64, and this is $(uname -sm)"
python3.11 -c 'import ensurepip, venv' 2>/dev/null ||
  refuse "SGLang needs python3.11 with venv, and the PATH has none: install it, or set AREAL_JAX_SGLANG_PYTHON"
mkdir -p "$FOLDER" 2>/dev/null || refuse "$FOLDER cannot be made: name a folder of your own"
[ -f "$FOLDER/pyvenv.cfg" ] || ! compgen -G "$FOLDER/*" >/dev/null ||
  refuse "$FOLDER holds other files: name a new folder"
[ "$(df -Pk "$FOLDER" | awk 'END {print $4}')" -ge "$NEEDED_KB" ] ||
  refuse "the disk of $FOLDER has less than $((NEEDED_KB / 1000000)) GB left: free some, or name another folder"

echo "installing SGLang $VERSION into $FOLDER (once, some minutes)"
python3.11 -m venv "$FOLDER" || refuse "python3.11 -m venv $FOLDER failed: its message is above"
install() {
  PYTHON=$FOLDER/bin/python run_pip "$FOLDER/install.log" install "$@"
}
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
echo "$VERSION" >"$FOLDER/installed"
