"""Serving: texts for many requests at once, by continuous batching, and the OpenAI API over HTTP.

An `Engine` writes the texts of `Request`s on a thread of its own.
"""

from meshdsl.generation.serving.engine import Engine, Event, Full, Request, Stopped

__all__ = ["Engine", "Event", "Full", "Request", "Stopped"]
