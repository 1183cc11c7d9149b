"""Search: the layout, mesh and variant of a step that are fastest by simulation."""
