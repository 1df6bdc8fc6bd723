"""Supervises the processes of a deployment: detects their end, and restarts them."""
