"""Benchmarks, one file each: a task makes examples and scores answers. Tasks import no methods."""
