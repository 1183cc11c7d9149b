"""A language model from plain text, written from scratch: a transformer that reads bytes.

    python examples/language_model.py --mesh_shape=data:2,model:4 --host_devices=8 \
        --layout='batch:data;heads:model;d_ff:model'

The text is the Python standard library's own sources, or `--data='books/*.txt'`. The file has all
there is to a GPT: blocks of attention and an MLP, a loss, training, and writing text with what was
learned, byte by byte: a step reads one byte, and what a cache has kept of those before.
`heads:model;d_ff:model` is tensor parallelism as in Megatron-LM; `params/embed:data` added to it
keeps the parameters in shards (FSDP). Neither is mentioned below. After 300 steps the loss on
held-out text is 1.94 nats per byte, on every layout; one that knows nothing has log(256) = 5.55.
"""

import argparse
from types import SimpleNamespace

import numpy as np

import meshdsl as md
from meshdsl import nn, optim
from meshdsl.generation import Place, Sampling, Writer
from meshdsl.models import Cache, Decoding, Model
from meshdsl.training import Data, Evaluation, Recipe, Reporting, train
from meshdsl.training.data import Arrays, ordered_batches, shuffled_batches, text_files

BYTES = 2_000_000  # how much of the standard library is read
TEXT = ["batch", "length"]
vocab, heads = md.dims(vocab=256, heads=4)


class Block(md.Module):
    """Attention and an MLP; every parameter has the dim `layers` in front."""

    attention_scale: md.Tensor  # embed
    query: md.Tensor  # embed, heads, kv
    key: md.Tensor  # embed, heads, kv
    value: md.Tensor  # embed, heads, kv
    out: md.Tensor  # heads, kv, embed
    mlp_scale: md.Tensor  # embed
    w_in: md.Tensor  # embed, d_ff
    w_out: md.Tensor  # d_ff, embed
    window: int = md.static()  # how many bytes back a byte sees

    def __call__(self, x, rotate, slots=None, cache=None):
        """Returns x [batch, length, embed] after the block, and the cache with its positions.

        In training there is no cache: x has all positions. A step has new ones; `slots` says
        where they are in the cache, and what it holds.
        """
        h = nn.rms_norm(x, "embed", self.attention_scale)
        query = rotate(md.einsum(h, self.query, over="embed"))  # batch, length, heads, kv
        key = rotate(md.einsum(h, self.key, over="embed"))
        value = md.einsum(h, self.value, over="embed")
        # Each position looks at those before it: a dim of their own.
        if slots is None:
            memory = key.rename(length="memory_length"), value.rename(length="memory_length")
        else:
            memory = slots.write(cache["keys"], key), slots.write(cache["values"], value)
        where = {} if slots is None else slots.visible
        seen = md.attention(query, *memory, causal=True, window=self.window, **where)
        x = x + md.einsum(seen, self.out, over=["heads", "kv"])
        h = nn.rms_norm(x, "embed", self.mlp_scale)
        h = md.gelu(md.einsum(h, self.w_in, over="embed"))  # batch, length, d_ff
        x = x + md.einsum(h, self.w_out, over="d_ff")
        return x, {"keys": memory[0], "values": memory[1]}


