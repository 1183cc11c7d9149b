"""Functions of JAX as programs over named dims: `md.from_jax`.

A function is traced to a jaxpr, which has positions where the language has names. `inference`
finds which positions are one dim, and names them. `conversion` makes each equation an operation of
the language. `rules` has a table of primitives per family, both halves of a rule side by side.
"""
