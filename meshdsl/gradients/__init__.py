"""Gradients and other derivatives: graphs computed from graphs."""
