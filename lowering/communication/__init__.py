"""Communication: the cheapest moves from one layout of a tensor to another."""
