#!/usr/bin/env bash
# Builds the documentation site in docs/_build/html; a warning is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment docs
"$PYTHON" -m sphinx -W --keep-going -q -b html docs docs/_build/html "$@"
echo "docs/_build/html/index.html"
