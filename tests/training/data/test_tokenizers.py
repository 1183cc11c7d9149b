"""Tokenizers: bytes, and files of the `tokenizers` library."""

import json
import sys

import numpy as np
import pytest

from meshdsl.generation.texts import prompt_tokens
from meshdsl.training.data import Bytes, FileTokenizer, check_vocabulary, load_tokenizer
from meshdsl.training.data.chats import ChatFormat, read_chats
from meshdsl.training.data.corpus import has_text
from meshdsl.training.data.tokenizers import WithBegin
from tests.training.data.files import WORDS, write_tokenizer


def test_without_a_file_tokens_are_bytes_and_a_zero_ends_documents():
    tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, Bytes)
    found = tokenizer.encode([b"ab", b"", "é".encode()])
    assert [ids.tolist() for ids in found] == [[97, 98, 0], [0], [0xC3, 0xA9, 0]]
    assert (tokenizer.vocabulary, tokenizer.unit) == (256, "byte")


def test_a_tokenizer_file_makes_tokens_and_ends_documents(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"))
    found = tokenizer.encode([b"named dim of a tensor", b""])
    assert [ids.tolist() for ids in found] == [[1, 2, 3, 0, 4, 5], [5]]
    assert (tokenizer.vocabulary, tokenizer.unit) == (6, "token")
    named = load_tokenizer(write_tokenizer(tmp_path / "t.json"), "dim")
    assert named.encode([b"of"])[0].tolist() == [3, 2]
    assert named.identity != tokenizer.identity


def test_a_vocabulary_with_holes_is_as_large_as_its_last_id(tmp_path):
    path = write_tokenizer(tmp_path / "t.json", ids=[0, 1, 2, 3, 4, 1000])
    assert FileTokenizer(path).vocabulary == 1001


def test_a_tokenizer_that_truncates_or_pads_does_neither_here(tmp_path):
    import tokenizers

    path = write_tokenizer(tmp_path / "t.json")
    inner = tokenizers.Tokenizer.from_file(path)
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(path)
    found = FileTokenizer(path).encode([b"a named dim of", b"a"])
    assert [ids.tolist() for ids in found] == [[0, 1, 2, 3, 5], [0, 5]]


def refused(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    gone, wrong = tmp_path / "gone.json", tmp_path / "wrong.json"
    wrong.write_text('{"model": 3}')
    assert refused(lambda: load_tokenizer(str(gone))) == (
        f"{gone} cannot be read: No such file or directory"
    )
    assert refused(lambda: load_tokenizer(str(wrong))).startswith(
        f"{wrong} is not a tokenizer.json of the `tokenizers` library: "
    )


def test_an_end_token_must_be_known(tmp_path):
    bare = write_tokenizer(tmp_path / "bare.json", WORDS[:-1])
    assert refused(lambda: load_tokenizer(bare)) == (
        f"{bare} has none of the usual tokens that end a document (<|endoftext|>, </s>, "
        "<|end_of_text|>, <eos>, <|eos|>, [EOS], [SEP]): name its own with --end_token"
    )
    assert refused(lambda: load_tokenizer(bare, "tensr")) == (
        f"{bare} has no token 'tensr'. Did you mean `tensor`?"
    )
    assert refused(lambda: load_tokenizer(None, "</s>")) == (
        "the end token '</s>' is one of a tokenizer: give --tokenizer too"
    )


def test_without_the_library_it_is_named(tmp_path, monkeypatch):
    path = write_tokenizer(tmp_path / "t.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refused(lambda: load_tokenizer(path)) == (
        "tokenizers are read by the `tokenizers` library: pip install 'meshdsl[data]'"
    )


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json", ids=[*range(5), 1999]))
    check_vocabulary(tokenizer, 2000, "gpt_mini")
    assert refused(lambda: check_vocabulary(tokenizer, 1024, "gpt_mini")) == (
        f"{tokenizer.name} makes tokens of a vocabulary of 2,000, but gpt_mini has 1,024: take the "
        "tokenizer of the model, or --model_args=vocab=2000"
    )


def test_the_usual_tokenizer_of_bytes_and_merges_is_exact(tmp_path):
    """Byte-pair encoding as of GPT-2, trained here: its tokens decode to the text again."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    text = "A named dim is a dim with a name; é, 字 and 🙂 are text too.\n" * 3
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator([text], trainer)
    inner.save(str(tmp_path / "bpe.json"))
    ids = load_tokenizer(str(tmp_path / "bpe.json")).encode([text.encode()])[0]
    assert ids[-1] == 0 and np.all(ids[:-1] > 0)
    assert inner.decode(ids[:-1].tolist()) == text


def begun_by(folder, added, processor=True):
    """Writes a folder whose tokenizer puts a token before texts if its post-processor says so."""
    import tokenizers

    folder.mkdir()
    inner = tokenizers.Tokenizer.from_file(write_tokenizer(folder / "tokenizer.json"))
    inner.add_special_tokens(["<eos>"])
    if processor:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", 5)]
        )
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<eos>", **added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("added", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", [False, True])
def test_prompts_begin_with_the_token_of_the_post_processor(tmp_path, added, processor):
    folder = begun_by(tmp_path / "of", added, processor)
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    assert tokenizer.begin == (5 if processor else None)
    assert tokenizer.encode([b"a named"])[0].tolist() == [0, 1, 5]  # documents have none
    assert prompt_tokens(tokenizer, ["a named"], begin=tokenizer.begin) == [
        [5] * processor + [0, 1]
    ]


@pytest.mark.filterwarnings("ignore")  # of a library
@pytest.mark.parametrize("added", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", [False, True])
def test_prompts_begin_as_those_of_transformers(tmp_path, added, processor):
    transformers = pytest.importorskip("transformers")
    folder = begun_by(tmp_path / "of", added, processor)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    (tokens,) = prompt_tokens(tokenizer, ["a named dim"], begin=tokenizer.begin)
    assert theirs("a named dim").input_ids == tokens


def test_bytes_begin_with_no_token():
    assert Bytes().begin is None


def test_documents_may_begin_with_the_token_that_begins_prompts(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["</s>", "<s>", "a", "b"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "bare.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.save(str(tmp_path / "begins.json"))
    plain = load_tokenizer(str(tmp_path / "begins.json"))
    begins = WithBegin(plain)
    assert [list(ids) for ids in plain.encode([b"a b", b"b"])] == [[2, 3, 0], [3, 0]]
    assert [list(ids) for ids in begins.encode([b"a b", b"b"])] == [[1, 2, 3, 0], [1, 3, 0]]
    assert all(ids.dtype == np.int64 for ids in begins.encode([b"a b", b""]))
    lines = ['{"text": "a b"}', '{"messages": [{"role": "assistant", "content": "b"}]}']
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    chats = ChatFormat.of(lambda messages, _: "".join(m["content"] for m in messages), "mine")
    text, chat = (each.ids(begins) for each in read_chats(tmp_path / "some.jsonl", chats))
    assert text.dtype == np.int32 and text.tolist() == [1, 2, 3, 0]  # as of a file of text
    assert chat.tolist() == [3, 0]  # the template begins it
    assert has_text(str(tmp_path / "some.jsonl"))
    assert begins.identity != plain.identity and begins.begin == plain.begin == 1
    assert begins.decode([2, 3]) == plain.decode([2, 3])
    for bare in (load_tokenizer(str(tmp_path / "bare.json")), load_tokenizer(None)):
        with pytest.raises(ValueError, match="puts no token before texts"):
            WithBegin(bare)
