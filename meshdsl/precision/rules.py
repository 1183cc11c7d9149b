"""Rules of precision: which products are computed in which dtype, as one line of text.

    precision := rule ("," rule)*         rule := [scope ":"] form
    form := "fp8" option* | "int8" option* | dtype | "-"     option := "+tensor" | "+unrounded"

A product has a path: that of the parameter it reads, then its operation (`einsum`, `conv`,
`attention`), as in `params/blocks/mlp/w_in/einsum`. A scope is a glob that occurs in this path, as
in layouts: `mlp:fp8`, `blocks/attention:bf16`, `einsum:int8`. A rule without a scope applies to all
products. Of several rules that apply, the one with the longest scope decides; `-` leaves a product
as it is. Rules that are equally long and disagree about a product are an error.

`fp8` multiplies numbers of float8_e4m3fn, in the backward pass with cotangents of float8_e5m2
(Micikevicius et al. 2022, "FP8 formats for deep learning"); `int8` multiplies integers. Every
channel has its scale, a power of two. With `+tensor`, a tensor has one scale; with `+unrounded`,
scales are not rounded to powers of two. A dtype, such as `bf16`, is the one that operands are cast
to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshdsl.layouts.layout import matches
from meshdsl.ops.products.quantized import EightBits
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2

_INT8 = np.dtype("int8")
_EIGHT_BITS = {"fp8": (FLOAT8_E4M3, FLOAT8_E5M2), "int8": (_INT8, _INT8)}
_DTYPES = {
    "bf16": BFLOAT16,
    "bfloat16": BFLOAT16,
    "f16": np.dtype("float16"),
    "float16": np.dtype("float16"),
    "f32": np.dtype("float32"),
    "float32": np.dtype("float32"),
    "f64": np.dtype("float64"),
    "float64": np.dtype("float64"),
}
_FORMS = (*_EIGHT_BITS, "bf16", "f16", "f32", "f64", "-")
_OPTIONS = {"tensor": "per_tensor", "unrounded": "rounded"}
_WILDCARD = re.compile(r"[*?[]")


@dataclass(frozen=True)
class Rule:
    """One rule: `Rule("mlp", "fp8+tensor")`.

    Raises:
        ValueError: the form is unknown, or it has options that it does not take.
    """

    scope: str
    form: str

    def __post_init__(self) -> None:
        name, *options = self.form.split("+")
        if name not in _EIGHT_BITS and name not in _DTYPES and name != "-":
            written = "" if self.scope else "; with a scope, a rule is written as `mlp:fp8`"
            hint = did_you_mean(name.lower(), [*_EIGHT_BITS, *_DTYPES])
            raise ValueError(f"`{self}`: `{name}` is none of {', '.join(_FORMS)}{written}{hint}")
        for option in options:
            if name not in _EIGHT_BITS:
                raise ValueError(f"`{self}`: only {' and '.join(_EIGHT_BITS)} take `+{option}`")
            if option not in _OPTIONS:
                hint = did_you_mean(option, _OPTIONS)
                raise ValueError(f"`{self}`: `+{option}` is none of +{', +'.join(_OPTIONS)}{hint}")

    @staticmethod
    def parse(text: str) -> Rule:
        """Reads one rule, such as `mlp:fp8`; errors as in `Rule`."""
        scope, _, form = text.rpartition(":")
        return Rule(scope.strip("/"), form)

    @property
    def eight_bits(self) -> EightBits | None:
        """How products are computed in 8 bits; None: they are not."""
        name, *options = self.form.split("+")
        if name not in _EIGHT_BITS:
            return None
        return EightBits(
            *_EIGHT_BITS[name],
            per_tensor="tensor" in options,
            rounded="unrounded" not in options,
        )

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype that operands are cast to; None: they are not."""
        return _DTYPES.get(self.form)

    @cached_property
    def specificity(self) -> tuple[bool, int, int]:
        """The rank of the scope among those that apply to a product; the greatest decides."""
        components = [part for part in self.scope.split("/") if part not in ("", "**")]
        literal = [part for part in components if not _WILDCARD.search(part)]
        return self.scope != "", len(components), len(literal)

    def __str__(self) -> str:
        return f"{self.scope}:{self.form}" if self.scope else self.form


@dataclass(frozen=True)
class Precision:
    """The rules in the order written; prints as the text that `Precision.parse` reads.

        md.Precision.parse("mlp:fp8, attention:bf16")

    Raises:
        ValueError: two rules have one scope.

    Examples:
        >>> precision = md.Precision.parse("mlp:fp8, attention:bf16")
        >>> print(precision)
        mlp:fp8,attention:bf16
        >>> precision.rules[0]
        Rule(scope='mlp', form='fp8')
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        first: dict[str, Rule] = {}
        for rule in self.rules:
            other = first.setdefault(rule.scope, rule)
            if other is not rule:
                raise ValueError(f"two rules of precision have one scope: `{other}` and `{rule}`")

    @staticmethod
    def parse(text: str) -> Precision:
        """Reads `mlp:fp8,attention:bf16`; `,`, `;` and spaces separate, but not beside `:`.

        Raises:
            ValueError: malformed rules, all of them; or two rules have one scope.
        """
        rules, problems = [], []
        for part in re.findall(r"[^;,\s]+", re.sub(r"\s*:\s*", ":", text)):
            try:
                rules.append(Rule.parse(part))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))
        return Precision(tuple(rules))

    @staticmethod
    def of(precision: Precision | str | None) -> Precision:
        """Returns the rules that are meant: `Precision.of("fp8")`; none for None.

        Raises:
            ValueError: it is something else, or malformed.
        """
        if isinstance(precision, str):
            return Precision.parse(precision)
        if precision is None:
            return Precision()
        if isinstance(precision, Precision):
            return precision
        raise ValueError(
            'precision is given as "mlp:fp8,attention:bf16" or as a md.Precision, not as '
            f"{type(precision).__name__}: {precision!r}"
        )

    def rule_for(self, paths: Sequence[str]) -> Rule | None:
        """Returns the rule for a product, or None.

        Args:
            paths: the paths of the product, one for each parameter that it reads.

        Raises:
            ValueError: equally long rules disagree.
        """
        applying = [rule for rule in self.rules if any(matches(rule.scope, p) for p in paths)]
        if not applying:
            return None
        most = max(rule.specificity for rule in applying)
        first, *rest = [rule for rule in applying if rule.specificity == most]
        for other in rest:
            if other.form != first.form:
                raise ValueError(
                    f"`{first}` and `{other}` both apply to the product {paths[0]}; add a rule "
                    f"with a longer scope, as in `{paths[0]}:{first.form}`"
                )
        return first

    def __str__(self) -> str:
        return ",".join(map(str, self.rules))
