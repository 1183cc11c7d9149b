"""Options say what is wrong with them when they are made."""

import pytest

from meshdsl.lowering.options import Options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": -1}, "memory is a number of bytes from 0, as in memory=2**30, not -1"),
        ({"memory": "1GiB"}, "memory is a number of bytes from 0, as in memory=2**30, not '1GiB'"),
        (
            {"bucket_bytes": 2.5},
            "bucket_bytes is a number of bytes from 0, as in bucket_bytes=2**30, not 2.5",
        ),
        (
            {"weights": "kept"},
            "weights is one of auto, again, keep, not `kept`. Did you mean `keep`?",
        ),
        (
            {"context": "rings"},
            "context is one of auto, ring, gather, sums, not `rings`. Did you mean `ring`?",
        ),
        ({"context": None}, "context is one of auto, ring, gather, sums, not `None`"),
    ],
)
def test_options_that_do_not_exist_are_errors(fields, message):
    with pytest.raises(ValueError) as error:
        Options(**fields)
    assert str(error.value) == message


def test_nothing_at_all_is_a_limit():
    assert Options(memory=0, bucket_bytes=0) != Options()
