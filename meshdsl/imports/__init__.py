"""Programs of other frameworks as programs over named dims: a folder for each framework."""
