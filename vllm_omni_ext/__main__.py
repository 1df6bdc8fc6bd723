"""`python -m vllm_omni_ext`: the `vllm-omni-ext` command."""

import sys

from vllm_omni_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
