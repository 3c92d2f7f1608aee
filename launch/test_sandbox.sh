#!/usr/bin/env bash
# Tries every way out of the sandbox that the tests know (tests/workers/sandbox), as root and as an ordinary user, with
# Landlock alone and inside bubblewrap.
#   bash launch/test_sandbox.sh              prints a line for each of the four, and what was not as it must be
#   bash launch/test_sandbox.sh --json FILE  writes the counts there too
# It installs nothing: bubblewrap is the package of the system (apt-get install bubblewrap), and root needs an interpreter
# that every user can read, its own or /usr/bin/python3.11. Exit code 0 where all held and each of the four ran, 1 where an
# attempt got through or a control failed, 2 where one of the four can not run here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment dev
exec "$PYTHON" -m tests.workers.sandbox.run_attempts "$@"
