"""Every analysis of an experiment."""
