"""Hydra's front door: from a command line to jobs."""
