"""Reports: what a program says of itself, and many programs compared."""
