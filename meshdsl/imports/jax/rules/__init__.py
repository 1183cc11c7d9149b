"""What is known of JAX's primitives, a table per family."""

from collections.abc import Mapping

from meshdsl.imports.jax.conversion import Convert
from meshdsl.imports.jax.inference import Infer
from meshdsl.imports.jax.rules import (
    control,
    elementwise,
    positions,
    products,
    reductions,
    shapes,
)

RULES = {
    **control.TABLE,
    **elementwise.TABLE,
    **positions.TABLE,
    **products.TABLE,
    **reductions.TABLE,
    **shapes.TABLE,
}
INFER: Mapping[str, Infer] = {name: rule.infer for name, rule in RULES.items()}
CONVERT: Mapping[str, Convert] = {name: rule.convert for name, rule in RULES.items()}
