"""The browser of the tests: where there is none, one line says why and what to do."""

import os
import subprocess

import pytest

from tests import browser


@pytest.fixture(autouse=True)
def forget():
    browser.missing.cache_clear()
    yield
    browser.missing.cache_clear()


@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.setattr(browser, "find", lambda: None)


def test_without_a_browser_and_root_the_line_says_how_to_install_one(nowhere, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert browser.missing() == "there is no Chromium; as root: apt-get install -y chromium"
    assert browser.install() == f"tests of pages will be skipped: {browser.missing()}"


def test_what_cannot_be_installed_is_told_with_the_reason(nowhere, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command[1])
        return subprocess.CompletedProcess(command, 100, "", "first\nE: no such package\n")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(browser.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(browser.subprocess, "run", run)
    assert browser.install() == (
        "tests of pages will be skipped: Chromium cannot be installed: E: no such package"
    )
    assert asked == ["install", "update", "install"]


def test_a_browser_that_does_not_start_counts_as_missing(monkeypatch):
    monkeypatch.setattr(browser, "find", lambda: "/bin/false")
    assert browser.missing().startswith("/bin/false does not start")
