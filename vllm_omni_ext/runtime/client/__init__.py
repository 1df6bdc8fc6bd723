"""Connects API servers to replicas."""
