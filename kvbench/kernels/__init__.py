"""The hot operations: tensor functions that know nothing of caches, methods or models."""
