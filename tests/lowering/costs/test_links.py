"""The links of collectives, and the directions of permutes."""

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.links import links_of

MESH = Mesh.parse("a:2,b:4,c:2")


def shifted(axis, positions):
    """Returns the pairs of a rotation along an axis of the mesh."""
    groups = MESH.groups(axis)
    return [(g[i], g[(i + positions) % len(g)]) for g in groups for i in range(len(g))]


@pytest.mark.parametrize(
    ("axis", "positions", "directions"),
    [("b", 1, [1]), ("b", 3, [-1]), ("b", 2, [1, -1]), ("a", 1, [1, -1]), ("c", 1, [1, -1])],
)
def test_a_rotation_goes_the_shortest_way(axis, positions, directions):
    expected = tuple((axis, direction) for direction in directions)
    assert links_of("permute", [axis], MESH, shifted(axis, positions)) == expected


def test_pairs_that_do_not_move_use_no_link():
    assert links_of("permute", ["b"], MESH, [(0, 0), (2, 4)]) == (("b", 1),)
    assert links_of("permute", ["b"], MESH, [(0, 0), (4, 2)]) == (("b", -1),)


def test_pairs_in_both_directions_use_both():
    assert links_of("permute", ["b"], MESH, [(0, 2), (2, 0)]) == (("b", 1), ("b", -1))


def test_other_collectives_use_both_directions_of_all_their_axes():
    expected = (("a", 1), ("a", -1), ("b", 1), ("b", -1))
    assert links_of("all_gather", ["a", "b"], MESH) == expected
    assert links_of("permute", ["a", "b"], MESH, [(0, 10)]) == expected
