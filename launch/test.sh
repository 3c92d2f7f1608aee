#!/usr/bin/env bash
# Sets everything up and passes the tests: lint, types, all tests that are not slow. `--fast` leaves out whole runs of the
# program, `-m slow` runs the slow tests. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment dev
add_compiled 'reasoning-gym>=0.1.25' reasoning_gym
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules
"$PYTHON" -m compileall -qq areal_jax
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
nice "$PYTHON" -m mypy & # on what the tests leave of the cores
types=$!
if [ $# -eq 0 ]; then set -- -m "not slow"; fi
if [ "$1" = --fast ]; then set -- -m "not slow and not whole" "${@:2}"; fi
# three processes keep two cores busy: a third of the time, tests wait for programs that they have started. Files are not
# split over them and go in their own order, in which the long ones (app, learning, models) do not come last
code=0
"$PYTHON" -m pytest -n "${TEST_PROCESSES:-3}" --dist loadfile --no-loadscope-reorder "$@" || code=$?
wait "$types" || "$PYTHON" -m mypy # says again, from its cache, what it found
exit "$code"
