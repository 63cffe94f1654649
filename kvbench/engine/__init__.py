"""The only place that knows transformers: loading, attention function, caches, generation."""
