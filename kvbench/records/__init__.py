"""Append-only records on disk; knows nothing but files."""
