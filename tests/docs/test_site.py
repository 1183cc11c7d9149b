"""The documentation as a site: it is built without a warning, and works in a browser."""

import fcntl
import functools
import http.server
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from docs.making import reference
from meshdsl.cli.parsing.table import FLAGS
from tests import browser
from tests.docs.pages import DOCS, ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("material")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; warnings are errors. Workers of one run build it once."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / "site", shared / "site.done"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            build(folder)
            done.touch()
    return folder


def build(folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_there_and_asks_for_nothing_from_elsewhere(site):
    pages = {f.relative_to(DOCS).with_suffix(".html") for f in DOCS.rglob("*.md")}
    assert [page for page in pages if not (site / page).exists()] == []
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="?(?:https?:)?//', text)
        assert not re.findall(r'<link[^>]* rel="?stylesheet"?[^>]* href="?(?:https?:)?//', text)


def test_every_public_name_and_every_flag_has_an_anchor(site):
    for page in reference.order():
        text = (site / "reference" / f"{page}.html").read_text()
        anchors = set(re.findall(r'\bid="?([\w.-]+)', text))
        for written, _ in reference.names_of(page):
            assert reference.path_of(written) in anchors
    anchors = set(re.findall(r'\bid="?([\w.-]+)', (site / "reference" / "flags.html").read_text()))
    assert set(FLAGS) <= anchors


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture
def page(site):
    """A browser, and the address of the site, served on this machine."""
    if reason := browser.missing():
        pytest.skip(reason)
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with browser.Browser(width=1300) as opened:
                yield opened, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def wait(opened, script, seconds=120):
    end = time.monotonic() + seconds
    while not opened.evaluate(script):
        assert time.monotonic() < end, script
        time.sleep(0.05)


def go(opened, address):
    opened.requests.clear()
    opened.problems.clear()
    opened.call("Page.navigate", url=address)
    wait(opened, f"location.href == {address!r} && document.readyState == 'complete'")


def test_the_site_in_a_browser(page):
    """One browser for all: search by keyboard, dark pages, narrow ones, no request elsewhere."""
    opened, address = page
    go(opened, f"{address}/index.html")
    wait(opened, "document.querySelector('img').naturalWidth > 0")  # the picture

    opened.press("/")  # from the keyboard
    wait(opened, "document.activeElement.matches('[data-md-component=search-query]')")
    opened.type("einsum")
    wait(opened, "document.querySelectorAll('.md-search-result__link').length > 3")

    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.evaluate(colour)
    opened.evaluate("document.querySelectorAll('[data-md-component=palette] input')[1].click()")
    wait(opened, f"{colour} != {light!r}")

    asked = [one for one in opened.requests if not one.startswith((address, "data:", "blob:"))]
    assert asked == [] and opened.problems == []

    opened.screen(420, 800, mobile=True)
    for name in ("index", "guides/choose-a-layout", "reference/flags", "reference/tensors"):
        go(opened, f"{address}/{name}.html")
        assert opened.evaluate("document.documentElement.scrollWidth") <= 420, name
