"""Eight virtual CPU devices, 64-bit numbers where a test asks for them, and random cases."""

import datetime
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

KNOWN_CASES = 2000


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, default=25, help="how many random programs to check")
    parser.addoption("--first_case", type=int, help="the first of them; by default, from the date")


def pytest_generate_tests(metafunc):
    if "case_number" in metafunc.fixturenames:
        count, first = metafunc.config.getoption("cases"), metafunc.config.getoption("first_case")
        if first is None:
            first = datetime.date.today().toordinal() * count % KNOWN_CASES
        metafunc.parametrize("case_number", range(first, first + count))
