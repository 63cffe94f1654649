"""Model x methods x task -> records."""
