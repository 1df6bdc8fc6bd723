#!/usr/bin/env bash
# Build the sdists and wheels of both packages, install each into an environment of its own and use it there: what works in
# the repository may be missing in what is published. Dependencies are those of .venv. Leaves the files in dist/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=$PWD/.venv/bin/python
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
SITE=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

git diff --quiet HEAD || { echo "release: there are changes that are not committed" >&2; exit 1; }
rm -rf dist
git archive HEAD | tar -x -C "$WORK" --one-top-level=tree
for project in . training/package; do
  "$PYTHON" -m build --no-isolation --skip-dependency-check --outdir dist "$WORK/tree/$project" >/dev/null
done

for file in dist/vllm_omni_ext-*; do
  rm -rf "$WORK/env"
  "$PYTHON" -m venv "$WORK/env"
  tiny=$(ls dist/vllm_omni_ext_tiny-*.whl)
  # The editable packages of .venv are left out: without their .pth files they cannot be imported.
  "$WORK/env/bin/python" - "$SITE" <<'PY'
import site, sys
from pathlib import Path
Path(site.getsitepackages()[0], "dependencies.pth").write_text(sys.argv[1] + "\n")
PY
  "$WORK/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall "$file" "$tiny"
  (cd "$WORK" && env/bin/python - "$WORK/env" <<'PY'
import sys, vllm_omni_ext, vllm_omni_ext_tiny
for module in (vllm_omni_ext, vllm_omni_ext_tiny):
    assert module.__file__.startswith(sys.argv[1]), f"{module.__file__} is not what was installed"
PY
  env/bin/vllm-omni-ext --help >/dev/null
  env/bin/vllm-omni-ext tiny qwen3-omni model --trained >/dev/null
  env/bin/vllm-omni-ext plan model --omni >/dev/null
  rm -r model)
  echo "release: $file works"
done
ls -l dist
