"""Training some of the parameters: the others stay to the bit, without gradients and state."""

import itertools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import meshdsl as md
from meshdsl.optim import AdamW, Sgd
from meshdsl.optim.masks import Excluding
from meshdsl.training import Data, Recipe, Reporting
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.state import by_path, create, spec_of
from meshdsl.training.trainable import merged, trained
from tests.training import classifier
from tests.training.flat import train, train_with_records

DECAYING = AdamW(0.05, weight_decay=0.1, mask=lambda path, shape: True)
TREE = {
    "blocks": {"query": {"w": 1, "lora_a": 2, "lora_b": 3}, "mlp": {"lora_a": 4}},
    "embedding": 5,
}
LEAVES = jax.tree.map(lambda _: md.spec(md.dims(i=2)), TREE)


def run(steps=6, optimizer=DECAYING, loss=classifier.loss, init=classifier.init, **options):
    defaults = {"batch_dims": classifier.BATCH_DIMS, "quiet": True, "backend": "numpy", "seed": 3}
    data = itertools.chain.from_iterable(itertools.repeat(classifier.batches(8)))
    arguments = defaults | options
    return train(init, loss, optimizer, data, steps=steps, **arguments)


def first():
    return md.jit(classifier.init, backend="numpy")(md.random.key(3))


def chosen(trainable):
    keyed = jax.tree_util.tree_flatten_with_path(trained(LEAVES, trainable))[0]
    return ["/".join(key.key for key in keys) for keys, _ in keyed]


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ("!embedding", ["blocks/mlp/lora_a", "blocks/query/lora_a", "blocks/query/lora_b"]),
        (["!lora_a", "! w"], ["blocks/query/lora_b", "embedding"]),
        ("blocks, !lora*", ["blocks/query/w"]),
        ("!lora*, blocks/query", ["blocks/query/w"]),
    ],
)
def test_what_follows_an_exclamation_mark_is_frozen(patterns, left):
    extra = ["blocks/query/w"] if patterns == "!embedding" else []
    assert sorted(chosen(patterns)) == sorted([*left, *extra])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("!blocks,!embedding", "`!blocks,!embedding` chooses no parameter"),
        ("lora*,!lora*", "chooses no parameter, so there is nothing to train"),
        ("!lora_aa", "no parameter is meant by 'lora_aa'. Did you mean `lora_a`"),
    ],
)
def test_what_leaves_nothing_to_train_is_refused(patterns, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chosen(patterns)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("mesh", "layout"), classifier.LAYOUTS[::3])
def test_what_is_not_trained_stays_to_the_bit_and_has_no_state(mesh, layout, microbatches):
    found = run(trainable="w_out", mesh=mesh, layout=layout, microbatches=microbatches)
    begun = first()
    np.testing.assert_array_equal(found.state.params.w_in, begun.w_in)
    np.testing.assert_array_equal(found.state.params.bias, begun.bias)
    assert list(by_path(found.state.optimizer)) == ["mean/params/w_out", "mean_square/params/w_out"]
    assert found.losses[-1] < found.losses[0]
    expected = run(trainable="w_out")
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-5)


def test_train_takes_it_instead_of_the_recipes():
    recipe = Recipe(classifier.init, classifier.loss, DECAYING, seed=3, trainable="w_in")
    data = Data(classifier.batches(8), classifier.BATCH_DIMS)
    settings = {"steps": 2, "backend": "numpy", "reporting": Reporting(quiet=True)}
    found = train_with_records(recipe, data, trainable="w_out", **settings)
    np.testing.assert_array_equal(found.state.params.w_in, first().w_in)
    assert list(by_path(found.state.optimizer)) == ["mean/params/w_out", "mean_square/params/w_out"]


