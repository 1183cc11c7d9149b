"""Random programs in half precision: the numbers of one device, on random meshes and layouts.

`python -m pytest tests/property/test_half_precision.py --half_precision=2000 -n 2` runs cases 0 to
1999, each in float16 or bfloat16. Known to fail: 492 and many pipelines, since they round once less
than one device: of six that were looked at, all are nearer to the numbers of float64.
"""

import numpy as np
import pytest

from meshdsl.lowering.backends.numpy import EMITTERS
from tests.property import half_precision
from tests.property.programs import make_case


def dtype_of(number):
    return half_precision.DTYPES[number % 2]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sums_in_half_precision_are_those_of_one_device(half_precision_number):
    half_precision.check(make_case(half_precision_number, dtype_of(half_precision_number)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("number", "dtype"), [(81, "float16"), (81, "bfloat16"), (316, "float16")])
def test_what_was_rounded_twice_once(number, dtype):
    """Attention to the parts of a memory (81), and gradients in a ring (316)."""
    half_precision.check(make_case(number, dtype))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_sum_that_is_rounded_on_its_way_is_found(monkeypatch):
    right = EMITTERS["all_reduce"]

    def rounding(machine, instruction, inputs):
        rounded = [x.astype("f2").astype("f4") if x.dtype == np.float32 else x for x in inputs]
        return right(machine, instruction, rounded)

    monkeypatch.setitem(EMITTERS, "all_reduce", rounding)
    cases = [make_case(number, "float16") for number in range(8)]
    with pytest.raises(AssertionError, match="numbers differ"):
        for case in cases:
            half_precision.check(case)
