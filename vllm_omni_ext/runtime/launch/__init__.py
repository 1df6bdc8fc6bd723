"""Start replicas: arguments, folders, logs, progress."""
