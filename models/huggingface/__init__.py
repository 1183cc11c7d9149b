"""Folders of Hugging Face: their `config.json` as a model, their tensors as its parameters.

A family of models is a table in `families`, one file each: how a configuration is read and written,
and which tensor has which parameter. `folder.py` reads `config.json`, `placing.py` finds blocks of
parameters in tensors. Nothing here reads a number: `meshdsl.training.checkpointing` does.
"""

from meshdsl.models.huggingface.family import Family
from meshdsl.models.huggingface.folder import CONFIG, Folder, family_for, is_folder
from meshdsl.models.huggingface.placing import Part, Table

__all__ = ["CONFIG", "Family", "Folder", "Part", "Table", "family_for", "is_folder"]
