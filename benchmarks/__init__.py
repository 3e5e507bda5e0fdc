"""Benchmark of this package and its peers; `python -m benchmarks.run --help`."""
