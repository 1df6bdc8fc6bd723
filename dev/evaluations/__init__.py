"""Suites for `vllm-omni-ext eval` from public benchmarks, and pictures for the scorers of others. See README.md."""
