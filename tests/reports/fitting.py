"""What of a page does not fit: texts that are cut, boxes that are too wide, writing too small."""

from __future__ import annotations

from tests.browser import Browser

_LEAST = 9  # pixels: smaller writing is not read on a telephone
_SCRIPT = """(() => {
    const found = [], tell = (one, why) =>
        found.push(`${why}: ${one.tagName}.${one.className.baseVal ?? one.className} ` +
            `"${one.textContent.trim().slice(0, 40)}"`);
    const shown = (one) => one.getClientRects().length > 0;
    const page = document.documentElement;
    if (page.scrollWidth > innerWidth) found.push(`the page is ${page.scrollWidth} wide`);
    for (const one of document.querySelectorAll("body *")) {
        // What a segment of a strip has no room for is told below it.
        if (!shown(one) || one.closest(".segment")) continue;
        const svg = one.ownerSVGElement, box = one.getBoundingClientRect();
        if (!svg && one.tagName !== "svg" && getComputedStyle(one).overflowX !== "visible"
            && one.scrollWidth > one.clientWidth + 1) tell(one, "wider inside than outside");
        if (box.right > innerWidth + 1 || box.left < -1) tell(one, "outside of the page");
        const summary = one.closest("summary");
        if (summary && box.bottom > summary.getBoundingClientRect().bottom + 1)
            tell(one, "hangs out of its box");
        if (!svg || one.tagName !== "text") continue;
        const unit = svg.viewBox.baseVal.width
            ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
        if (parseFloat(getComputedStyle(one).fontSize) * unit < LEAST) tell(one, "too small");
    }
    return found;
})()""".replace("LEAST", str(_LEAST))
_LIE_OVER = """((selector) => {
    const boxes = [...document.querySelectorAll(selector)]
        .map((one) => [one, one.getBoundingClientRect()]).filter(([, box]) => box.width);
    return boxes.flatMap(([one, a], n) => boxes.slice(n + 1).filter(([, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1
    ).map(([other]) => `${one.textContent} and ${other.textContent}`));
})"""


def misfits(browser: Browser) -> list[str]:
    """Returns what is cut, wider than its box, outside of the page, or too small to read.

    Folds are opened first.
    """
    browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    return browser.evaluate(_SCRIPT)


def overlaps(browser: Browser, selector: str) -> list[str]:
    """Returns which of some elements lie over each other."""
    return browser.evaluate(f"{_LIE_OVER}('{selector}')")
