"""How `meshdsl sweep` measures candidates: what of each, and in which processes."""
