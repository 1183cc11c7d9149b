"""Pipelines: schedules as data. This folder knows nothing of graphs, programs and devices."""
