"""The version of the package; setup.py reads it here."""

VERSION = "0.1.0"
