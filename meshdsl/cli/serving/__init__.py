"""Serving: what commands have in common that answer over HTTP."""
