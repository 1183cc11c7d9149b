"""Graph rewrites: what is made simpler, shared or moved before anything is placed."""
