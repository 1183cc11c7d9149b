"""Which names of tensors are near to others."""

from meshdsl.training.checkpointing.nearest import Nearest

NAMES = [f"model.layers.{n}.self_attn.{w}_proj.weight" for n in range(12) for w in "qkvo"]
NEAREST = Nearest([*NAMES, "model.norm.weight", "lm_head.weight"])


def test_the_nearest_names_have_the_same_numbers():
    found = NEAREST("model.layers.7.self_attn.q_projection.weight")
    assert found[0] == "model.layers.7.self_attn.q_proj.weight"
    assert all(".7." in name for name in found)


def test_where_no_name_has_these_numbers_the_first_of_the_kind_is_told():
    assert NEAREST("model.layers.70.self_attn.q_projj.weight")[0] == NAMES[0]
    assert NEAREST("layers.self_attn.q_proj.weight")[0] == NAMES[0]


def test_another_number_is_no_other_spelling():
    """Tensors of layers that the model lacks are not near those of its own layers."""
    only = Nearest(["h.0.weight", "h.1.weight"])
    assert only("h.2.weight") == []


def test_names_of_other_words_are_not_near():
    assert NEAREST("score.bias") == []
    assert Nearest([])("anything") == []
