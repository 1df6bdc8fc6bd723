"""The benchmarks as one program: their descriptions, their results, and the pages of the results."""
