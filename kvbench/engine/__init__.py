"""The only place that knows transformers: loading, attention function, fork cache, generation."""
