"""What `explore --live` answers: its own page only, and only what the page may choose."""

import json
import threading

import pytest

pytest.importorskip("uvicorn")

from meshdsl.cli.exploring.computing import Impossible
from meshdsl.cli.exploring.live import MOST_BYTES, Offer, application
from meshdsl.reports.explain.values import as_values
from meshdsl.reports.explore.choices import Choice
from tests.cli.exploring.served import send, served
from tests.reports.explain.steps import explained

PAGE = "<!doctype html><title>plans</title>"
OFFER = Offer(4, (1, 2), ("", "full"))
GOOD = {"mesh": "data:2 model:2", "layout": "batch:data", "microbatches": 1, "remat": ""}


@pytest.fixture(scope="module")
def values():
    return as_values(explained(mesh="data:2 model:2", layout="batch:data")[1])


@pytest.fixture
def computed():
    """The choices that were computed."""
    return []


@pytest.fixture
def port(values, computed):
    def compute(choice):
        computed.append(choice)
        return Impossible("it does not fit") if choice.layout == "" else values

    with served(application(PAGE, OFFER, compute)) as port:
        yield port


def plan_of(read):
    """Returns the document of an answer, its only choice, and what there is of it."""
    document = json.loads(read)
    (row,) = document["plans"]
    texts = document["texts"]
    return document, Choice(texts[row[0]], texts[row[1]], row[2], texts[row[3]]), row[4:]


def reason_of(read):
    document, _, (reason, details) = plan_of(read)
    assert details == 0
    return document["texts"][reason]


def test_the_page_is_at_the_root(port, computed):
    status, read, headers = send(port, "/")
    assert (status, read.decode()) == (200, PAGE)
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    assert send(port, "/other")[0] == 404
    assert not computed


def test_a_plan_has_its_figures_and_all_its_details(port, values, computed):
    asked = {**GOOD, "layout": "heads:model, batch:data", "microbatches": 2, "remat": "full"}
    status, read, _ = send(port, "/plan", asked)
    assert status == 200
    document, choice, (figures, details) = plan_of(read)
    assert computed == [choice] == [Choice(GOOD["mesh"], "heads:model; batch:data", 2, "full")]
    assert [values[name] for name in document["fields"]] == figures[: len(document["fields"])]
    assert len(details[0]) == len(values["sent"])


def test_what_is_no_plan_has_its_reason(port):
    assert reason_of(send(port, "/plan", {**GOOD, "layout": ""})[1]) == "it does not fit"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": "batch=data"}, "`batch=data` is not of the form"),
        ({"layout": "batch:data; batch:model"}, "`batch` is given twice"),
        ({"mesh": "data=4"}, "expected `axis:size`"),
        ({"mesh": "data:4 data:2"}, "given twice"),
        ({"mesh": "data:8"}, "has 8 devices, and all plans of this page have 4"),
        ({"mesh": f"data:{10**30}"}, "all plans of this page have 4"),
        ({"microbatches": 4}, "microbatches are 1, 2 on this page, not 4"),
        ({"remat": "names:a --debug"}, "remat is the model's, full on this page"),
    ],
)
def test_only_what_the_page_may_choose_is_computed(port, computed, changes, says):
    status, read, _ = send(port, "/plan", {**GOOD, **changes})
    assert status == 200
    assert says in reason_of(read)
    assert not computed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 60_000,
        {},
        {**GOOD, "model": "/etc/passwd"},
        {**GOOD, "microbatches": True},
        {**GOOD, "microbatches": "1"},
        {**GOOD, "layout": ["batch:data"]},
        {name: value for name, value in GOOD.items() if name != "remat"},
        {**GOOD, "layout": "b" * MOST_BYTES},
    ],
)
def test_other_requests_are_refused(port, computed, body):
    status, read, _ = send(port, "/plan", body)
    assert status == 400
    assert "not the JSON of mesh, layout, microbatches, remat" in json.loads(read)["error"]
    assert not computed


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example:{port}",
        "0.0.0.0:{port}",
        "",
        None,
    ],
)
def test_a_name_of_elsewhere_that_leads_here_is_refused(port, computed, host):
    """A page whose name was rebound to 127.0.0.1 has the same origin as this process."""
    host = host and host.format(port=port)
    for path, body in [("/", None), ("/plan", GOOD)]:
        try:
            status, read, _ = send(port, path, body, Host=host, Origin=f"http://{host}")
        except ConnectionResetError:
            assert host is None  # no request of HTTP 1.1: it may be refused before it is all read
            continue
        assert status == (400 if host is None else 403)
        assert PAGE not in read.decode()
    assert not computed


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1:1",
        "http://localhost:{port}",
        "https://127.0.0.1:{port}",
        "http://127.0.0.1:{port}.evil.example",
        "null",
        "",
        None,
    ],
)
def test_a_page_of_elsewhere_gets_no_plan(port, computed, origin):
    origin = origin and origin.format(port=port)
    status, read, headers = send(port, "/plan", GOOD, Origin=origin)
    assert status == 403
    assert json.loads(read)["error"] == "plans are computed for the page of this process only"
    assert "Access-Control-Allow-Origin" not in headers
    assert not computed


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "[::1]:7", "127.0.0.1"])
def test_the_port_may_be_forwarded(port, host):
    status, _, _ = send(port, "/plan", GOOD, Host=host, Origin=f"http://{host}")
    assert status == 200


def test_other_methods_compute_nothing(port, computed):
    for method in ("GET", "PUT", "OPTIONS", "DELETE"):
        assert send(port, "/plan", method=method)[0] == 405
    assert not computed


def test_the_newest_of_those_that_wait_is_computed_and_the_others_are_told(values):
    begun, may_end, computed = threading.Event(), threading.Event(), []

    def compute(choice):
        computed.append(choice.layout)
        begun.set()
        assert may_end.wait(60)
        return values

    answers, waiting = {}, threading.Condition()
    with served(application(PAGE, OFFER, compute)) as port:

        def ask(layout):
            status, _, _ = send(port, "/plan", {**GOOD, "layout": layout})
            with waiting:
                answers[layout] = status
                waiting.notify_all()

        threads = []
        for layout in ("batch:data", "batch:model", "d_ff:model"):
            threads.append(threading.Thread(target=ask, args=[layout]))
            threads[-1].start()
            if layout == "batch:data":
                assert begun.wait(60)
            elif layout == "d_ff:model":  # it, or the one before: whichever came first is told
                with waiting:
                    assert waiting.wait_for(lambda: 409 in answers.values(), 60)
        may_end.set()
        for thread in threads:
            thread.join(60)
    assert answers["batch:data"] == 200 and computed[0] == "batch:data"
    assert sorted(answers.values()) == [200, 200, 409]
    assert len(computed) == 2
