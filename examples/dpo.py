"""Direct preference optimization: a model learns which of two answers people prefer.

    python examples/dpo.py --mesh_shape=data:4,model:2 --host_devices=8 \
        --layout='batch:data;heads:model;d_ff:model'

The loss is that of Rafailov et al. (2023), "Direct preference optimization: your language model is
secretly a reward model", equation 7. The model that training begins with is the reference. What it
makes of each answer is computed once, ahead of the training, so that no step runs two models.

`--data=pairs.jsonl` has lines {"prompt": "...", "chosen": "...", "rejected": "..."}; without it,
answers in small letters are preferred to the same in capitals. `--init_from` starts from weights,
and `--lora` trains adapters alone.
"""

import argparse
import dataclasses
import functools
import json
import random

import numpy as np

import meshdsl as md
from meshdsl import models, nn, optim
from meshdsl.models import transformer
from meshdsl.training import Data, Evaluation, Recipe, Reporting, load_weights, spec_of, train
from meshdsl.training.data import Arrays, load_tokenizer, ordered_batches, shuffled_batches

answer = md.Dimension("answer", 2)  # the chosen one, and the rejected one
TEXT = ["batch", "answer", "length"]
DIMS = {"tokens": TEXT, "targets": TEXT, "learned": TEXT, "reference": ["batch", "answer"]}


def log_probabilities(config, params, batch):
    """Returns the logarithm of the probability of each answer after its prompt: [batch, answer]."""
    tokens, targets, learned = (
        md.merge(batch[name], ["batch", "answer"], "batch")
        for name in ("tokens", "targets", "learned")
    )
    scores = transformer.logits(config, params, tokens)
    losses = nn.softmax_cross_entropy(scores, targets, over="vocab")  # batch, length
    total = -md.sum(md.where(learned > 0, losses, 0.0), "length")
    return md.split(total, "batch", [batch["tokens"].shape.get("batch"), answer])


def preference_loss(config, beta, params, batch):
    """Returns the mean of -log sigmoid(margin), the mean margin, and the share of those above 0."""
    gained = log_probabilities(config, params, batch) - batch["reference"]
    chosen, rejected = md.index(gained, "answer", 0), md.index(gained, "answer", 1)
    margin = beta * (chosen - rejected)
    right = md.mean(md.cast(margin > 0, "float32"))
    return -md.mean(md.log_sigmoid(margin)), {"margin": md.mean(margin), "accuracy": right}


def with_loss(model, loss, lora):
    """Returns a model with another loss of its parameters, and with adapters if there are any."""
    model = dataclasses.replace(model, loss=functools.partial(loss, model.config))
    return models.with_lora(model, lora) if lora else model


