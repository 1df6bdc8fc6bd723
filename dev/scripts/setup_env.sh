#!/usr/bin/env bash
# Create or update .venv, or, with an argument such as 0.33, .venv-0.33 with that version of vLLM: Python 3.11, the pinned
# packages of requirements/cpu.txt, this repository's two, editable, and those of requirements/lm-eval.txt in
# .venv/lm-eval, where only the tests that want them look.
# Does nothing, and needs no network, if that was done before for the same requirements and pyproject.toml.
# Also installs libibverbs1, which Mooncake needs: with apt-get as root, otherwise into the environment; without it, tests
# that use Mooncake are skipped, and fail where CI is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VLLM=${1:-}
VENV=.venv${VLLM:+-$VLLM}
REQUIREMENTS=requirements/cpu.txt
LM_EVAL=requirements/lm-eval.txt
OTHER=${VLLM:+requirements/vllm-$VLLM.txt}
OVERLAY=dev/scripts/overlay_vllm.py
[[ -z $OTHER || -e $OTHER ]] || { echo "setup: VLLM=$VLLM: there is no $OTHER; take one of" requirements/vllm-*.txt >&2; exit 1; }
STAMP=$VENV/.setup_done
TORCH_INDEX=https://download.pytorch.org/whl/cpu
WANTED=$(cat "$REQUIREMENTS" "$LM_EVAL" $OTHER ${VLLM:+$OVERLAY} pyproject.toml dev/training/package/pyproject.toml dev/scripts/setup_env.sh | sha256sum | cut -d' ' -f1)

SYSTEM_PACKAGES=(libibverbs1 libnl-3-200 libnl-route-3-200)
MOONCAKE=$VENV/lib/python3.11/site-packages/mooncake

system_install() {
  [[ $(id -u) == 0 ]] || return 1
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "${SYSTEM_PACKAGES[@]}" >/dev/null
}

private_install() {
  # Mooncake's library looks beside itself first, also for what those that it finds need.
  local unpacked
  unpacked=$(mktemp -d)
  (cd "$unpacked" && apt-get download "${SYSTEM_PACKAGES[@]}" >/dev/null && for deb in *.deb; do dpkg-deb -x "$deb" .; done) &&
    find "$unpacked" \( -name 'libibverbs.so.*' -o -name 'libnl-*.so.*' \) -exec cp -a {} "$MOONCAKE" \;
  rm -rf "$unpacked"
  [[ -e $MOONCAKE/libibverbs.so.1 ]]
}

libibverbs() {
  [[ ! -d $MOONCAKE || -e $MOONCAKE/libibverbs.so.1 ]] && return
  ldconfig -p 2>/dev/null | grep --quiet 'libibverbs\.so\.1' && return
  command -v apt-get >/dev/null &&
    { { system_install || private_install; } 2>/dev/null ||
      { apt-get update >/dev/null && { system_install || private_install; }; } 2>/dev/null; } && return
  echo "setup: libibverbs.so.1 is missing and could not be installed; Mooncake's tests will be skipped." \
    "Debian: apt install libibverbs1; elsewhere: the package with libibverbs (rdma-core)" >&2
}

if [[ -f $STAMP && $(<"$STAMP") == "$WANTED" ]] && "$VENV/bin/python" -c 'import sys' 2>/dev/null; then
  libibverbs
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

echo "setup: installing $(cat "$REQUIREMENTS" "$LM_EVAL" | grep -c '==') pinned packages into $VENV (about two minutes)"
TORCH=$(grep '^torch==' "$REQUIREMENTS")
if ! "$VENV/bin/python" -m pip show --quiet torch 2>/dev/null; then
  # The CPU build is not on PyPI itself: take it from where pip is told to look, else from PyTorch's own index.
  pip_install "$TORCH" 2>/dev/null || pip_install --index-url "$TORCH_INDEX" "$TORCH"
fi
pip_install -r "$REQUIREMENTS"
rm -rf "$VENV/lm-eval"
pip_install --target "$VENV/lm-eval" -r "$LM_EVAL"
"$VENV/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec 2>/dev/null
[[ -z $OTHER ]] || "$VENV/bin/python" "$OVERLAY" "$OTHER"
pip_install --no-build-isolation --editable . --editable dev/training/package
libibverbs
echo "$WANTED" >"$STAMP"
