"""`vllm serve` whose replicas are spawned, as on CUDA: on a CPU the package forks them. Run with its arguments."""

from __future__ import annotations

import sys
from unittest import mock


def main() -> int:
    """Serve until a signal ends it."""
    from vllm_omni_ext.compat import activate

    activate()
    from vllm_omni_ext.cli.serve import main as serve
    from vllm_omni_ext.runtime.launch import launcher

    with mock.patch.object(launcher, "may_fork", lambda plan, usage: False):
        return serve(sys.argv[1:])


if __name__ == "__main__":  # spawned processes import this file again
    sys.exit(main())
