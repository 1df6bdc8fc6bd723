"""`python -m benchmarks`: runs the programs in `benchmarks/`, and writes their results as JSON, HTML and Markdown."""
