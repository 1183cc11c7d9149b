"""Actions: their notation is PyTorch's, read and written."""

import pytest

from meshdsl.lowering.pipelines.actions import Action, Kind, backward, forward, inputs, weights


@pytest.mark.parametrize(
    "text, action",
    [
        ("0F3", Action(Kind.FORWARD, 0, 3)),
        ("7I0", Action(Kind.INPUTS, 7, 0)),
        ("12W10", Action(Kind.WEIGHTS, 12, 10)),
        ("1B2", Action(Kind.BACKWARD, 1, 2)),
        ("2SEND_F0", Action(Kind.SEND_F, 2, 0)),
        ("3RECV_F0", Action(Kind.RECV_F, 3, 0)),
        ("2SEND_B1", Action(Kind.SEND_B, 2, 1)),
        ("1RECV_B1", Action(Kind.RECV_B, 1, 1)),
        ("0UNSHARD", Action(Kind.UNSHARD, 0)),
        ("0RESHARD", Action(Kind.RESHARD, 0)),
        ("4REDUCE_GRAD", Action(Kind.REDUCE_GRAD, 4)),
        ("(0F7;7B3)OVERLAP_F_B", Action(Kind.OVERLAP, parts=(forward(0, 7), backward(7, 3)))),
    ],
)
def test_a_text_is_an_action_and_back(text, action):
    assert Action.parse(text) == action
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


def test_a_full_backward_pass_has_both_gradients_as_results():
    assert backward(1, 2).results == (inputs(1, 2), weights(1, 2))
    assert Action.parse("(0F7;7B3)OVERLAP_F_B").results == (
        forward(0, 7),
        inputs(7, 3),
        weights(7, 3),
    )
    assert Action.parse("0SEND_F0").results == ()


def test_computations_occupy_a_stage_and_messages_do_not():
    texts = ("0F0", "0I0", "0W0", "0B0", "(0F1;0B0)OVERLAP_F_B")
    assert all(Action.parse(text).computes for text in texts)
    assert not any(Action.parse(t).computes for t in ("0SEND_F0", "1RECV_F0", "0UNSHARD"))


@pytest.mark.parametrize(
    "text", ["", "F3", "0X3", "0f3", "0F3.5", "-1F0", "(0F0;1B0)OVERLAP", "0F0 1"]
)
def test_another_text_is_refused_with_how_to_write_one(text):
    with pytest.raises(ValueError, match=r"is not an action\. Write the chunk, the kind and the"):
        Action.parse(text)


def test_a_wrong_part_is_quoted_with_its_overlap():
    message = r"`7X3` in `\(0F7;7X3\)OVERLAP_F_B` is not an action"
    with pytest.raises(ValueError, match=message):
        Action.parse("(0F7;7X3)OVERLAP_F_B")
    with pytest.raises(ValueError, match=r"`` in `\(\)OVERLAP_F_B` is not an action"):
        Action.parse("()OVERLAP_F_B")


def test_the_notation_of_earlier_versions_of_pytorch_is_refused_with_the_present_one():
    message = "`0BW2`: `BW` is the notation of PyTorch before 2.6. Write `B` for a full backward"
    with pytest.raises(ValueError, match=message):
        Action.parse("0BW2")


def test_a_microbatch_belongs_to_some_kinds_only():
    with pytest.raises(ValueError, match="`0F`: F needs a microbatch: write `0F0` for the first"):
        Action.parse("0F")
    with pytest.raises(
        ValueError, match="`0UNSHARD3`: UNSHARD has no microbatch: write `0UNSHARD`"
    ):
        Action.parse("0UNSHARD3")
