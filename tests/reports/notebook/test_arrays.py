"""An array in a notebook: its dims, statistics, first numbers, and what devices hold."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import meshdsl as md
from meshdsl.reports.notebook.arrays import statistics
from tests.reports.notebook.cells_of import read

DATA = np.random.default_rng(0).standard_normal((10, 6, 8)).astype(np.float32)


def blocks(x):
    """Returns what the grid says that each device holds: positions by dim, by device."""
    held = {}
    for cell in read(x._repr_html_()).texts("td"):
        found = re.match(r"(\d+)((?:\w+ (?:\d+:\d+|only pads))+|the whole)$", cell)
        if found:
            parts = re.findall(r"([a-z_]+) (?:(\d+):(\d+)|only pads)", found[2])
            held[int(found[1])] = {n: (int(a or 0), int(b or 0)) for n, a, b in parts}
    return held


@pytest.mark.parametrize("layout", ["", "batch:data; heads:model", "embed:data+model", "heads:x"])
def test_the_grid_says_what_the_shards_of_jax_hold(layout):
    x = md.place(md.named(DATA, ["batch", "heads", "embed"]), "data:2,model:2,x:2", layout)
    held = blocks(x)
    assert len(held) == len(x.data.addressable_shards) == 8
    for shard in x.data.addressable_shards:
        said = [held[shard.device.id].get(dim.name, (0, dim.size)) for dim in x.dims]
        np.testing.assert_array_equal(shard.data, DATA[tuple(slice(*part) for part in said)])


def test_the_grid_says_which_positions_are_real_where_blocks_have_pads():
    x = md.place(md.named(DATA, ["batch", "heads", "embed"]), "data:4,model:2", "batch:data+model")
    held = blocks(x)
    for shard in x.data.addressable_shards:
        start, stop = held[shard.device.id]["batch"]
        np.testing.assert_array_equal(shard.data[: stop - start], DATA[start:stop])
    assert sum(stop - start for start, stop in (one["batch"] for one in held.values())) == 10


def test_a_block_of_nothing_but_pads_says_so():
    x = md.place(md.named(np.arange(3.0), ["row"]), "data:4", "row:data")
    assert [text for text in read(x._repr_html_()).texts("td") if "only pads" in text] == [
        "3row only pads"
    ]


def test_the_statistics_are_those_of_numpy():
    cell = read(md.named(DATA, ["batch", "heads", "embed"])._repr_html_())
    wide = DATA.astype(np.float64)
    expected = [f"{value:.4g}" for value in (wide.min(), wide.max(), wide.mean(), wide.std())]
    assert cell.texts("dd") == expected and cell.texts("dt") == ["min", "max", "mean", "std"]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32, np.complex64])
def test_statistics_on_devices_are_those_of_numpy(dtype):
    data = (8 * DATA + 4).astype(dtype)
    here, there = statistics(data), statistics(jnp.asarray(data))
    assert here.keys() == there.keys()
    for name, value in here.items():
        np.testing.assert_allclose(float(there[name]), float(value), rtol=1e-5)


def test_statistics_leave_out_what_is_not_finite_and_count_it():
    data = np.array([1.0, np.nan, 4.0, -np.inf, np.inf])
    said = statistics(data)
    assert said == {"min": 1, "max": 4, "mean": 2.5, "std": 1.5, "NaN": 1, "infinite": 2}
    assert {name: float(value) for name, value in statistics(jnp.asarray(data)).items()} == said
    assert statistics(np.full(3, np.nan)) == {"NaN": 3}
    assert statistics(np.array([True, False, True])) == {"true": 2, "of": 3}


def test_the_first_numbers_stand_in_rows():
    cell = read(md.named(np.arange(6).reshape(2, 3), ["row", "column"])._repr_html_())
    assert cell.texts("tr") == ["012", "345"]
    assert cell.texts("span", "chip") == ["row2", "column3", "row", "column"]


def test_a_large_array_is_as_small_as_a_little_one_and_is_not_copied_from_its_devices(monkeypatch):
    small = md.named(jnp.zeros((8, 8)), ["row", "column"])
    large = md.named(jnp.zeros((4096, 2048)), ["row", "column"])
    sizes, asarray = [], np.asarray

    def copied(data, *rest, **options):
        sizes.append(np.size(data))
        return asarray(data, *rest, **options)

    monkeypatch.setattr(np, "asarray", copied)
    text = large._repr_html_()
    assert sizes and max(sizes) < 100
    assert len(text) - len(small._repr_html_()) < 200


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: jax.ShapeDtypeStruct((3,), "float32"), "f32row3"),
        (lambda: np.arange(3, dtype=np.float32), "on no device"),
        (lambda: jnp.arange(3, dtype=jnp.float32), "cpu:0"),
    ],
)
def test_an_array_says_where_it_is(data, says):
    x = md.NamedArray(data(), md.Shape([md.Dimension("row", 3)]))
    assert says.lower() in "".join(read(x._repr_html_()).elements[0][2]).lower()


def test_deleted_and_traced_arrays_show_their_dims():
    x = md.named(jnp.zeros(3), ["row"])
    x.data.delete()
    assert "deleted" in x._repr_html_()
    seen = []
    jax.jit(lambda x: seen.append(x._repr_html_()))(md.named(np.zeros(3), ["row"]))
    assert "traced" in seen[0] and read(seen[0]).texts("span", "chip") == ["row3"]


def test_what_has_no_data_is_left_to_its_text():
    assert md.NamedArray(None, md.Shape())._repr_html_() is None
