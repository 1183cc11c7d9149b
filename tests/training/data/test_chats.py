"""Chats: which tokens are learned, by looking for the answers in the text."""

import json

import numpy as np
import pytest

from meshdsl.training.data import Corpus
from meshdsl.training.data.chats import ChatFormat, are_chats, read_chats
from meshdsl.training.data.corpus import has_chats
from meshdsl.training.data.tokenizers import Bytes, FileTokenizer
from tests.training.data.files import write_parquet

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où?"},
    {"role": "assistant", "content": "Là, «ici»."},
    {"role": "user", "content": "No"},
    {"role": "assistant", "content": "Yes"},
]


def render(messages, answers):
    if messages[0]["role"] == "tool":
        raise RuntimeError("no tools")
    text = "".join(f"<{each['role']}>{each['content']}</>" for each in messages)
    return text + "<assistant>" * answers


FORMAT = ChatFormat.of(render, "mine")
TEXT = render(TALK, False)
ANSWERS = ["Là, «ici».</>", "Yes</>"]


def write(path, *lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return str(path)


def test_the_bytes_of_answers_are_learned_and_the_end_of_the_last(tmp_path):
    file = tmp_path / "chats.jsonl"
    write(file, {"messages": TALK}, {"messages": TALK[:4]}, {"text": "All of it"})
    first, second, third = (chat.ids(Bytes()) for chat in read_chats(file, FORMAT))
    wanted, at = [-1 - byte for byte in [*TEXT.encode(), Bytes.end]], 0
    for answer in ANSWERS:
        at = TEXT.encode().index(answer.encode(), at)
        wanted[at : at + len(answer.encode())] = answer.encode()
    wanted[-1] = Bytes.end  # of the answer, too
    assert first.tolist() == wanted
    assert second.tolist()[-1] == -1 - Bytes.end  # the user has the last word
    assert third.tolist() == [*b"All of it", Bytes.end]


def test_the_tokens_of_a_tokenizer_are_those_of_the_whole_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    special = ["<eos>", "</>", "<assistant>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXT] * 9, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    write(tmp_path / "chats.jsonl", {"messages": TALK})
    (chat,) = read_chats(tmp_path / "chats.jsonl", FORMAT)
    marked = chat.ids(tokenizer)
    ids = np.where(marked < 0, -1 - marked, marked)
    assert ids.tolist() == tokenizer.encode([TEXT.encode()])[0].tolist()
    learned = [tokenizer.decode([token]) for token in marked if token >= 0]
    assert "".join(tokenizer.decode([t]) for t in marked[marked >= 0]).count("</>") == 2
    assert tokenizer.decode(marked[marked >= 0].tolist()) == "".join(ANSWERS) + "<eos>"
    assert "<assistant>" not in learned


def test_no_end_is_added_to_a_text_that_has_it(tmp_path):
    write(tmp_path / "chats.jsonl", {"messages": TALK})

    def ending(messages, answers):  # each message with the end token
        return render(messages, answers).replace("</>", "\0")

    (chat,) = read_chats(tmp_path / "chats.jsonl", ChatFormat.of(ending, ""))
    ids = chat.ids(Bytes())
    assert len(ids) == len(ending(TALK, False).encode())
    assert ids[-1] == Bytes.end


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_examples_say_which_targets_are_learned(tmp_path, packing, cached):
    cache = tmp_path / "cache" if cached else None
    data = write(tmp_path / "chats.jsonl", *[{"messages": TALK}] * 6, {"text": "more"})
    (tmp_path / "plain.txt").write_text("plain text " * 20)
    for _ in range(2):  # the second time from the cache
        corpus = Corpus.read(f"{data},{tmp_path}/plain.txt", 256, cache=cache, chats=FORMAT)
        source = corpus.split(16, batch_size=1, packing=packing).train
        batch = source[np.arange(len(source))]
        assert set(batch) >= {"tokens", "targets", "learned"}
        assert batch["tokens"].min() >= 0 and batch["targets"].max() < 256
        learned = batch["learned"].astype(bool)
        assert 0.2 < learned.mean() < 0.9
        # An answer's first byte follows the end of its prompt.
        begins = learned[:, 1:] & ~learned[:, :-1]
        inside = batch["tokens"][:, 1:][begins & (batch["targets"][:, :-1] != 0)]
        assert set(inside.tolist()) <= {ord(">"), 0}


def test_mistakes_have_the_line(tmp_path):
    def refused(*lines, form=FORMAT):
        write(tmp_path / "chats.jsonl", *lines)
        with pytest.raises(ValueError) as error:
            list(read_chats(tmp_path / "chats.jsonl", form))
        return str(error.value)

    told = refused({"messages": TALK}, {"text": 1}, {"messages": []}, {"messages": [{"role": "a"}]})
    assert told.startswith(
        f"{tmp_path}/chats.jsonl has lines that are no chats:\n  line 2: needs {{"
    )
    assert "line 3" in told and "line 4" in told
    assert "line 1: no message is of the assistant" in refused({"messages": TALK[:2]})
    assert "line 1: chats need the tokenizer's template: give one with --chat_template" in refused(
        {"messages": TALK}, form=None
    )
    tool = [{"role": "tool", "content": "a"}, TALK[-1]]
    assert "line 1: the chat template refuses the messages: no tools" in refused({"messages": tool})
    forgets = ChatFormat.of(lambda messages, answers: render(messages[-2:], answers), "")
    assert "line 1: message 2: the template changes earlier text" in refused(
        {"messages": TALK}, form=forgets
    )
    (tmp_path / "chats.jsonl").write_bytes(b'{"text": "a"}\n{"text\n')
    with pytest.raises(ValueError, match="line 2: "):
        list(read_chats(tmp_path / "chats.jsonl", FORMAT))


def test_rows_of_parquet_are_the_chats_of_lines(tmp_path):
    pytest.importorskip("pyarrow")
    named = [{**TALK[1], "name": "Ann"}, TALK[2]]  # other rows then have a name of None
    talks = [TALK, TALK[:4], named]
    rows = [*talks[:2], None, named]  # a row without a chat is left out
    write_parquet(tmp_path / "chats.parquet", source=["a"] * 4, messages=rows)
    write(tmp_path / "chats.jsonl", *({"messages": talk} for talk in talks))

    def strict(messages, answers):
        assert all(None not in message.values() for message in messages)
        return render(messages, answers)

    form = ChatFormat.of(strict, "")
    lines, of_rows = (
        [chat.ids(Bytes()).tolist() for chat in read_chats(tmp_path / name, form)]
        for name in ("chats.jsonl", "chats.parquet")
    )
    assert of_rows == lines
    data, cache = f"{tmp_path}/*.parquet", tmp_path / "cache"
    assert has_chats(data)
    for kept in (None, cache, cache):
        corpus = Corpus.read(data, 256, cache=kept, chats=form)
        (component,) = corpus.components
        starts, sizes = component.documents.starts, component.documents.sizes
        read = [component.documents.read(a, a + n) for a, n in zip(starts, sizes, strict=True)]
        assert [ids.tolist() for ids in read] == lines


def test_parquet_with_a_text_or_without_messages_is_text(tmp_path):
    pytest.importorskip("pyarrow")
    chats, both, other = (tmp_path / f"{name}.parquet" for name in ("chats", "both", "other"))
    write_parquet(chats, messages=[TALK])
    write_parquet(both, messages=[TALK], text=["plain"], more=["more"])
    write_parquet(other, messages=["no list"])
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    assert are_chats(chats) and are_chats(both, "messages") and are_chats(both, "neither")
    assert not are_chats(both) and not are_chats(both, "more")
    assert not are_chats(other) and not are_chats(tmp_path / "damaged.parquet")
    assert not are_chats(tmp_path / "none.parquet")
    assert not has_chats(f"{both},{other}") and has_chats(f"{both}:1,{chats}:2")
    assert Corpus.read(str(both), 256).size == len("plain") + 1
    with pytest.raises(ValueError, match="has no column `text`, but messages"):
        Corpus.read(str(other), 256)


def test_mistakes_have_the_row(tmp_path):
    pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "chats.parquet", messages=[TALK, [], TALK[:2]])
    with pytest.raises(ValueError) as error:
        list(read_chats(tmp_path / "chats.parquet", FORMAT))
    message, title = str(error.value), f"{tmp_path}/chats.parquet has rows that are no chats:"
    assert message.startswith(f"{title}\n  row 1: needs {{")
    assert "row 2: no message is of the assistant" in message


def test_half_a_character_is_told_with_its_line(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    with pytest.raises(ValueError) as error:
        [*read_chats(file, FORMAT)]
    (line,) = str(error.value).splitlines()[1:]
    assert line.strip() == "line 2: its text has '\\ud83d', which is half of a character"
