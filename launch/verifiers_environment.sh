#!/usr/bin/env bash
# Makes an environment with verifiers, which runs the episodes of task.name='verifiers:TASKSET', once, of 0.5 GB:
#   bash launch/verifiers_environment.sh [PACKAGE ...]    .venv-verifiers, where a run looks; a PACKAGE is a taskset of
#                                                         yours, by its folder or name, installed at each call
# AREAL_JAX_VERIFIERS_PYTHON names another interpreter that has it. Packages come from the indexes that uv is configured
# with, uv itself from pip where the PATH has none. Exit code 2 where it cannot be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

VERSION=0.4.0 FOLDER=.venv-verifiers

# The program of the harness `null` is a script with packages of its own, which uv prepares before the first episode.
HARNESS='
import asyncio
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime


async def prepare():
    runtime = SubprocessRuntime(SubprocessConfig())
    await runtime.start()
    try:
        await runtime.prepare_uv_script(CHAT_PROGRAM_SOURCE)
    finally:
        await runtime.stop()

asyncio.run(prepare())
'

if [ "$(cat "$FOLDER/installed" 2>/dev/null)" != "$VERSION" ]; then
  python=$(find_python) || refuse "verifiers needs Python 3.11 or newer: install one, or set AREAL_JAX_VERIFIERS_PYTHON"
  echo "installing verifiers $VERSION into $FOLDER (once)"
  "$python" -m venv "$FOLDER" || refuse "$python -m venv $FOLDER failed: its message is above"
  # uv stands in the environment itself: a server starts programs with it
  PYTHON=$FOLDER/bin/python run_pip "$FOLDER/install.log" install uv ||
    refuse "uv cannot be installed: pip's message is above"
  "$FOLDER/bin/uv" pip install --quiet --python "$FOLDER/bin/python" "verifiers==$VERSION" ||
    refuse "no index has verifiers $VERSION, or none can be reached: uv's message is above"
  PATH=$PWD/$FOLDER/bin:$PATH "$FOLDER/bin/python" -c "$HARNESS" ||
    refuse "the program of the harness null cannot be prepared: uv's message is above"
  echo "$VERSION" >"$FOLDER/installed"
fi
if [ $# -gt 0 ]; then
  "$FOLDER/bin/uv" pip install --quiet --python "$FOLDER/bin/python" "$@" ||
    refuse "$* cannot be installed: uv's message is above"
fi
