"""The adapter of lm-evaluation-harness, against the harness's own, which runs `transformers`."""

import functools
import json
import logging
import re

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.generation import Place
from meshdsl.models import transformer
from meshdsl.training.checkpointing.weights import load_weights
from meshdsl.training.data.tokenizers import Bytes, FileTokenizer
from meshdsl.training.state import spec_of

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is the extra [lm_eval]")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from meshdsl.generation.harness import HarnessModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's libraries have warnings

SIZES = "layers=2,embed=16,heads=4,d_ff=16,policy=float64"
LAYOUTS = {
    "one device": Place(),
    "tensor parallel": Place("data:2,model:4", "batch:data; heads:model; d_ff:model"),
    "flash-decoding": Place("data:2,model:4", "batch:data; memory_length:model; params/embed:data"),
}
PAIRS = [
    ("A named dim is", " a dim with a name"),
    ("", "It begins here"),
    ("Trailing spaces  ", "go to the text"),
    ("Much is before it. " * 8, " It is short"),
    ("", "?"),
]
DOCUMENTS = ["short", "One document is much longer than what a model reads at once. " * 4, ""]
LENGTH = 40


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def asked(kind, arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@functools.cache
def trained():
    model = models.load("gpt_mini", f"{SIZES},vocab=257")
    return model, md.jit(model.init, backend="numpy")(md.random.key(1))


def harness_model(place=LAYOUTS["one device"], **settings):
    model, params = trained()
    lm = HarnessModel(model, Bytes(), place=place, **{"length": LENGTH, "batch_size": 4} | settings)
    lm.load(params)
    return lm


def tokens_of(text):
    return list(text.encode())


def log_probabilities(tokens):
    """Returns the logarithms of the probabilities of all next tokens, and the likeliest ones."""
    model, params = trained()
    scores = md.jit(functools.partial(transformer.logits, model.config), backend="numpy")
    logits = np.asarray(scores(params, md.named(np.array([tokens], "int32"), ["batch", "length"])))
    logits = logits[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_likelihoods_are_those_of_the_full_forward_pass(layout):
    answers = harness_model(LAYOUTS[layout]).loglikelihood(asked("loglikelihood", PAIRS), True)
    for (before, text), (total, greedy) in zip(PAIRS, answers, strict=True):
        # Spaces between two texts belong to the second one, as in the harness.
        spaces = before[len(before.rstrip()) :]
        context, wanted = tokens_of(before.rstrip()) or [Bytes.end], tokens_of(spaces + text)
        read = [*context, *wanted][-LENGTH - 1 :]
        each = log_probabilities(read[:-1])[-len(wanted) :]
        assert total == pytest.approx(each[np.arange(len(wanted)), wanted].sum(), abs=1e-5)
        assert greedy == (each.argmax(-1).tolist() == wanted)


def test_what_the_model_writes_is_greedy_and_ends_before_a_stop_string(caplog):
    context = "def " * 12
    lm = harness_model(LAYOUTS["tensor parallel"])
    most = {"until": ["\n\n"], "max_gen_toks": 6}
    with caplog.at_level(logging.WARNING):
        (text,) = lm.generate_until(asked("generate_until", [(context, most)]), True)
    assert "1 of 1 texts do not fit the length of 40: up to 14 tokens are left out" in caplog.text
    tokens = tokens_of(context)[-LENGTH + 6 :]
    for _ in range(6):
        tokens.append(int(log_probabilities(tokens)[-1].argmax()))
    assert text == Bytes().decode(tokens[-6:])
    stop = Bytes().decode(tokens[-3:-2])
    request = asked("generate_until", [(context, {"until": stop, "max_gen_toks": 6})])
    assert lm.generate_until(request, True) == [text[: text.index(stop)]]


def test_draws_are_those_of_the_seed():
    draws = {"do_sample": True, "temperature": 1.5, "top_k": 50, "max_gen_toks": 8}
    requests = asked("generate_until", [("a", draws), ("a", draws)])
    one, two = (harness_model(LAYOUTS[n]).generate_until(requests, True) for n in list(LAYOUTS)[:2])
    assert one == two and one[0] != one[1]
    assert harness_model(seed=1).generate_until(requests, True) != one


def test_what_is_not_supported_is_refused_by_name():
    lm = harness_model()

    def refused(options):
        with pytest.raises(ValueError) as error:
            lm.generate_until(asked("generate_until", [("a", options)]), True)
        return str(error.value)

    assert "not supported: num_beams=4; it takes until, do_sample" in refused({"num_beams": 4})
    assert "asks for 256 tokens, but the length is 40" in refused({"num_beams": 1})
    with pytest.raises(ValueError, match="no chat template"):
        lm.apply_chat_template([])


def test_chats_are_texts_of_the_template():
    def template(messages, answers=True):
        text = "".join(f"<{each['role']}>{each['content']}\n" for each in messages)
        return text + "<assistant>" * answers

    lm = harness_model(template=template)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}]
    assert lm.apply_chat_template(chat[:1]) == "<user>Hi\n<assistant>"
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == "<user>Hi\n<assistant>So"
    assert lm.chat_template(True)


