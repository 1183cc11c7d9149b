"""Overrides: every kind of field, and every kind of mistake."""

import dataclasses
from typing import Literal

import pytest

import meshdsl as md
from meshdsl.models.overrides import apply_overrides


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 2
    width: int | None = None
    rate: float = 0.1
    tied: bool = False
    kind: Literal["rms", "layer"] = "rms"
    label: str = "x"
    sizes: tuple[int, ...] = (1,)
    policy: md.Policy = dataclasses.field(default_factory=md.Policy)

    def __post_init__(self):
        if self.layers > 9:
            raise ValueError(f"layers={self.layers} is more than 9")


def overridden(text):
    return apply_overrides(Config(), text, "tiny")


def message(text):
    with pytest.raises(ValueError) as caught:
        overridden(text)
    return str(caught.value).splitlines()


def test_values_are_read_as_the_fields_annotation_asks():
    text = " layers=8, width=16,rate=1e-3 ,tied=True,kind=layer,label=a b"
    assert overridden(text) == Config(8, 16, 1e-3, True, "layer", "a b")
    assert overridden("width=none,tied=0") == Config()
    assert overridden("sizes=3+4").sizes == (3, 4)
    assert message("sizes=3+x")[1] == "  sizes=3+x: needs a whole number"
    assert overridden("") == Config()


def test_a_dot_reaches_the_fields_of_a_field():
    assert overridden("policy.compute=bfloat16").policy == md.Policy(compute="bfloat16")
    assert overridden("policy=bfloat16,policy.params=float32").policy == md.Policy(
        "float32", "bfloat16", "bfloat16"
    )


def test_every_mistake_is_told():
    assert message(
        "layres=8,rate=fast,tied=perhaps,kind=lyer,layers,width=2.5,layers=3,layers=4"
    ) == [
        "tiny with 'layres=8,rate=fast,tied=perhaps,kind=lyer,layers,width=2.5,layers=3,layers=4': "
        "7 problems",
        "  layres=8: there is no field `layres`. Did you mean `layers`? Choose from layers, width, "
        "rate, tied, kind, label, sizes, policy, policy.params, policy.compute, policy.output",
        "  rate=fast: needs a number",
        "  tied=perhaps: needs true or false",
        "  kind=lyer: choose from rms, layer. Did you mean `layer`?",
        "  layers: write field=value",
        "  width=2.5: needs a whole number",
        "  layers=4: given twice",
    ]


def test_what_the_configuration_refuses_is_told():
    assert message("layers=10") == [
        "tiny with 'layers=10': 1 problem",
        "  layers=10 is more than 9",
    ]
    assert message("policy.compute=bfloat")[1].startswith("  unknown dtype 'bfloat'; choose one of")
    assert message("policy.compute=int32")[1].startswith("  policy compute=int32: needs a floating")
