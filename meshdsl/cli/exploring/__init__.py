"""Exploring: which plans `meshdsl explore` computes ahead, and the processes that compute them."""
