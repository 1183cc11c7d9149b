"""Model definitions and their named configurations."""
