#!/usr/bin/env bash
# Create or update .venv: Python 3.11, the pinned packages of requirements/cpu.txt, and this package, editable.
# Does nothing, and needs no network, if that was done before for the same requirements and pyproject.toml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
REQUIREMENTS=requirements/cpu.txt
STAMP=$VENV/.setup_done
TORCH_INDEX=https://download.pytorch.org/whl/cpu
WANTED=$(cat "$REQUIREMENTS" pyproject.toml scripts/setup_env.sh | sha256sum | cut -d' ' -f1)

if [[ -f $STAMP && $(<"$STAMP") == "$WANTED" ]] && "$VENV/bin/python" -c 'import sys' 2>/dev/null; then
  exit 0
fi

PYTHON=$(command -v python3.11) || {
  echo "setup: python3.11 is not on PATH; install it (Debian: apt install python3.11 python3.11-venv)" >&2
  exit 1
}
rm -f "$STAMP"
"$VENV/bin/python" -c 'import sys' 2>/dev/null || { rm -rf "$VENV" && "$PYTHON" -m venv "$VENV"; }

pip_install() {
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}

echo "setup: installing $(grep -c '==' "$REQUIREMENTS") pinned packages into $VENV (about two minutes)"
TORCH=$(grep '^torch==' "$REQUIREMENTS")
if ! "$VENV/bin/python" -m pip show --quiet torch 2>/dev/null; then
  # The CPU build is not on PyPI itself: take it from where pip is told to look, else from PyTorch's own index.
  pip_install "$TORCH" 2>/dev/null || pip_install --index-url "$TORCH_INDEX" "$TORCH"
fi
pip_install -r "$REQUIREMENTS"
"$VENV/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec 2>/dev/null
pip_install --no-build-isolation --editable .
echo "$WANTED" >"$STAMP"
