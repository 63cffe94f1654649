"""Benchmarks, one file each: examples in, scores out. They know nothing of methods."""
