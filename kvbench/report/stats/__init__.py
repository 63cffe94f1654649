"""Intervals, tests and marks."""
