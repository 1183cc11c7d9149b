"""The pictures of the documentation are those that the project draws."""

import re
import xml.etree.ElementTree as ElementTree

import jax
import pytest

from docs.making.pictures import FOLDER, PICTURES
from docs.making.svg import shards
from meshdsl import dims, spec
from tests.docs.pages import DOCS, PAGES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_is_drawn_today(name):
    with jax.enable_x64(False):
        drawn = str(PICTURES[name]())
    hint = "draw it anew: python -m docs.making.pictures"
    assert (FOLDER / f"{name}.svg").read_text() == drawn, hint
    ElementTree.fromstring(drawn)


def test_every_picture_is_shown_and_no_other():
    shown = {
        name for page in PAGES for name in re.findall(r"\]\([^)]*/(\w+)\.svg\)", page.read_text())
    }
    assert shown == {*PICTURES} == {file.stem for file in (DOCS / "pictures").iterdir()}


def test_shards_cover_a_tensor_and_know_their_devices():
    found = list(shards(spec(dims(a=8, b=6)), "m:2,n:3", "a:m; b:n"))
    area = sum((r[1] - r[0]) * (c[1] - c[0]) for r, c in ((s.rows, s.columns) for s in found))
    assert abs(area - 1) < 1e-9
    assert [one.devices for one in found] == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert [one.pads for one in shards(spec(dims(v=10)), "m:4", "v:m")][-1] == (0, 2)
