# Sourced by quickstart.sh and test.sh: makes .venv with this project in it, and activates it.
#   setup EXTRAS        e.g. setup dev,deepspeed
# A second call with the same pyproject.toml and constraints.txt does nothing.

setup() {
  local extras=$1 python=${PYTHON:-python3} wanted
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed." \
      "Name one with PYTHON=/path/to/python3.11." >&2
    return 1
  fi
  wanted="$extras $(cat pyproject.toml constraints.txt | cksum)"
  if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    if [ ! -x .venv/bin/python ] || [ ! -x .venv/bin/pip ]; then
      echo "+ $python -m venv .venv"
      rm -rf .venv
      "$python" -m venv .venv || {
        echo "error: no virtual environment could be made (on Debian: apt-get install python3-venv)." >&2
        return 1
      }
    fi
    echo "+ .venv/bin/pip install -c constraints.txt -e '.[$extras]'"
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" || return 1
    echo "$wanted" >.venv/installed
  fi
  # shellcheck disable=SC1091
  . .venv/bin/activate
}