def toy_tasks(folder):
    """Writes a task of each kind; returns their files."""
    lines = [{"text": f"{n} and {n} are ", "choices": [f"{2 * n}", "no"]} for n in range(1, 4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = (
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
        "test_split: test\n"
        'doc_to_text: "{{text}}"\n'
    )
    metric = "metric_list:\n  - metric: {}\n"
    kinds = {
        "choose": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: 0\n"
        + metric.format("acc"),
        "read": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{text}}"\n'
        + metric.format("word_perplexity"),
        "write": 'output_type: generate_until\ndoc_to_target: "{{choices[0]}}"\n'
        'generation_kwargs: {until: ["."], max_gen_toks: 4}\n' + metric.format("exact_match"),
    }
    for name, text in kinds.items():
        (folder / f"{name}.yaml").write_text(f"task: toy_{name}\n{common}{text}")
    return [str(folder / f"{name}.yaml") for name in kinds]


def test_the_harness_asks_tasks_of_local_files(tmp_path):
    evaluated = lm_eval.simple_evaluate(
        harness_model(LAYOUTS["tensor parallel"]),
        tasks=toy_tasks(tmp_path),
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    results = evaluated["results"]
    best, total, words = [], 0.0, 0
    for n in range(1, 4):
        text = f"{n} and {n} are "
        before, spaces = tokens_of(text.rstrip()), " " * (len(text) - len(text.rstrip()))
        choices = []
        for choice in (f"{2 * n}", "no"):
            wanted = tokens_of(f"{spaces} {choice}")
            each = log_probabilities([*before, *wanted[:-1]])[-len(wanted) :]
            choices.append(each[np.arange(len(wanted)), wanted].sum())
        best.append(choices[0] > choices[1])
        each = log_probabilities([Bytes.end, *tokens_of(text)[:-1]])
        total += each[np.arange(len(text)), tokens_of(text)].sum()
        words += len(re.split(r"\s+", text))  # as the harness counts
    assert results["toy_choose"]["acc,none"] == pytest.approx(np.mean(best))
    assert results["toy_read"]["word_perplexity,none"] == pytest.approx(
        np.exp(-total / words), rel=1e-4
    )
    assert results["toy_write"]["exact_match,none"] == 0
    assert len(evaluated["samples"]["toy_write"]) == 3


@functools.cache
def reference(folder):
    """Returns the harness's model of a folder with random weights, and our files of it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tokenizers = pytest.importorskip("tokenizers")
    from lm_eval.models.huggingface import HFLM

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([*DOCUMENTS, *(a + b for a, b in PAIRS)], trainer)
    end = "<|endoftext|>"
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, bos_token=end, pad_token=end
    )
    theirs.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=inner.get_vocab_size(),
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    return HFLM(model.double(), tokenizer=theirs, max_length=LENGTH, batch_size=2), folder


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_answers_are_those_of_the_harness_on_transformers(layout, tmp_path_factory):
    theirs, folder = reference(tmp_path_factory.getbasetemp() / "llama")
    model = models.load(str(folder))
    lm = HarnessModel(
        model,
        FileTokenizer(folder / "tokenizer.json"),
        length=LENGTH,
        batch_size=4,
        place=LAYOUTS[layout],
    )
    lm.load(load_weights(folder, spec_of(model.init)))

    def both(kind, arguments):
        requests = asked(kind, arguments)
        return zip(*(getattr(each, kind)(requests, True) for each in (theirs, lm)), strict=True)

    for wanted, answer in both("loglikelihood", PAIRS):
        assert answer == (pytest.approx(wanted[0], abs=1e-5 * 16), wanted[1])
    for wanted, answer in both("loglikelihood_rolling", [(text,) for text in DOCUMENTS]):
        assert answer == pytest.approx(wanted, abs=1e-5 * 100)
    options = {"until": ["\n"], "max_gen_toks": 8}
    texts = [(context or "It", options) for context, _ in PAIRS]
    for wanted, answer in both("generate_until", texts):
        assert answer == wanted


def test_each_token_has_the_log_probability_of_transformers(tmp_path_factory):
    torch = pytest.importorskip("torch")
    theirs, folder = reference(tmp_path_factory.getbasetemp() / "llama")
    model = models.load(str(folder))
    for layout in list(LAYOUTS)[1:]:
        lm = HarnessModel(
            model, FileTokenizer(folder / "tokenizer.json"), length=LENGTH, place=LAYOUTS[layout]
        )
        lm.load(load_weights(folder, spec_of(model.init)))
        rng = np.random.default_rng(0)
        text = rng.integers(1, model.config.vocab, LENGTH + 1).tolist()
        (likelihood,) = lm.scorer.score([(text[:1], text[1:])])
        logits = theirs.model(torch.tensor([text[:-1]])).logits[0].detach()
        assert logits.dtype == torch.float64
        wanted = torch.log_softmax(logits, -1)[range(LENGTH), text[1:]].numpy()
        np.testing.assert_allclose(likelihood.tokens, wanted, atol=1e-5, rtol=0)
