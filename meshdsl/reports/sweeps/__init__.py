"""Sweeps: one training step under many meshes and layouts, ranked."""
