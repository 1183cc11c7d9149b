"""Gradients and other derivatives: graphs made of graphs."""
