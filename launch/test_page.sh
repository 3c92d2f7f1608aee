#!/usr/bin/env bash
# Opens report.html, and rollouts.html where a run keeps answers, in a headless Chromium without network and looks at
# them: no error and no request, every section and figure is there, the timeline of the slots zooms and pans, every token
# has the colour of its value. Leaves pictures of the pages.
#   bash launch/test_page.sh                a made-up run with 50,000 intervals, and a comparison of two runs
#   bash launch/test_page.sh RUN [RUN ...]  the workdirs of runs: the report of each is made again; several are compared
# CHROMIUM names the browser, PICTURES the folder of the pictures (pictures/ in a temporary folder by default).
# Exit code 1 where a check fails, 2 where it can not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
  echo "error: $1" >&2
  exit 2
}

# Prints the path of a Chromium: named, on the PATH, or one that playwright has installed.
find_chromium() {
  local name
  if [ -n "${CHROMIUM:-}" ]; then
    command -v "$CHROMIUM"
    return
  fi
  for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name"; then return; fi
  done
  compgen -G "${PLAYWRIGHT_BROWSERS_PATH:-$HOME/.cache/ms-playwright}/chromium-*/chrome-linux*/chrome" | tail -n 1 | grep .
}

BROWSER=$(find_chromium) || refuse "there is no Chromium${CHROMIUM:+ at CHROMIUM=$CHROMIUM}: install one, for example \
with 'apt-get install chromium', or name one in CHROMIUM"
# in a shell of its own: `set -e` does not hold inside a condition
bash -euo pipefail -c 'source launch/environment.sh; make_environment browser' ||
  refuse "the packages of areal_jax[browser] cannot be installed: pip's message is above"
source launch/environment.sh
make_environment browser
"$PYTHON" -c 'import bokeh, PIL, playwright' 2>/dev/null ||
  refuse "$PYTHON lacks a package of areal_jax[browser]: bokeh, pillow or playwright"

FOLDER=$(mktemp -d)
PICTURES=${PICTURES:-$FOLDER/pictures}
mkdir -p "$PICTURES"
if [ $# -eq 0 ]; then
  "$PYTHON" -m tests.report.busy_run "$FOLDER/busy" --updates=1200
  "$PYTHON" -m tests.report.busy_run "$FOLDER/short" --updates=40
  set -- "$FOLDER/busy" "$FOLDER/short"
fi
pages=()
for run in "$@"; do
  "$PYTHON" -m areal_jax.main_report --workdir="$run" >/dev/null
  pages+=("$run/report.html")
  if [ -d "$run/rollouts" ]; then
    "$PYTHON" -m areal_jax.main_rollouts "$run" --page >/dev/null
    pages+=("$run/rollouts.html")
  fi
done
if [ $# -gt 1 ]; then
  "$PYTHON" -m areal_jax.main_report --compare "$@" --out="$FOLDER/compare.html" >/dev/null
  pages+=("$FOLDER/compare.html")
fi
"$PYTHON" -m launch.page_check --chromium="$BROWSER" --pictures="$PICTURES" "${pages[@]}"
