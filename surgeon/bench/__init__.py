"""Load, and what the results mean."""
