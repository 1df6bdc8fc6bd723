"""Connections from an API server to replicas."""
