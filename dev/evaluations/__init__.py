"""Makes suites for `vllm-omni-ext eval` from public benchmarks, and draws pictures that public benchmarks' own scorers
rate. See README.md."""
