"""What is known of JAX's primitives, a table per family."""

from collections.abc import Mapping

from meshdsl.imports.jax.conversion import Convert
from meshdsl.imports.jax.inference import Infer
from meshdsl.imports.jax.rules import (
    control,
    elementwise,
    indexing,
    positions,
    products,
    random,
    reductions,
    shapes,
    windows,
)

RULES = {
    **control.TABLE,
    **elementwise.TABLE,
    **indexing.TABLE,
    **positions.TABLE,
    **products.TABLE,
    **random.TABLE,
    **reductions.TABLE,
    **shapes.TABLE,
    **windows.TABLE,
}
INFER: Mapping[str, Infer] = {name: rule.infer for name, rule in RULES.items()}
CONVERT: Mapping[str, Convert] = {name: rule.convert for name, rule in RULES.items()}
