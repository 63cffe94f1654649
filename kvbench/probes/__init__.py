"""Tensor-level and timing experiments, one file each: plans that the runner runs like tasks."""