class LanguageModel(md.Module):
    """From bytes to the scores of the byte that follows each."""

    embedding: md.Tensor  # vocab, embed; reads bytes, and scores them
    blocks: Block
    final_scale: md.Tensor  # embed

    @staticmethod
    def init(key, size, depth, window):
        layers, embed, d_ff = md.dims(layers=depth, embed=size, d_ff=4 * size)
        kv = md.Dimension("kv", size // heads.size)
        draw = iter(md.random.split(key, 7))
        project = nn.initializers.fan_in(over=embed)
        # What blocks add to x adds up: smaller at the start, the deeper the model is.
        gain = (2 * depth) ** -0.5
        blocks = Block(
            attention_scale=md.ones([layers, embed]),
            query=project(next(draw), [layers, embed, heads, kv]),
            key=project(next(draw), [layers, embed, heads, kv]),
            value=project(next(draw), [layers, embed, heads, kv]),
            out=nn.initializers.fan_in([heads, kv], gain)(next(draw), [layers, heads, kv, embed]),
            mlp_scale=md.ones([layers, embed]),
            w_in=project(next(draw), [layers, embed, d_ff]),
            w_out=nn.initializers.fan_in(d_ff, gain)(next(draw), [layers, d_ff, embed]),
            window=window,
        )
        embedding = nn.initializers.normal(0.02)(next(draw), [vocab, embed])
        return LanguageModel(embedding, blocks, md.ones([embed]))

    def __call__(self, tokens):  # batch, length
        x = md.take(self.embedding, tokens, "vocab")  # batch, length, embed
        rotate = nn.rotation(tokens.shape.get("length"), self.kv)
        x, _ = md.scan(lambda x, block: (block(x, rotate)[0], None), x, self.blocks, dim="layers")
        return self.scores(x)

    def step(self, tokens, cache, every=False):
        """Returns the scores of the byte that follows, [batch, vocab], and the cache with tokens.

        With `every`, those of the byte after each of the tokens: [batch, length, vocab].
        """
        length = tokens.shape.get("length")
        slots = cache.slots(length)
        rotate = nn.rotation(length, self.kv, positions=slots.text_positions)
        layers = (self.blocks, cache.layers["blocks"])
        x = md.take(self.embedding, tokens, "vocab")

        def layer(x, given):
            block, kept = given
            return block(x, rotate, slots, kept)

        x, kept = md.scan(layer, x, layers, dim="layers")
        scores = self.scores(x if every else md.index(x, "length", length.size - 1))
        return scores, cache.after(slots, {"blocks": kept})

    def scores(self, x):
        x = nn.rms_norm(x, "embed", self.final_scale)
        return md.einsum(x, self.embedding, over="embed")  # ..., vocab

    @property
    def kv(self):
        return self.blocks.query.shape.get("kv")


def loss(model, batch):
    """Returns the mean cross-entropy of the bytes that follow."""
    return md.mean(nn.softmax_cross_entropy(model(batch["tokens"]), batch["targets"]))


def windows(text, length):
    """Returns windows of text to train on, and every tenth, held out."""
    count = (len(text) - 1) // length
    tokens, targets = (text[first:][: count * length].reshape(count, length) for first in (0, 1))
    held_out = np.arange(count) % 10 == 9
    return [Arrays({"tokens": tokens[w], "targets": targets[w]}) for w in (~held_out, held_out)]


def writing(size, depth, window):
    """Returns what writes text: the model's steps, and the cache that they begin with."""
    layers, kv = md.dims(layers=depth, kv=size // heads.size)

    def empty(pads, positions):
        dims = [layers, *pads.shape, md.Dimension("memory_length", positions), heads, kv]
        blocks = {name: md.zeros(dims) for name in ("keys", "values")}
        return Cache(md.zeros([], "int32"), pads, {"blocks": blocks})

    return Model(
        "bytes",
        lambda key: LanguageModel.init(key, size, depth, window),
        loss,
        config=SimpleNamespace(vocab=vocab.size),
        decoding=Decoding(LanguageModel.step, empty, window=window, paged=True),
    )


def write(model, params, prompt, count, mesh, layout):
    """Returns the prompt and as many bytes after it, drawn one by one."""
    sizes = {"prompt_tokens": len(prompt), "new_tokens": count}
    writer = Writer(model, **sizes, sampling=Sampling(temperature=0.7), place=Place(mesh, layout))
    writer.load(params)
    text = bytes(int(byte) for (byte,) in writer.write([prompt]))
    return (prompt + text).decode(errors="replace")


def main():
    parser = argparse.ArgumentParser(description="Train a language model on plain text.")
    parser.add_argument("--data", help="files of text, with * and **; else Python's own sources")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:2,model:4")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;heads:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="bytes that are read at once")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", help="folder for metrics.jsonl and TensorBoard")
    given = parser.parse_args()
    if given.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    text = b"\n\n".join(path.read_bytes() for path in text_files(given.data))
    text = text if given.data else text[:BYTES]
    training, held_out = windows(np.frombuffer(text, np.uint8).astype(np.int32), given.length)
    if len(held_out) < given.batch_size:
        parser.error(
            f"{len(text):,} bytes of text are too few: every tenth window of --length bytes is "
            f"held out, and --batch_size of those take {10 * given.batch_size * given.length:,}"
        )
    model = writing(given.embed, given.layers, given.length)
    rate = optim.schedules.warmup_cosine(3e-3, min(10, given.steps // 2), given.steps)
    result = train(
        Recipe(
            model.init,
            model.loss,
            optim.AdamW(rate, weight_decay=0.1),
            clip_norm=1.0,
            seed=given.seed,
        ),
        Data(
            shuffled_batches(training, given.batch_size, given.seed),
            {"tokens": TEXT, "targets": TEXT},
        ),
        steps=given.steps,
        mesh=given.mesh_shape,
        layout=given.layout,
        workdir=given.workdir,
        evaluation=Evaluation(ordered_batches(held_out, given.batch_size, count=8)),
        reporting=Reporting(log_every=50),
    )
    print(write(model, result.state.params, b"def ", 200, given.mesh_shape, given.layout))
    print(f"nats per byte on held-out text: {result.history[-1]['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
