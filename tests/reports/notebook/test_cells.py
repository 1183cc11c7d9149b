"""Cells in a browser: light and dark, narrow, and without effect on what is around them."""

import numpy as np
import pytest

import meshdsl as md

X = md.named(np.arange(512.0).reshape(8, 4, 16), ["batch", "heads", "embed"])


def cells():
    mesh = md.Mesh.parse("data:4,model:2")
    values = [X, md.place(X, mesh, "batch:data; heads:model"), mesh]
    values += [md.Layout.parse("params/block_of_layers/embed:data+model?; batch:data")]
    return "".join(value._repr_html_() for value in values)


@pytest.mark.parametrize("width", [420, 1000])
@pytest.mark.parametrize("light", ["true", "false"])
def test_cells_follow_the_notebooks_theme_and_fit_its_width(chromium, tmp_path, width, light):
    file = tmp_path / "notebook.html"
    around = "<table><tr><th>a<td>b</table><dl><dt>c<dd>d</dl><p>e"
    start = f"<!doctype html><meta charset=utf-8><body data-jp-theme-light={light}>"
    file.write_text(f"{start}{around}", encoding="utf-8")
    chromium.screen(width)
    chromium.open(file)
    styles = (
        "JSON.stringify([...document.querySelectorAll('body > *:not(.meshdsl-cell), "
        "body > *:not(.meshdsl-cell) *')].map(e => ['color', 'font', 'padding', 'border', 'margin'"
        ", 'display', 'background'].map(p => getComputedStyle(e)[p])))"
    )
    before = chromium.evaluate(styles)
    file.write_text(f"{start}{around}</p>{cells()}", encoding="utf-8")
    chromium.open(file)
    assert chromium.problems == [] and chromium.requests == [file.as_uri()]
    assert chromium.evaluate(styles) == before
    assert chromium.evaluate("document.querySelectorAll('.meshdsl-cell').length") == 4
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
    paper = chromium.evaluate(
        "getComputedStyle(document.querySelector('.meshdsl-cell')).backgroundColor"
    )
    assert (paper == "rgb(255, 255, 255)") == (light == "true")
    drawn = "[...document.querySelectorAll('.bar i')].map(e => e.getBoundingClientRect().width)"
    widths = chromium.evaluate(drawn)
    assert len(widths) == 16 and min(widths) >= 2
