"""Module: a model, optimizer or state as a dataclass that is a pytree.

Fields are children unless declared with `static()`: those belong to the structure (names, sizes,
flags, functions) and must be hashable. A leaf's path is made of field names, dict keys and list
positions, joined by `/`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, dataclass_transform

import jax

from meshdsl.late import late


def static(**kwargs: Any) -> Any:
    """Declares a field that is part of the structure, not a child: `heads: int = md.static()`.

    Examples:
        >>> class Scaled(md.Module):
        ...     weight: md.Tensor
        ...     factor: float = md.static(default=0.5)
        >>> layer = Scaled(md.named([2.0, 4.0], ["embed"]))
        >>> print(md.jit(lambda layer: layer.weight * layer.factor)(layer))
        f32[embed=2] [1. 2.]
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
class Module:
    """Base class: subclasses become frozen dataclasses and pytrees.

    Examples:
        >>> import jax
        >>> class Linear(md.Module):
        ...     weight: object
        ...     scale: float = md.static(default=1.0)
        >>> jax.tree.leaves(Linear(weight=3.0))
        [3.0]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, repr=True)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        jax.tree_util.register_dataclass(
            cls,
            data_fields=[f.name for f in fields if not f.metadata.get("static")],
            meta_fields=[f.name for f in fields if f.metadata.get("static")],
        )

    def replace(self, **changes: Any) -> Any:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def _repr_html_(self) -> str | None:
        """Returns the tree of its fields, with the sizes of every part, for notebooks."""
        return late("value in a notebook")(self)


def path_of(keys: Any, start: str = "") -> str:
    """Returns a pytree key path as `start/field/key/0`."""
    parts = [start] if start else []
    for key in keys:
        for attribute in ("name", "key", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
    return "/".join(parts)
