"""The files of results: records, manifests, shards. Knows nothing of models, methods or tasks."""
