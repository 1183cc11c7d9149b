"""Cells in a browser: light and dark, narrow, and without effect on what is around them."""

import re

import numpy as np
import pytest

import meshdsl as md

X = md.named(np.arange(512.0).reshape(8, 4, 16), ["batch", "heads", "embed"])


def figure():
    return md.inspect(md.spec(X.dims), "data:4,model:2", "batch:data; heads:model")


def cells():
    mesh = md.Mesh.parse("data:4,model:2")
    values = [X, md.place(X, mesh, "batch:data; heads:model"), mesh]
    values += [md.Layout.parse("params/block_of_layers/embed:data+model?; batch:data"), figure()]
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
    assert chromium.evaluate("document.querySelectorAll('.meshdsl-cell').length") == 5
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
    paper = chromium.evaluate(
        "getComputedStyle(document.querySelector('.meshdsl-cell')).backgroundColor"
    )
    assert (paper == "rgb(255, 255, 255)") == (light == "true")
    drawn = "[...document.querySelectorAll('.bar i')].map(e => e.getBoundingClientRect().width)"
    widths = chromium.evaluate(drawn)
    assert len(widths) == 16 and min(widths) >= 2


# What shows a cell: its first line, and whether it is dark: on a light machine, on a dark one.
HOSTS = {
    "a page that says nothing": ("<body>", (False, False)),
    "a page that follows the machine": ("<html style='color-scheme: light dark'>", (False, True)),
    "a page that is dark": ("<html style='color-scheme: dark'>", (True, True)),
    "JupyterLab, light": ("<body data-jp-theme-light=true>", (False, False)),
    "JupyterLab, dark": ("<body data-jp-theme-light=false>", (True, True)),
    "VS Code, light": ("<body class=vscode-light>", (False, False)),
    "VS Code, dark": ("<body class=vscode-dark>", (True, True)),
    "VS Code, contrast": ("<body class=vscode-high-contrast>", (True, True)),
    "VS Code, light contrast": (
        "<body class='vscode-high-contrast vscode-high-contrast-light'>",
        (False, False),
    ),
    "Colab, dark": ("<html theme=dark>", (True, True)),
    "Sphinx, light": (
        "<html data-theme=light style='color-scheme: light dark'>",
        (False, False),
    ),
    "Sphinx, dark": ("<html data-theme=dark>", (True, True)),
}


def luminance(colour):
    """Returns the relative luminance of a colour (WCAG 2.1)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("host", HOSTS)
def test_who_shows_a_cell_decides_between_light_and_dark(chromium, tmp_path, host):
    start, expected = HOSTS[host]
    file = tmp_path / "notebook.html"
    shown = md.show({"w": md.spec(X.dims)}, "heads:model", mesh="data:4,model:2")
    program = md.jit(lambda x: md.sum(x, "batch"), "data:2", "batch:data").lower(X)
    values = "".join(value._repr_html_() for value in (figure(), shown, program))
    file.write_text(f"<!doctype html><meta charset=utf-8>{start}{values}", encoding="utf-8")
    chromium.screen(1000)
    papers = (
        "[...document.querySelectorAll('.meshdsl, .meshdsl-cell')]"
        ".map(e => getComputedStyle(e).backgroundColor)"
    )
    found = []
    for machine in (False, True):
        chromium.dark(machine)
        chromium.open(file)
        dark = {luminance(paper) < 0.5 for paper in chromium.evaluate(papers)}
        assert len(dark) == 1
        found += dark
    chromium.dark(False)
    assert tuple(found) == expected


@pytest.mark.parametrize("light", ["true", "false"])
def test_blocks_can_be_read_in_light_and_in_dark(chromium, tmp_path, light):
    file = tmp_path / "notebook.html"
    start = f"<!doctype html><meta charset=utf-8><body data-jp-theme-light={light}>"
    file.write_text(f"{start}{figure()._repr_html_()}", encoding="utf-8")
    chromium.open(file)
    blocks = chromium.evaluate(
        "[...document.querySelectorAll('.blocks td')].map(e => getComputedStyle(e))"
        ".map(s => [s.color, s.backgroundColor])"
    )
    assert len({background for _, background in blocks}) == len(blocks) == 8
    for colours in blocks:
        low, high = sorted(map(luminance, colours))
        assert (high + 0.05) / (low + 0.05) >= 7, colours
