"""The server on the wire: OpenAI's shapes, refusals, and readers who go away."""

import functools
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

import meshdsl as md
from meshdsl.generation import Place, RowWriter, Sampling, Writer, write_texts
from meshdsl.generation.serving import Engine
from meshdsl.generation.serving.chat import load_template
from meshdsl.models import transformer
from meshdsl.training.data.tokenizers import Bytes
from tests.generation.test_writer import SIZES, trained

uvicorn = pytest.importorskip("uvicorn")
app = pytest.importorskip("meshdsl.generation.serving.app")

CONTEXT, ROWS, WAITING = 48, 3, 4
MODEL = ("gpt_mini", SIZES.replace("vocab=61", "vocab=256"))
PLACE = Place(backend="numpy")
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "tool" %}{{ raise_exception("no tools") }}{% endif -%}
<{{ message.role[0] }}>{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt %}<a>{% endif -%}
"""


class Gate:
    """A writer whose steps wait while the gate is shut."""

    def __init__(self, writer):
        self.writer, self.open, self.steps = writer, threading.Event(), 0
        self.open.set()

    def __getattr__(self, name):
        return getattr(self.writer, name)

    def step(self):
        assert self.open.wait(timeout=60)
        self.steps += 1
        return self.writer.step()


@contextmanager
def served(template=None, **options):
    """Yields the port of a server, and its service."""
    model, params = trained(*MODEL)
    writer = RowWriter(model, context=CONTEXT, rows=ROWS, place=PLACE, chunk=8, ranked=20)
    writer.load(params)
    service = app.Service(Engine(Gate(writer), WAITING), Bytes(), "tiny", template, **options)
    options = {"log_level": "critical", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app.application(service), **options)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1], service
    finally:
        service.engine.writer.open.set()
        server.should_exit = True
        thread.join(timeout=60)
        listener.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    with served(load_template(file)) as running:
        yield running


def send(port, path, body=None, method=None, headers=None):
    """Returns the status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    kind = {} if body is None else {"Content-Type": "application/json"}
    method = method or ("GET" if body is None else "POST")
    connection.request(method, path, body, kind | (headers or {}))
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    return answer.status, answer.headers, read


def asked(port, path, body):
    status, _, read = send(port, path, body)
    assert status == 200, read
    return json.loads(read)


