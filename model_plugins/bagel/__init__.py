"""BAGEL: text and images from one sequence. The computation, its stages and, in `requests`, its part in API servers."""
