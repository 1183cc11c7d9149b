"""How `meshdsl sweep` measures candidates: what of each, in which processes, and its progress."""
