#!/usr/bin/env bash
# Makes an environment with JetStream and this project, once, of 1.5 GB:
#   bash launch/jetstream_environment.sh [FOLDER]    .venv-jetstream by default, where servers look for it
# All packages come from the indexes that pip is configured with. Exit code 2 where it cannot be made.
# JetStream stands in no other environment: its wheel has a top-level package `benchmarks`, and its dependencies bring
# TensorFlow, which a server of token ids does not need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

VERSION=0.2.2 EXTRAS=jetstream,gguf NEEDED_KB=2500000
FOLDER=${1:-.venv-jetstream}

MARK="$VERSION $EXTRAS $(cksum <setup.py)"
[ "$(cat "$FOLDER/installed" 2>/dev/null)" != "$MARK" ] || exit 0
mkdir -p "$FOLDER" 2>/dev/null || refuse "$FOLDER cannot be made: name a folder of your own"
[ -f "$FOLDER/pyvenv.cfg" ] || ! compgen -G "$FOLDER/*" >/dev/null ||
  refuse "$FOLDER holds other files: name a new folder"
[ "$(df -Pk "$FOLDER" | awk 'END {print $4}')" -ge "$NEEDED_KB" ] ||
  refuse "the disk of $FOLDER has less than $((NEEDED_KB / 1000)) MB left: free some, or name another folder"

echo "installing google-jetstream $VERSION into $FOLDER (once, some minutes)"
python=$(find_python)
[ -x "$FOLDER/bin/python" ] || "$python" -m venv "$FOLDER" || refuse "$python -m venv $FOLDER failed: its message is above"
PYTHON=$FOLDER/bin/python
run_pip "$FOLDER/install.log" install --no-deps "google-jetstream==$VERSION" ||
  refuse "google-jetstream $VERSION cannot be installed: pip's message is above"
install_project "$EXTRAS" || refuse "what the server needs cannot be installed: pip's message is above"
"$PYTHON" -c 'from areal_jax.rollout.jetstream.server.compatibility import import_jetstream; import_jetstream()' \
  >"$FOLDER/import.log" 2>&1 || refuse "JetStream is installed and cannot be imported: $FOLDER/import.log says why"
echo "$MARK" >"$FOLDER/installed"
