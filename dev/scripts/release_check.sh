#!/usr/bin/env bash
# Build the sdists of both packages and wheels from them, install the wheels into a new environment and use them there:
# files of the repository may be missing in the wheels. Dependencies are those of .venv. The files stay in dist/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=$PWD/.venv/bin/python
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
SITE=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

git diff --quiet HEAD || { echo "release: there are changes that are not committed" >&2; exit 1; }
rm -rf dist
git archive HEAD | tar -x -C "$WORK" --one-top-level=tree
for project in . dev/training/package; do
  "$PYTHON" -m build --no-isolation --skip-dependency-check --outdir dist "$WORK/tree/$project" >/dev/null
done

"$PYTHON" -m venv "$WORK/env"
# The editable packages of .venv are not imported from there: Python ignores .pth files in a folder of a .pth file.
"$WORK/env/bin/python" - "$SITE" <<'PY'
import site, sys
from pathlib import Path

Path(site.getsitepackages()[0], "dependencies.pth").write_text(sys.argv[1] + "\n")
PY
"$WORK/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.whl
cd "$WORK"
env/bin/python - "$WORK/env" <<'PY'
import sys

import vllm_omni_ext
import vllm_omni_ext_tiny

for module in (vllm_omni_ext, vllm_omni_ext_tiny):
    assert module.__file__.startswith(sys.argv[1]), f"{module.__file__} is not what was installed"
PY
env/bin/vllm-omni-ext --help >/dev/null
env/bin/vllm-omni-ext tiny qwen3-omni model --trained >/dev/null
env/bin/vllm-omni-ext plan model --omni >/dev/null
cd - >/dev/null
ls -l dist
echo "release: the wheels work"
