"""The supervisor of a host that is not the first, where the first one is faked."""

from types import SimpleNamespace

from meshdsl.training.launching import hosts, member


def test_the_end_of_a_process_is_told_whatever_is_in_the_folder_of_copies(monkeypatch, tmp_path):
    def said(folder):
        raise KeyError("start")

    told, reported = [], []
    monkeypatch.setattr(member, "said", said)
    rest = lambda flags: ["/no/such/program"], {}, tmp_path, (60.0, 60.0), reported.append
    terms = hosts.Terms("localhost:1", 2, "one", 30.0)
    one = member.Member(hosts.Host(terms, range(1, 2), *rest, copies=tmp_path))
    line = SimpleNamespace(send=lambda **message: told.append(message))
    one._start(line, {"start": 1, "of": 1, "shown": False, "flags": [], "variables": {}})
    (message,) = told
    assert (message["ended"], message["code"], message["copies"]) == (1, 1, [])
    assert "No such file" in message["lines"][0] and str(tmp_path) in reported[0]
