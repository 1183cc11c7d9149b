"""Notebook: what a value shows of itself as the result of a notebook's cell.

Each value is a few kilobytes of HTML, whatever its size. `values.py` says which function
shows what. Text of users is escaped by `reports.explain.html.elements`; nothing is fetched.
"""
