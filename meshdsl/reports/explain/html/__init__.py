"""The report as HTML: one page that needs nothing else, and fragments of it for notebooks."""
