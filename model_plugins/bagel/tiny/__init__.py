"""Tiny random checkpoints of BAGEL."""
