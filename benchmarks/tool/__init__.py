"""The benchmarks as one program: what each compares, its results, and the pages made of them."""
