"""From records to tables, figures, the page and W&B; knows nothing of methods or models."""
