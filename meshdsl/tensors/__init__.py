"""Tensors: dims with names, dtypes, arrays with data, and trees of them."""
