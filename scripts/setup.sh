# Sourced by quickstart.sh and test.sh; also alone, as `. scripts/setup.sh && setup_sglang`.
#   setup EXTRAS        makes .venv with this project in it, and activates it: setup dev,deepspeed
#   setup_sglang        makes .venv-sglang, which check_export engine=sglang runs SGLang in
# A second call with the same files does nothing.

setup() {
  local extras=$1 wanted
  wanted="$extras $(cat pyproject.toml constraints.txt | cksum)"
  if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    make_venv .venv || return 1
    echo "+ .venv/bin/pip install -c constraints.txt -e '.[$extras]'"
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" || return 1
    echo "$wanted" >.venv/installed
  fi
  # shellcheck disable=SC1091
  . .venv/bin/activate
}

setup_sglang() {
  local torch wanted
  torch=$(grep '^torch==' constraints.txt)
  wanted="$torch $(cksum <requirements-sglang.txt)"
  if [ "$(cat .venv-sglang/installed 2>/dev/null)" != "$wanted" ]; then
    make_venv .venv-sglang || return 1
    echo "+ .venv-sglang/bin/pip install $torch, then --no-deps -r requirements-sglang.txt"
    .venv-sglang/bin/pip install --quiet --disable-pip-version-check "$torch" || return 1
    .venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-deps \
      -r requirements-sglang.txt || return 1
    echo "$wanted" >.venv-sglang/installed
  fi
}

make_venv() {
  local folder=$1 python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed." \
      "Name one with PYTHON=/path/to/python3.11." >&2
    return 1
  fi
  if [ ! -x "$folder/bin/python" ] || [ ! -x "$folder/bin/pip" ]; then
    echo "+ $python -m venv $folder"
    rm -rf "$folder"
    "$python" -m venv "$folder" || {
      echo "error: no virtual environment could be made (on Debian: apt-get install python3-venv)." >&2
      return 1
    }
  fi
}