def chunks(port, path, body):
    """Returns the chunks of a stream."""
    status, headers, read = send(port, path, {**body, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    lines = read.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error_of(port, path, body, **options):
    status, _, read = send(port, path, body, **options)
    error = json.loads(read)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error


def alone(prompt, most, sampling, stop=()):
    model, params = trained(*MODEL)
    sizes = {"prompt_tokens": 40, "new_tokens": most, "chunk": 8}
    writer = Writer(model, sampling=sampling, place=PLACE, **sizes)
    writer.load(params)
    (text,) = write_texts(writer, Bytes(), [prompt], stop)
    return text


SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}


def test_a_completion_has_the_text_that_is_written_alone(server):
    port, _ = server
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, **SEEDED, "stop": "\x03"}
    answer = asked(port, "/v1/completions", body)
    text = alone("Hello", 12, Sampling(0.9, top_p=0.9, seed=5), ["\x03"])
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert abs(answer["created"] - time.time()) < 120 and answer["model"] == "tiny"
    assert answer["choices"] == [
        {"index": 0, "text": text.written, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


def test_a_stream_has_the_same_text_in_pieces(server):
    port, _ = server
    body = {"prompt": "Hello", "max_tokens": 12, **SEEDED}
    whole = asked(port, "/v1/completions", body)["choices"][0]
    pieces = chunks(port, "/v1/completions", body)
    assert len({piece["id"] for piece in pieces}) == 1
    assert all(piece["object"] == "text_completion" for piece in pieces)
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    assert not any("usage" in piece for piece in pieces)


def test_several_prompts_have_several_texts_each_in_order(server):
    port, _ = server
    body = {"prompt": ["one", "Hi"], "max_tokens": 5, "n": 2, "seed": 2}
    answer = asked(port, "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    pieces = chunks(port, "/v1/completions", body)
    for index, choice in enumerate(answer["choices"]):
        own = [c["text"] for p in pieces for c in p["choices"] if c["index"] == index]
        assert "".join(own) == choice["text"]
    tokens = asked(port, "/v1/completions", body | {"prompt": [[111, 110, 101], [72, 105]]})
    assert tokens["choices"] == answer["choices"]
    single = asked(port, "/v1/completions", body | {"prompt": [111, 110, 101]})
    assert single["choices"] == answer["choices"][:2]


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
]


def test_a_chat_goes_on_from_its_template(server):
    port, _ = server
    body = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 9, **SEEDED}
    answer = asked(port, "/v1/chat/completions", body)
    prompt = "<s>Be brief.<u>Hello<a>"
    text = alone(prompt, 9, Sampling(0.9, top_p=0.9, seed=5))
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": text.written, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    pieces = chunks(
        port, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}}
    )
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"] == answer["usage"]
    deltas = [piece["choices"][0]["delta"] for piece in pieces[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text.written
    assert pieces[-2]["choices"][0]["finish_reason"] == "length"


def test_a_chat_goes_on_to_the_end_of_the_context(server):
    port, _ = server
    answer = asked(port, "/v1/chat/completions", {"messages": MESSAGES[:1], "temperature": 0})
    assert answer["usage"]["total_tokens"] == CONTEXT


def log_probabilities(text):
    """Returns log_softmax of the scores of the full forward pass, of each next byte of a text."""
    model, params = trained(*MODEL)
    at_once = md.jit(functools.partial(transformer.logits, model.config), backend="numpy")
    tokens = md.named(np.array([list(text)], "int32"), ["batch", "length"])
    logits = np.asarray(at_once(params, tokens))[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check_token(value, tokens, likeliest, wanted, token):
    """Checks a token's logarithm, and those of the likeliest by their bytes."""
    assert value == pytest.approx(wanted[token], abs=1e-5)
    order = np.argsort(-wanted)[: len(likeliest)]
    assert tokens == [bytes([byte]).decode(errors="replace") for byte in order]
    np.testing.assert_allclose(likeliest, wanted[order], atol=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_are_those_of_the_full_forward_pass(server, stream):
    port, _ = server
    body = {"messages": MESSAGES, "max_tokens": 9, **SEEDED, "repetition_penalty": 1.3}
    body |= {"logprobs": True, "top_logprobs": 4}
    if stream:
        pieces = chunks(port, "/v1/chat/completions", body)
        every = [each["choices"][0]["logprobs"] for each in pieces]
        content = [token for each in every if each is not None for token in each["content"]]
    else:
        (choice,) = asked(port, "/v1/chat/completions", body)["choices"]
        content = choice["logprobs"]["content"]
    read = list(b"<s>Be brief.<u>Hello<a>")
    assert len(content) == 9
    for each in content:
        wanted = log_probabilities(read)[-1]
        (token,) = each["bytes"]
        top = each["top_logprobs"]
        check_token(
            each["logprob"],
            [one["token"] for one in top],
            [one["logprob"] for one in top],
            wanted,
            token,
        )
        read.append(token)
    text = alone("<s>Be brief.<u>Hello<a>", 9, Sampling(0.9, 0, 0.9, 0.0, 1.3, seed=5))
    assert bytes(read[-9:]).decode(errors="replace") == text.written


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_prompt_and_its_logprobs(server, stream):
    port, _ = server
    prompt = "A prompt of several chunks"
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 2}
    if stream:
        choices = [each["choices"][0] for each in chunks(port, "/v1/completions", body)]
    else:
        choices = asked(port, "/v1/completions", body)["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == prompt + alone(prompt, 5, Sampling(0)).written
    probabilities = {key: [] for key in choices[0]["logprobs"]}
    for choice in choices:
        for key, values in choice["logprobs"].items():
            probabilities[key] += values
    count = len(prompt)
    assert probabilities["tokens"][:count] == list(prompt)
    assert probabilities["text_offset"][: count + 1] == list(range(count + 1))
    assert probabilities["token_logprobs"][0] is None and probabilities["top_logprobs"][0] is None
    read = list(prompt.encode())
    for _ in range(5):
        read.append(int(log_probabilities(read)[-1].argmax()))
    every = log_probabilities(read)
    for at in range(1, count + 5):
        wanted, token = every[at - 1], read[at]
        assert probabilities["token_logprobs"][at] == pytest.approx(wanted[token], abs=1e-5)
        likely = [bytes([byte]).decode(errors="replace") for byte in np.argsort(-wanted)[:2]]
        own = [bytes([token]).decode(errors="replace")]
        assert set(probabilities["top_logprobs"][at]) == {*likely, *own}
    assert len(probabilities["tokens"]) == count + 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_has_the_logprobs_of_a_longer_text(server, stream):
    port, service = server
    prompt = "x" * (CONTEXT - 10) + "A prompt !"  # as long as the context
    body = {"prompt": prompt, "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 1}
    if stream:
        (piece,) = chunks(port, "/v1/completions", body)
        (choice,) = piece["choices"]
    else:
        answer = asked(port, "/v1/completions", body)
        (choice,) = answer["choices"]
        usage = {"prompt_tokens": CONTEXT, "completion_tokens": 0, "total_tokens": CONTEXT}
        assert answer["usage"] == usage
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    every = log_probabilities(prompt.encode())
    wanted = [every[at - 1][byte] for at, byte in enumerate(prompt.encode()) if at]
    assert choice["logprobs"]["tokens"] == list(prompt)
    assert choice["logprobs"]["token_logprobs"][0] is None
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], wanted, atol=1e-5)
    until(lambda: service.engine.counts() == {"running": 0, "waiting": 0})


def test_a_prompt_begins_with_the_token_of_its_tokenizer_and_a_chat_with_that_of_its_template(
    server, tmp_path
):
    port, _ = server
    body = {"prompt": "\x01Hi", "max_tokens": 5, **SEEDED, "echo": True, "logprobs": 1}
    chat = {"messages": MESSAGES, "max_tokens": 4, **SEEDED}
    plain = asked(port, "/v1/completions", body)
    answered = asked(port, "/v1/chat/completions", chat)
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    with served(load_template(file), begin=1) as (begins, _):
        begun = asked(begins, "/v1/completions", body | {"prompt": "Hi"})
        assert asked(begins, "/v1/completions", body)["choices"] == plain["choices"]
        assert asked(begins, "/v1/chat/completions", chat)["choices"] == answered["choices"]
    assert begun["usage"] == plain["usage"]
    (choice,), (wanted,) = begun["choices"], plain["choices"]
    assert choice["text"] == wanted["text"].removeprefix("\x01")
    offsets, with_token = (each["logprobs"].pop("text_offset") for each in (choice, wanted))
    assert offsets[:4] == [0, 0, 1, 2] and offsets[1:] == [each - 1 for each in with_token[1:]]
    assert choice["logprobs"] == wanted["logprobs"]


def test_an_echo_without_logprobs_is_the_text_after_its_prompt(server):
    port, _ = server
    body = {"prompt": [72, 105], "max_tokens": 4, **SEEDED}
    (plain,) = asked(port, "/v1/completions", body)["choices"]
    (echoed,) = asked(port, "/v1/completions", body | {"echo": True})["choices"]
    assert echoed["text"] == "Hi" + plain["text"] and echoed["logprobs"] is None


def test_tokens_of_a_stop_string_have_no_logprobs(server):
    port, _ = server
    text = alone("Hello", 12, Sampling(0)).written
    body = {"prompt": "Hello", "max_tokens": 12, "temperature": 0, "logprobs": 0}
    (choice,) = asked(port, "/v1/completions", body | {"stop": text[3:6]})["choices"]
    at = text.index(text[3:6])
    assert choice["text"] == text[:at]
    assert len(choice["logprobs"]["tokens"]) == len(text[:at])
    assert all(len(each) == 1 for each in choice["logprobs"]["top_logprobs"])


def test_requests_at_once_have_the_texts_that_they_have_alone(server):
    port, _ = server
    bodies = [
        {"prompt": "x" * (1 + number), "max_tokens": 8, "seed": number, "top_k": 30}
        for number in range(6)
    ]
    first = [asked(port, "/v1/completions", body)["choices"] for body in bodies]
    answers = [None] * len(bodies)

    def ask(number):
        answers[number] = asked(port, "/v1/completions", bodies[number])["choices"]

    threads = [threading.Thread(target=ask, args=[number]) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert answers == first


def test_models_and_health_are_reported(server):
    port, _ = server
    models = json.loads(send(port, "/v1/models")[2])
    (model,) = models["data"]
    assert models["object"] == "list" and model["id"] == "tiny" and model["object"] == "model"
    assert json.loads(send(port, "/v1/models/tiny")[2]) == model
    assert error_of(port, "/v1/models/gpt-4", None)[0] == 404
    assert json.loads(send(port, "/health")[2]) == {"status": "ok", "running": 0, "waiting": 0}


WRONG = {
    "no JSON": (b"{", "the body is not JSON", None),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN is no number of JSON", None),
    "deep": (b"[" * 100_000, "the body is not JSON", None),
    "bytes": (b"\xff\xfe", "the body is not JSON", None),
    "digits": (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "the body is not JSON", None),
    "a list": ([], "the body needs to be an object", None),
    "no prompt": ({}, "prompt is the text to go on from", "prompt"),
    "empty list": ({"prompt": []}, "prompt is the text to go on from", "prompt"),
    "no text": ({"prompt": ["a", 1]}, "prompt needs to be a text", "prompt"),
    "no token": ({"prompt": [1, -2]}, "whole numbers from 0", "prompt"),
    "unknown token": ({"prompt": [256]}, "tokens are below 256, but a prompt has 256", "prompt"),
    "half": (b'{"prompt": "\\ud800"}', "half of a surrogate pair", "prompt"),
    "half of a name": (b'{"\\ud800": 1}', "there is no field", "?"),
    "a slip": ({"prompt": "a", "max_token": 1}, "Did you mean `max_tokens`?", "max_token"),
    "truth": ({"prompt": "a", "max_tokens": True}, "a whole number from 1", "max_tokens"),
    "none": ({"prompt": "a", "max_tokens": 0}, "a whole number from 1", "max_tokens"),
    "hot": ({"prompt": "a", "temperature": 3}, "a number from 0 to 2", "temperature"),
    "text": ({"prompt": "a", "temperature": "1"}, "a number from 0 to 2", "temperature"),
    "top_p": ({"prompt": "a", "top_p": 0}, "above 0 and at most 1", "top_p"),
    "huge": (b'{"prompt": "a", "temperature": 1e999}', "a number from 0 to 2", "temperature"),
    "number": ({"prompt": [[256]] * 4, "n": 2}, "8 texts in one request; at most 7", "n"),
    "count": ({"prompt": "a", "n": 8}, "8 texts in one request; at most 7", "n"),
    "stops": ({"prompt": "a", "stop": ["b"] * 17}, "a list of up to 16", "stop"),
    "empty stop": ({"prompt": "a", "stop": ""}, "1 to 256 characters", "stop"),
    "logprobs": ({"prompt": "a", "logprobs": 21}, "a whole number from 0 to 20", "logprobs"),
    "truth for a number": ({"prompt": "a", "logprobs": True}, "a whole number from 0", "logprobs"),
    "nothing": ({"prompt": "a", "max_tokens": -1, "echo": True}, "number from 0", "max_tokens"),
    "echo": ({"prompt": "a", "echo": 1}, "needs to be true or false", "echo"),
    "options": ({"prompt": "a", "stream_options": {"a": 1}}, "stream=true", "stream_options"),
    "truthy": ({"prompt": "a", "stream": 1}, "needs to be true or false", "stream"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_by_name(server, name):
    body, message, param = WRONG[name]
    status, error = error_of(server[0], "/v1/completions", body)
    assert status == 400 and error["type"] == "invalid_request_error"
    assert message in error["message"] and error["param"] == param


WRONG_CHATS = {
    "none": ({}, "messages is a list", "messages"),
    "role": ({"messages": [{"role": "me", "content": "a"}]}, "needs a role", "messages[0]"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "is no text",
        "messages[0]",
    ),
    "nothing": ({"messages": [{"role": "user"}]}, "needs to be a text", "messages[0]"),
    "tools": ({"messages": MESSAGES, "tools": [{}]}, "tools is not supported", "tools"),
    "calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "tool_calls is not supported",
        "messages[0]",
    ),
    "top": ({"messages": MESSAGES, "top_logprobs": 2}, "for logprobs=true", "top_logprobs"),
    "number": ({"messages": MESSAGES, "logprobs": 2}, "needs to be true or false", "logprobs"),
    "prompt": ({"messages": MESSAGES, "echo": True}, "echo is not supported", "echo"),
    "template": ({"messages": [{"role": "tool", "content": "a"}]}, "no tools", "messages"),
}


@pytest.mark.parametrize("name", WRONG_CHATS)
def test_a_wrong_chat_is_refused_by_name(server, name):
    body, message, param = WRONG_CHATS[name]
    status, error = error_of(server[0], "/v1/chat/completions", body)
    assert status == 400 and message in error["message"] and error["param"] == param


def test_neutral_values_and_fields_of_accounting_change_nothing(server):
    port, _ = server
    body = {"prompt": "a", "max_tokens": 3, "seed": 2}
    more = {"echo": False, "best_of": 1, "presence_penalty": 0.0, "logit_bias": {}, "user": "me"}
    more |= {"suffix": None, "logprobs": None, "stop": None, "top_k": -1, "min_p": 0}
    choices = asked(port, "/v1/completions", body)["choices"]
    assert asked(port, "/v1/completions", body | more)["choices"] == choices


def test_what_is_too_long_is_refused(server):
    port, service = server
    status, error = error_of(port, "/v1/completions", {"prompt": "a" * 40, "max_tokens": 9})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"] == (
        "this model's context is 48 tokens, too few for a prompt of 40 and 9 more"
    )
    assert error_of(port, "/v1/chat/completions", {"messages": MESSAGES * 3})[0] == 400
    status, error = error_of(port, "/v1/completions", b" " * (service.body_bytes + 1))
    assert status == 413 and "longer than 1,048,576 bytes" in error["message"]
    pieces = (b" " * 65_536 for _ in range(20))  # sent in chunks, without a length
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", "/v1/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_other_paths_methods_and_kinds_of_bodies_are_refused(server):
    port, _ = server
    assert error_of(port, "/v1/embeddings", {})[0] == 404
    assert error_of(port, "/v1/completions", None)[0] == 405
    status, error = error_of(port, "/v1/completions", {}, headers={"Content-Type": "text/plain"})
    assert status == 415 and "Content-Type: application/json" in error["message"]
    status, error = error_of(port, "/v1/completions", {"prompt": "a", "model": "gpt-4"})
    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"] == "the model 'gpt-4' is not here: this server has 'tiny'"


def test_requests_beyond_the_queue_are_refused_and_the_others_answered(server):
    port, service = server
    gate, statuses = service.engine.writer, []
    gate.open.clear()
    body = {"prompt": "a", "max_tokens": 4, "seed": 1}

    def ask():
        statuses.append(send(port, "/v1/completions", body)[0])

    threads = [threading.Thread(target=ask) for _ in range(ROWS + WAITING)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda number=number: sum(service.engine.counts().values()) == number + 1)
    status, headers, read = send(port, "/v1/completions", body)
    assert status == 429 and headers["retry-after"] == "1"
    assert json.loads(read)["error"]["code"] == "rate_limit_exceeded"
    gate.open.set()
    for thread in threads:
        thread.join(timeout=60)
    assert statuses == [200] * len(threads)


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_whose_reader_goes_away_is_not_written_on(server, stream):
    port, service = server
    gate = service.engine.writer
    gate.open.clear()
    body = json.dumps({"prompt": "a", "max_tokens": 40, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        if stream:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: service.engine.counts()["running"] == 1)
    steps = gate.steps
    time.sleep(0.3)  # the server hears of it
    gate.open.set()
    until(lambda: service.engine.counts() == {"running": 0, "waiting": 0})
    assert gate.steps < steps + 10


def test_what_is_no_http_and_what_ends_early_does_no_harm(server):
    port, _ = server
    for junk in (
        b"\0\1\2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
        b"Content-Type: application/json\r\n\r\n{",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(junk)
    body = {"prompt": "a", "max_tokens": 2}
    assert len(asked(port, "/v1/completions", body)["choices"]) == 1


def test_a_body_that_comes_too_slowly_is_refused():
    with (
        served(body_seconds=0.2) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        assert connection.recv(12) == b"HTTP/1.1 408"
        status, error = error_of(port, "/v1/chat/completions", {"messages": MESSAGES})
        assert status == 400 and "start the server with --chat_template" in error["message"]


def test_a_failure_of_the_device_is_an_error_of_the_server():
    with served() as (port, service):

        def broken():
            raise RuntimeError("the device is gone")

        service.engine.writer.writer.step = broken
        status, error = error_of(port, "/v1/completions", {"prompt": "a"})
        assert (status, error["type"]) == (500, "server_error")
        assert error_of(port, "/v1/completions", {"prompt": "a"})[0] == 503
        status, _, read = send(port, "/health")
        assert (status, json.loads(read)) == (503, {"status": "failed"})
