"""Where things go: layout rules and the layout of one tensor."""
