"""KerasHub's GPT-2 by `md.from_jax`; prints how far it is from JAX, as JSON.

Run as a program, so that Keras and its settings stay in a process of their own.
"""

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
# Its text tokenizers would load TensorFlow, which the models on the JAX backend do without.
sys.modules["tensorflow"] = None
sys.modules["tensorflow_text"] = None

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras_hub  # noqa: E402
import numpy as np  # noqa: E402

import meshdsl as md  # noqa: E402
from meshdsl.imports.jax.listing import share  # noqa: E402
from tests.imports.jax.distances import LAYOUTS, distances  # noqa: E402

BATCH, LENGTH, VOCAB = 8, 16, 48


def main():
    model = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCAB,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=LENGTH,
    )
    paths = [each.path.removeprefix(f"{model.name}/") for each in model.trainable_variables]
    params = {p: np.asarray(v) for p, v in zip(paths, model.trainable_variables, strict=True)}

    seeds = [np.asarray(each) for each in model.non_trainable_variables]  # of dropout

    def loss(params, tokens, mask):
        given = {"token_ids": tokens, "padding_mask": mask}
        states, _ = model.stateless_call([params[path] for path in paths], seeds, given)
        embedding = params["token_embedding/embeddings"]
        logits = states @ embedding.T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -jnp.mean(chosen), logits

    tokens = np.random.default_rng(0).integers(1, VOCAB, (BATCH, LENGTH)).astype("int32")
    mask = np.ones((BATCH, LENGTH), "int32")
    mask[1, 11:] = 0
    names = {
        "tokens": "batch length",
        "mask": "batch length",
        "params/token_embedding/embeddings": "vocab embed",
        "params/**/query/kernel": "_ heads kv",
        "params/**/value/kernel": "_ _ kv",
        "params/**/feedforward_intermediate_dense/kernel": "_ d_ff",
    }
    program = md.from_jax(loss, names)
    arguments = program.named(params, tokens, mask)
    inferred = program.inferred(params, tokens, mask)
    counted = share(inferred.naming, inferred.frame)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tokens, mask)
    found = {}
    for layout in LAYOUTS:
        step = md.value_and_grad(program, has_aux=True)
        ours = md.jit(step, "data:2,model:4", layout, backend="numpy")(*arguments)
        leaves = jax.tree.leaves(ours, is_leaf=lambda x: isinstance(x, md.NamedArray))
        found[layout] = [
            *distances(leaves[:2], jax.tree.leaves(expected)[:2]),
            *distances(leaves[2:], jax.tree.leaves(expected)[2:]),
        ]
    print(json.dumps({"named": counted.known, "dims": counted.every, "layouts": found}))


if __name__ == "__main__":
    main()
