"""Every figure."""
