"""BAGEL, which generates text and images from one sequence.

This package contains the computation, the stages (`stages`), and the code that runs in API servers (`requests`).
"""
