"""BAGEL, which generates text and images from one sequence.

This package contains the computation, the stages (`stages`), and the code that runs in API servers (`requests`). "The
reference" is the model's published implementation. A "picture" is usually an input, an "image" is generated.
"""
