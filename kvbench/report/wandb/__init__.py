"""Results in Weights & Biases."""
