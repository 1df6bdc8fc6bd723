"""Starts replicas: their arguments, folders and logs, and the progress of the start."""