def test_the_rest_is_trained_as_if_it_were_all():
    begun = first()

    def init(key):
        return {"w_out": classifier.init(key).w_out}

    def loss(params, batch):
        constants = classifier.Classifier(begun.w_in, begun.bias, params["w_out"])
        return classifier.loss(constants, batch)

    data = itertools.chain.from_iterable(itertools.repeat(classifier.batches(8)))
    options = {"batch_dims": classifier.BATCH_DIMS, "quiet": True, "backend": "numpy", "seed": 3}
    alone = train(init, loss, DECAYING, data, steps=6, clip_norm=0.1, **options)
    found = run(trainable=["w_out"], clip_norm=0.1)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-6)
    norms = [[line["grad_norm"] for line in result.history] for result in (found, alone)]
    np.testing.assert_allclose(*norms, rtol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("optimizer", [DECAYING, Sgd(0.1, momentum=0.9, weight_decay=0.1)])
def test_what_is_behind_stop_gradient_does_not_decay(optimizer, microbatches):
    def loss(params, batch):
        return classifier.loss(params.replace(w_in=md.stop_gradient(params.w_in)), batch)

    found = run(optimizer=optimizer, loss=loss, microbatches=microbatches)
    np.testing.assert_array_equal(found.state.params.w_in, first().w_in)
    assert not np.array_equal(found.state.params.bias, first().bias)


def test_all_metrics_are_those_of_what_is_trained():
    found = run(trainable="w_out", extra_metrics=["num_zeros", "params_norm"])
    norm = np.linalg.norm(np.asarray(found.state.params.w_out))
    np.testing.assert_allclose(found.history[-1]["params_norm"], norm, rtol=1e-5)


def test_a_gradient_that_is_not_finite_is_named_among_those_there_are():
    def loss(params, batch):
        bad = md.sum(params.w_out) / md.sum(0.0 * params.w_in)
        return classifier.loss(params, batch) + bad

    with pytest.raises(ValueError, match="the gradient of w_out is not finite"):
        run(loss=loss, trainable="w_out")


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    expected = run(trainable="b*,w_out")
    part = run(3, trainable="b*,w_out", workdir=tmp_path, saving=Saving())
    rest = run(trainable="b*,w_out", workdir=tmp_path, saving=Saving())
    np.testing.assert_array_equal([*part.losses, *rest.losses], expected.losses)


def test_a_run_starts_from_weights(tmp_path):
    weights = run(2)
    arrays = {name: np.asarray(one) for name, one in by_path(weights.state.params).items()}
    save_file(arrays, tmp_path / "w.safetensors")
    found = run(2, trainable="w_out", init_from=tmp_path / "w.safetensors", seed=9)
    np.testing.assert_array_equal(found.state.params.w_in, weights.state.params.w_in)
    assert not np.array_equal(found.state.params.w_out, weights.state.params.w_out)


def stored(path, params, names):
    arrays = {name: np.asarray(one) for name, one in by_path(params).items() if name in names}
    save_file(arrays, path)
    return path


@pytest.mark.parametrize("where", [{}, {"mesh": "data:2,model:4", "layout": classifier.LAYOUT}])
def test_what_is_trained_may_be_missing_from_weights_and_is_initialised(where, tmp_path, capsys):
    weights, fresh = run(2), run(1, trainable="w_out", seed=9)
    file = stored(tmp_path / "w.safetensors", weights.state.params, ["w_in", "bias"])
    expected = dict(by_path(weights.state.params))

    def init(key):
        made = classifier.init(key)
        held = {name: md.zeros(one.dims) + one for name, one in expected.items()}
        return replace(made, w_in=held["w_in"], bias=held["bias"])

    asked = run(3, trainable="w_out", seed=9, init=init)
    found = run(3, trainable="w_out", seed=9, init_from=file, quiet=False, **where)
    np.testing.assert_allclose(found.losses, asked.losses, rtol=1e-5)
    np.testing.assert_array_equal(found.state.params.w_in, weights.state.params.w_in)
    assert found.losses[0] != fresh.losses[0]
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"starting from the weights {file}; initialised, since it has none: w_out"


def test_what_is_not_trained_may_not_be_missing_from_weights(tmp_path):
    params = run(1).state.params
    file = stored(tmp_path / "w.safetensors", params, ["w_out"])
    with pytest.raises(ValueError, match="w_in: missing, and not trainable, so that") as error:
        run(1, trainable="w_out,bias", init_from=file)
    assert "bias" not in str(error.value)
    for patterns in (None, "!w_in"):
        with pytest.raises(ValueError, match="`trainable` names may be missing; they are init"):
            run(1, init_from=file, trainable=patterns)


def test_a_weight_that_has_another_name_is_not_initialised_in_silence(tmp_path):
    params = by_path(run(1).state.params)
    arrays = {name: np.asarray(one) for name, one in params.items()}
    arrays["head"] = arrays.pop("w_out")
    save_file(arrays, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"head: not of the model \(in w.safetensors\)"):
        run(1, trainable="w_out", init_from=tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        ("blocks/**/lora*", ["blocks/mlp/lora_a", "blocks/query/lora_a", "blocks/query/lora_b"]),
        ("lora_b, embedding", ["blocks/query/lora_b", "embedding"]),
        (["query"], ["blocks/query/lora_a", "blocks/query/lora_b", "blocks/query/w"]),
        (lambda path, shape: path.endswith("w") and len(shape) == 1, ["blocks/query/w"]),
    ],
)
def test_parameters_are_chosen_by_patterns_or_by_a_predicate(trainable, expected):
    assert chosen(trainable) == expected


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (
            "blocks/**/lara*,query,embeding",
            "trainable: no parameter is meant by 'blocks/**/lara*'. Did you mean "
            "`blocks/mlp/lora_a` or `blocks/query/lora_b`?; "
            "no parameter is meant by 'embeding'. Did you mean `embedding`?",
        ),
        ([], "trainable: an empty list chooses no parameter, so there is nothing to train"),
        (
            lambda path, shape: False,
            "trainable: the predicate chooses no parameter, so there is nothing to train",
        ),
    ],
)
def test_what_chooses_nothing_is_an_error(trainable, message):
    with pytest.raises(ValueError) as error:
        trained(LEAVES, trainable)
    assert str(error.value).startswith(message)


def test_merging_gives_the_whole_tree_again():
    part = trained(LEAVES, "query")
    assert merged(part, LEAVES) == LEAVES


@pytest.mark.parametrize("given", [3, [3], ["w", None]])
def test_what_is_no_pattern_is_refused(given):
    params = {"w": md.spec(md.dims(embed=2))}
    with pytest.raises(ValueError, match=r"trainable: .* is no pattern; give globs on the param"):
        trained(params, given)


def test_what_is_frozen_may_be_excluded_from_weight_decay_by_its_name():
    def init(key):
        return {name: md.zeros(md.dims(x=2, y=2)) for name in ("embedding", "w")}

    optimizer = AdamW(0.1, mask=Excluding(["embedding"]))
    spec_of(create(init, optimizer, trainable="!embedding"))
    with pytest.raises(ValueError, match="no parameter is meant by 'embeding'"):
        spec_of(create(init, AdamW(0.1, mask=Excluding(["embeding"])), trainable="w"))
