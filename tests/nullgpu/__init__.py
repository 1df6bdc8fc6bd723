"""vLLM's CUDA build on a device that computes nothing; `make null-gpu` runs it."""