def made_pairs(count=400):
    """Returns pairs whose chosen answer repeats a word, and whose rejected one shouts it."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(count)]
    return [{"prompt": f"{w}:", "chosen": f" {w}", "rejected": f" {w.upper()}"} for w in words]


def read_pairs(path):
    """Returns the pairs of a file of JSON lines."""
    pairs, wrong = [], []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                pair = json.loads(line)
                pairs.append({name: str(pair[name]) for name in ("prompt", "chosen", "rejected")})
            except (ValueError, KeyError, TypeError) as error:
                wrong.append(f"line {number}: needs a prompt, chosen and rejected ({error!r})")
    if wrong or not pairs:
        raise SystemExit("\n  ".join([f"{path} is no file of pairs:", *(wrong[:10] or ["empty"])]))
    return pairs


def arrays_of(pairs, tokenizer, length, begin=None):
    """Returns the tokens of pairs, those that follow, and where these are of an answer.

    `begin` is the token that prompts begin with, as weights from elsewhere have learned.
    """
    tokens = np.full((len(pairs), 2, length + 1), tokenizer.end, np.int32)
    learned = np.zeros((len(pairs), 2, length), np.int32)
    prompts = tokenizer.encode([pair["prompt"].encode() for pair in pairs])
    too_long = 0
    for number, name in enumerate(("chosen", "rejected")):
        answers = tokenizer.encode([pair[name].encode() for pair in pairs])
        for row, (prompt, text) in enumerate(zip(prompts, answers, strict=True)):
            before = [int(token) for token in prompt[:-1]]
            if begin is not None and before[:1] != [begin]:
                before.insert(0, begin)
            before = before or [tokenizer.end]
            size = len(before) + len(text)
            too_long = max(too_long, size - length - 1)
            if size <= length + 1:
                tokens[row, number, :size] = [*before, *text]
                learned[row, number, len(before) - 1 : size - 1] = 1
    if too_long > 0:
        raise SystemExit(f"some pairs are longer than --length: take {length + too_long}")
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "learned": learned}


def reference_of(arrays, given, base):
    """Returns the log probabilities of all answers by the model that training begins with."""
    if given.init_from:
        scorer = with_loss(base, log_probabilities, None)
        params = load_weights(given.init_from, spec_of(scorer.init))
    else:
        scorer = with_loss(base, log_probabilities, given.lora)
        params = md.jit(scorer.init, given.mesh_shape, given.layout)(md.random.key(given.seed))
    run = md.jit(scorer.loss, given.mesh_shape, given.layout)
    rows, size = len(arrays["tokens"]), given.batch_size
    logs = []
    for first in range(0, rows, size):
        which = np.arange(first, first + size) % rows  # the last batch is filled up
        batch = {name: md.named(array[which], TEXT) for name, array in arrays.items()}
        logs.append(np.asarray(run(params, batch)))
    return np.concatenate(logs)[:rows]


def trained(given):
    """Trains the model; returns what `train` does."""
    base = models.load(given.model, given.model_args)
    policy = with_loss(
        base, lambda config, *rest: preference_loss(config, given.beta, *rest), given.lora
    )
    pairs = read_pairs(given.data) if given.data else made_pairs()
    tokenizer = load_tokenizer(given.tokenizer)
    begin = tokenizer.begin if given.init_from else None
    arrays = arrays_of(pairs, tokenizer, given.length, begin)
    held_out = np.arange(len(pairs)) % 5 == 4
    if held_out.sum() < given.batch_size:
        raise SystemExit(
            f"{len(pairs)} pairs are too few: every fifth is held out, and --batch_size of those "
            f"take {5 * given.batch_size}"
        )
    arrays["reference"] = reference_of(arrays, given, base)
    training, others = (
        Arrays({name: array[rows] for name, array in arrays.items()})
        for rows in (~held_out, held_out)
    )
    return train(
        Recipe(
            policy.init,
            policy.loss,
            optim.AdamW(given.learning_rate),
            seed=given.seed,
            init_from=given.init_from,
            trainable="adapters/**" if given.lora else None,
        ),
        Data(shuffled_batches(training, given.batch_size, given.seed), DIMS),
        steps=given.steps,
        mesh=given.mesh_shape,
        layout=given.layout,
        workdir=given.workdir,
        evaluation=Evaluation(ordered_batches(others, given.batch_size)),
        reporting=Reporting(log_every=given.log_every),
    )


def arguments():
    parser = argparse.ArgumentParser(description="Train a model on answers that people prefer.")
    parser.add_argument("--model", default="gpt_mini", help="a decoder-only model, or a folder")
    parser.add_argument("--model_args", default="layers=1,embed=64,heads=4")
    parser.add_argument("--init_from", help="weights to start from")
    parser.add_argument("--lora", help="train adapters alone: blocks/**/query:8,blocks/**/value:8")
    parser.add_argument("--data", help="pairs as JSON lines")
    parser.add_argument("--tokenizer", help="a tokenizer.json; else tokens are bytes")
    parser.add_argument("--beta", type=float, default=0.1, help="how near to the reference to stay")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:4,model:2")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;heads:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=16, help="tokens of a prompt and its answer")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log_every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", help="folder for metrics.jsonl and checkpoints")
    return parser.parse_args()


def main():
    given = arguments()
    if given.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    last = trained(given).history[-1]
    print(f"held-out pairs: loss {last['eval_loss']:.4f}, accuracy {last['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
