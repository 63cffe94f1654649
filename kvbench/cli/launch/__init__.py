"""Where the jobs of a sweep run: Slurm, or the GPUs of one machine."""
