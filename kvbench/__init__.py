"""kvbench: KV-cache compression methods for large language models, compared on one honest footing."""

__version__ = "0.1.0"
