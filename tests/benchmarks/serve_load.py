"""Many requests at once to `meshdsl serve`: texts that are right, and a server that stays up.

Sends requests, some of which are no JSON, ask for too much, or go away before their answer, and
compares every text that comes with the one that the same request gets alone. Prints how many of
each there were, the tokens per second, and how long texts took.

Run: python -m tests.benchmarks.serve_load [--requests=1000] [--at_once=32] [FLAGS OF serve]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

KINDS = ("completion", "stream", "chat", "malformed", "refused", "gone")
WEIGHTS = (50, 20, 10, 7, 6, 7)
PROMPTS = ("def ", "class Test", "import ", "# The", "", "for name in ", "x" * 60)
MODEL = "--model_args=layers=2,embed=64,heads=4"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def body_of(number: int, chat: bool = False) -> dict:
    """Returns the request of a number: few differ, so that each text can be asked for alone."""
    choose = random.Random(number % 40)
    body = {"max_tokens": choose.randint(1, 48), "seed": number % 40, "n": choose.choice((1, 1, 2))}
    body |= choose.choice(({"temperature": 0}, {"temperature": 0.8, "top_k": 40}, {"top_p": 0.9}))
    prompt = choose.choice(PROMPTS)
    if chat:
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """Returns the status and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def texts_of(read: bytes, stream: bool) -> list[str]:
    """Returns the texts of an answer."""
    if not stream:
        choices = json.loads(read)["choices"]
        return [c["text"] if "text" in c else c["message"]["content"] for c in choices]
    texts: Counter[int] = Counter()
    pieces: dict[int, str] = {}
    *lines, last, rest = read.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    for line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
            texts[choice["index"]] += choice["finish_reason"] is not None
    assert set(texts.values()) == {1}
    return [pieces[index] for index in sorted(pieces)]


def leave(port: int, number: int) -> None:
    """Asks for a text, and goes away before it is written."""
    body = json.dumps(body_of(number) | {"max_tokens": 100, "stream": number % 2 == 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
        connection.sendall(body[: len(body) // (1 + number % 3)])  # some, in the midst of the body
        time.sleep(0.01 * (number % 20))


def answer(port: int, number: int, kind: str) -> list[str] | None:
    """Sends a request of a kind; returns its texts, if it has any.

    Raises:
        AssertionError: the status is not what it should be.
    """
    if kind == "gone":
        leave(port, number)
        return None
    if kind == "malformed":
        junk = (b"", b"{", b"[1]", b'{"prompt": NaN}', b"\xff", b"[" * 10_000, b'"a"')
        status, read = post(port, "/v1/completions", junk[number % len(junk)])
        assert status == 400 and json.loads(read)["error"]["message"], (status, read)
        return None
    if kind == "refused":
        wrong = (
            {"max_tokens": 10**6},
            {"tools": [{}]},
            {"model": "other"},
            {"prompt": "a" * 2**20},
        )
        body = body_of(number) | wrong[number % len(wrong)]
        status, read = post(port, "/v1/completions", json.dumps(body).encode())
        assert status in (400, 404, 413) and "error" in json.loads(read), (status, read)
        return None
    chat, stream = kind == "chat", kind == "stream"
    body = json.dumps(body_of(number, chat) | {"stream": stream}).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, read = post(port, path, body)
    assert status == 200, (status, read)
    return texts_of(read, stream)


def load(port: int, requests: int, at_once: int) -> None:
    """Sends all requests, and prints what came of them."""
    kinds = random.Random(0).choices(KINDS, WEIGHTS, k=requests)
    alone = {
        (number, chat): answer(port, number, "chat" if chat else "completion")
        for number in range(40)
        for chat in (False, True)
    }
    counts: Counter[str] = Counter()
    seconds: list[float] = []
    problems: list[str] = []
    lock, todo = threading.Lock(), iter(range(requests))

    def work() -> None:
        while True:
            with lock:
                number = next(todo, None)
            if number is None:
                return
            kind, begin = kinds[number], time.perf_counter()
            try:
                texts = answer(port, number, kind)
                right = texts is None or texts == alone[number % 40, kind == "chat"]
                problem = "" if right else f"{number} {kind}: another text than alone"
            except Exception as error:
                problem = f"{number} {kind}: {type(error).__name__} {error}"
            with lock:
                counts[kind] += 1
                problems.extend([problem] * bool(problem))
                if texts is not None:
                    seconds.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begin
    seconds.sort()
    print(
        f"{requests:,} requests, {at_once} at a time, in {took:.1f} s: {requests / took:.1f} per s"
    )
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    middle, late = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
    print(f"answers with texts took {middle:.2f} s in the median, {late:.2f} s for the slowest 1 %")
    time.sleep(1)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    print("health:", connection.getresponse().read().decode())
    print(f"{len(problems)} problems", *problems[:10], sep="\n  ")
    if problems:
        raise SystemExit(1)


def main() -> None:
    """Trains a small model for a few steps, serves it, and loads the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at_once", type=int, default=32)
    given, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "meshdsl"]
        job = ["train", MODEL, "--steps=30", "--eval_batches=1", f"--workdir={folder}/run"]
        subprocess.run([*run, *job], check=True)
        template = Path(folder, "chat.jinja")
        template.write_text(TEMPLATE)
        serve = ["serve", f"--workdir={folder}/run", "--port=0", "--length=256", "--waiting=200"]
        command = [*run, *serve, f"--chat_template={template}", *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                line = server.stdout.readline()
                print(line, end="")
                load(
                    int(line.partition("/v1:")[0].rpartition(":")[2]), given.requests, given.at_once
                )
                assert server.poll() is None, "the server has ended"
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
