"""A graph network: it tells the groups of nodes by their features and their neighbours.

    python examples/graph.py --mesh_shape=data:8 --layout='edges:data' --host_devices=8

Messages go along edges: `md.take` reads the nodes that they start from, `md.segment_sum` adds them
up where they end. `edges:data` shares the edges out, and the sums of the devices are added up. The
graph is made up: the features alone tell few of the groups, as the same network without messages
shows (`--layers=0`).
"""

import argparse
import itertools

import numpy as np

import meshdsl as md
from meshdsl import optim
from meshdsl.training import Data, Recipe, Reporting, train

NODES, GROUPS = 400, 4
WITHIN, BETWEEN = 0.15, 0.02  # how likely two nodes of a group, and of two groups, have an edge
nodes, feature, hidden, group = md.dims(nodes=NODES, feature=GROUPS, hidden=32, group=GROUPS)


class Network(md.Module):
    """Layers in which every node reads the mean of its neighbours."""

    w_in: md.Tensor  # feature, hidden
    own: tuple[md.Tensor, ...]  # hidden, to
    of_neighbours: tuple[md.Tensor, ...]  # hidden, to
    w_out: md.Tensor  # hidden, group

    @staticmethod
    def init(key, layers):
        draw = iter(md.random.split(key, 2 + 2 * layers))
        to = md.Dimension("to", hidden.size)

        def matrix(rows, columns):
            return md.random.normal(next(draw), [rows, columns]) * rows.size**-0.5

        return Network(
            w_in=matrix(feature, hidden),
            own=tuple(matrix(hidden, to) for _ in range(layers)),
            of_neighbours=tuple(matrix(hidden, to) for _ in range(layers)),
            w_out=matrix(hidden, group),
        )

    def __call__(self, features, start, end):  # nodes, feature; edges; edges
        x = md.relu(md.einsum(features, self.w_in, over="feature"))
        for own, of_neighbours in zip(self.own, self.of_neighbours, strict=True):
            messages = md.take(x, start, "nodes")  # edges, hidden
            count = md.segment_sum(md.ones(end.dims), end, nodes)
            mean = md.segment_sum(messages, end, nodes) / md.maximum(count, 1)
            new = md.einsum(x, own, over="hidden") + md.einsum(mean, of_neighbours, over="hidden")
            x = md.relu(new).rename(to="hidden")
        return md.einsum(x, self.w_out, over="hidden")  # nodes, group


def loss(network, batch):
    """Returns the mean cross-entropy of nodes whose group is known, and the accuracy of others."""
    logits = network(batch["features"], batch["start"], batch["end"])
    chosen = md.sum(logits * md.one_hot(batch["label"], group), "group")
    right = md.cast(chosen >= md.max(logits, "group"), "float32")
    known = batch["known"]
    each = md.logsumexp(logits, "group") - chosen
    accuracy = md.sum(right * (1 - known)) / md.sum(1 - known)
    return md.sum(each * known) / md.sum(known), {"accuracy": accuracy}


def graph(seed=0):
    """Returns a graph of which the groups of every fifth node are known."""
    draw = np.random.default_rng(seed)
    label = np.arange(NODES) % GROUPS
    likely = np.where(label[:, None] == label, WITHIN, BETWEEN)
    start, end = np.nonzero(np.triu(draw.random((NODES, NODES)) < likely, 1))
    start, end = np.concatenate([start, end]), np.concatenate([end, start])  # in both directions
    features = np.eye(GROUPS)[label] + draw.standard_normal((NODES, GROUPS))
    return {
        "features": features.astype("float32"),
        "start": start.astype("int32"),
        "end": end.astype("int32"),
        "label": label.astype("int32"),
        "known": (np.arange(NODES) // GROUPS % 5 == 0).astype("float32"),
    }


def main():
    parser = argparse.ArgumentParser(description="Tell the groups of a graph's nodes.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:8")
    parser.add_argument("--layout", help="dims split over mesh axes: edges:data")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--layers", type=int, default=2, help="0: without messages")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", help="folder for metrics.jsonl and TensorBoard")
    given = parser.parse_args()
    if given.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    batch = graph()
    dims = {name: ["nodes"] for name in ("label", "known")}
    dims |= {"features": ["nodes", "feature"], "start": ["edges"], "end": ["edges"]}
    rate = optim.schedules.warmup_cosine(1e-2, min(10, given.steps // 2), given.steps)
    recipe = Recipe(
        lambda key: Network.init(key, given.layers),
        loss,
        optim.AdamW(rate, weight_decay=0.1),
        seed=given.seed,
        batch_dim="nodes",
    )
    result = train(
        recipe,
        Data(itertools.repeat(batch), dims),
        steps=given.steps,
        mesh=given.mesh_shape,
        layout=given.layout,
        workdir=given.workdir,
        reporting=Reporting(log_every=given.steps),
    )
    print(f"accuracy of the other nodes' groups: {result.history[-1]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
