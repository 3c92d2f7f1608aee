#!/usr/bin/env bash
# Puts programs around packages of others, unchanged, to a server of ours whose answers are scripted: OpenAI's chat, whole
# and streamed, openai-agents over chat and responses, pydantic-ai with text and with an object, Anthropic's messages, the
# harness of verifiers with a tool over MCP.
#   bash launch/test_agents.sh            makes .venv-agents with the pinned packages, once, with uv (taken from pip where
#                                         the PATH has none); AREAL_JAX_AGENTS_PYTHON names another interpreter. The same
#                                         for verifiers: launch/verifiers_environment.sh, AREAL_JAX_VERIFIERS_PYTHON
# Further arguments go to pytest. Exit code 2 where the programs can not run here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

PACKAGES=(openai==3.57.0 openai-agents==0.24.0 'pydantic-ai-slim[openai]==2.68.0' anthropic==2.14.0)
FOLDER=.venv-agents

install_packages() {
  [ "$(cat "$FOLDER/installed" 2>/dev/null)" != "${PACKAGES[*]}" ] || return 0
  local python uv
  python=$(find_python) || refuse "the programs need Python 3.11 or newer: install one, or set AREAL_JAX_AGENTS_PYTHON"
  echo "installing ${PACKAGES[*]} into $FOLDER (once)"
  "$python" -m venv "$FOLDER" || refuse "$python -m venv $FOLDER failed: its message is above"
  uv=$(command -v uv) || {
    PYTHON=$FOLDER/bin/python run_pip "$FOLDER/install.log" install uv ||
      refuse "uv can not be installed: pip's message is above; put one on the PATH"
    uv=$FOLDER/bin/uv
  }
  "$uv" pip install --quiet --python "$FOLDER/bin/python" "${PACKAGES[@]}" ||
    refuse "no index has these packages, or none can be reached: uv's message is above"
  echo "${PACKAGES[*]}" >"$FOLDER/installed"
}

AGENTS=${AREAL_JAX_AGENTS_PYTHON:-$PWD/$FOLDER/bin/python}
[ -n "${AREAL_JAX_AGENTS_PYTHON:-}" ] || install_packages
"$AGENTS" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
  openai agents pydantic_ai anthropic 2>/dev/null ||
  refuse "AREAL_JAX_AGENTS_PYTHON=$AGENTS lacks openai, openai-agents, pydantic-ai-slim or anthropic: name an interpreter \
that has them, or unset the variable"
[ -n "${AREAL_JAX_VERIFIERS_PYTHON:-}" ] || bash launch/verifiers_environment.sh
VERIFIERS=${AREAL_JAX_VERIFIERS_PYTHON:-$PWD/.venv-verifiers/bin/python}
make_environment dev
AREAL_JAX_VERIFIERS_PYTHON=$VERIFIERS AREAL_JAX_AGENTS_PYTHON=$AGENTS "$PYTHON" -m pytest -m slow tests/rollout/http/agents "$@"
