"""Images on devices that store tensors in tiles: by hand, and against the TPU compiler."""

import pytest

import meshdsl as md
from meshdsl.layouts.hardware import HARDWARE, Tile, hardware
from meshdsl.lowering.costs.tiles import Images, sizes
from meshdsl.reports.explain import explain
from tests.benchmarks.image_memory import COMPILED, MIB, lowered

TPU = Tile(sublanes=8, lanes=128)


def test_a_matrix_fills_up_tiles():
    assert TPU.filled(8, 128) == 8 * 128
    assert TPU.filled(9, 129) == 16 * 256
    assert TPU.filled(3, 16) == 4 * 128  # a few rows have a smaller tile
    assert TPU.filled(1, 1) == 128


def test_tpus_store_tiles_and_other_devices_do_not():
    for name in HARDWARE:
        kind = hardware(name)
        assert (kind.tile == TPU) == bool(kind.torus), name


def elements(batch, features, width=64):
    """Returns how many elements the result of a convolution of images takes in tiles."""
    dims = md.dims(batch=batch, height=16, width=width, channels=features)
    filters = md.dims(filter_height=3, filter_width=3, channels=features, features=features)
    windows = {"height": "filter_height", "width": "filter_width"}

    def image(x, w):
        return md.conv(x, w, windows, in_dim="channels", out_dim="features")

    program = md.jit(image).lower(md.spec(dims), md.spec(filters))
    (result,) = program.block.outputs
    found = sizes(program.block, TPU)
    assert not {*found} & {*program.block.inputs}  # users hand these over without gaps
    return found[result] // result.dtype.itemsize


@pytest.mark.parametrize("order", [("height", "width"), ("width", "height")])
def test_the_first_convolution_decides_how_an_image_is_stored(order):
    # A set of names has another order in every process.
    dims = md.dims(batch=2, height=16, width=64, channels=8)
    filters = md.dims(filter_height=3, filter_width=3, channels=8, features=8)

    def images(x, w):
        windows = [{name: f"filter_{name}" for name in names} for names in (order, order[::-1])]
        return [md.conv(x, w, each, in_dim="channels", out_dim="features") for each in windows]

    program = md.jit(images).lower(md.spec(dims), md.spec(filters))
    assert [*Images.of(program.block, TPU).spatial] == [order, order[::-1]]


def test_the_lanes_have_the_features_or_the_batch():
    parts = 16 * (64 // 8 + 1)  # of a small batch: eighths of the width, with one position more
    assert elements(2, 8) == parts * 8 * 128  # batch x 8 in the lanes, features in the sublanes
    assert elements(2, 64) == parts * 16 * 128  # the other way round
    assert elements(128, 8) == 16 * 64 * 8 * 128  # no gaps
    assert elements(8, 256) == 8 * 16 * 64 * 256


def test_without_convolutions_nothing_changes():
    x = md.spec(md.dims(batch=3, embed=5))
    program = md.jit(lambda x: md.sum(md.exp(x), over="embed")).lower(x)
    assert sizes(program.block, TPU) == {} == sizes(program.block, None)


@pytest.mark.parametrize("name", COMPILED)
def test_the_plan_of_images_of_few_features_is_near_that_of_the_compiler(name):
    """Without gaps it is a tenth. The compiler's figures are those of `image_memory --compile`."""
    assert 0.75 < lowered(name).peak_bytes / MIB / COMPILED[name] < 1.15


def test_reports_have_the_memory_of_their_hardware():
    program = lowered("8 features")
    peaks = {name: explain(program, name).memory.peak_bytes for name in ("v5e", "v5p", "h100")}
    assert peaks["v5e"] == peaks["v5p"] == program.peak_bytes > 5 * peaks["h100"]
