"""`vllm-omni-ext ARGUMENTS`, whose replicas start as if all of them shared one CUDA device: one after the other."""

from __future__ import annotations

import sys
from unittest import mock

from vllm_omni_ext.cli.main import main
from vllm_omni_ext.runtime.launch import launcher
from vllm_omni_ext.topology.placement import start_order

if __name__ == "__main__":
    with mock.patch.object(launcher, "devices_of", lambda plan: dict.fromkeys(start_order(plan), (0,))):
        sys.exit(main())
