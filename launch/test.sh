#!/usr/bin/env bash
# Sets everything up and passes the tests: lint, types, the fast tests. `bash launch/test.sh -m slow` runs the slow ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment dev
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m mypy
if [ $# -eq 0 ]; then set -- -m "not slow"; fi
# two processes: most of the time goes into compiling, which uses one core; files are not split over them and go in
# their own order, in which the long ones (app, learning, models) do not come last
exec "$PYTHON" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder "$@"
