"""What tests of pages share: a browser."""

import pytest

from tests.browser import Browser, missing


@pytest.fixture(scope="module")
def chromium():
    """Returns a browser; a test is skipped where there is none."""
    if missing():
        pytest.skip(missing())
    with Browser() as browser:
        yield browser
