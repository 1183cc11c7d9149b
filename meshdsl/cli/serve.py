"""`meshdsl serve`: OpenAI's API over HTTP, answered with a trained model."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from meshdsl.cli.checkpointed import (
    Trained,
    begin_token,
    chat_template,
    check_mesh_and_out,
    place_of,
    stop_tokens,
    tell_of_context,
)
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.serving.listening import listening, server_of
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.training.reporting.output import tell

if TYPE_CHECKING:
    from meshdsl.models import Model

_ROWS, _CONTEXT = 8, 1024  # by default
_GRACE = 5  # seconds in which texts may come to their ends when the server stops


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command until it is interrupted.

    Raises:
        ValueError: the user's mistakes, as many as possible in one error.
    """
    make_server = server_of("serve", _GRACE, problems)
    trained = Trained.of(values, problems)
    model, tokenizer = trained.model, trained.tokenizer
    template = chat_template(values, problems)
    end_tokens = stop_tokens(values, tokenizer, problems)
    begin = begin_token(values, tokenizer, trained.stored)
    check_mesh_and_out(values, problems)
    context = _context(values, model, problems)
    problems.check()
    assert model is not None and tokenizer is not None
    _check_cache(values, model, context, problems)
    tell_of_context(values, model, context)
    listener = _listener(values.host, values.port)

    from meshdsl.generation import RowWriter
    from meshdsl.generation.serving import Engine
    from meshdsl.generation.serving.app import Service, application
    from meshdsl.generation.serving.wire import RANKED

    rows, place = values.batch_size or _ROWS, place_of(values)
    shared = values.cache_tokens
    writer = RowWriter(
        model, context=context, rows=rows, place=place, ranked=RANKED, cache_tokens=shared
    )
    writer.load(trained.load(writer.programs.like, writer.programs.places()))
    writer.warm_up()
    name = Path(values.workdir or values.init_from).expanduser().resolve().name
    service = Service(Engine(writer, values.waiting), tokenizer, name, template, end_tokens, begin)
    address = f"http://{_written(values.host)}:{listener.getsockname()[1]}/v1"
    tell(
        f"{name} answers at {address}: {writer.rows} texts at once, of {context:,} tokens each"
        + ("" if shared is None else f", {shared:,} together")
        + f" ({show_bytes(writer.cache_bytes)}); {values.waiting} more may wait. Ctrl-C ends it"
    )
    server = make_server(application(service))
    service.engine.on_error = lambda: setattr(server, "should_exit", True)
    server.run(sockets=[listener])
    if service.engine.error is not None:
        raise service.engine.error
    return 0


def _context(values: flags.FlagValues, model: Model | None, problems: Problems) -> int:
    """Returns the most tokens of a prompt and its text; checks that the model has room for them."""
    from meshdsl.generation.reading import check_writes

    if model is None or isinstance(values.length, Mistake):
        return 0
    with problems.caught("--model"):
        check_writes(model)
    problems.check()
    assert model.decoding is not None
    most = model.decoding.max_length
    if not values["length"].present:
        return min(_CONTEXT, most or _CONTEXT)
    if most is not None and values.length > most:
        problems.add(
            f"--length={values.length}: {values.model} has positions for {most:,} tokens; take "
            f"--length={most}"
        )
    return int(values.length)


def _check_cache(values: flags.FlagValues, model: Model, context: int, problems: Problems) -> None:
    """Checks that the texts' common cache has room for the longest of them."""
    from meshdsl.generation.paging import PAGE, PageTable

    if values.cache_tokens is not None:
        assert model.decoding is not None
        pages, rows = -(-values.cache_tokens // PAGE), values.batch_size or _ROWS
        with problems.caught(f"--cache_tokens={values.cache_tokens} --length={context}"):
            PageTable(pages, rows, context, model.decoding.window)
        problems.check()


def _listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; warns if others than this machine reach it.

    Raises:
        ValueError: the address is no address of this machine, or is taken.
    """
    listener = listening(host, port, f"--host={host} --port={port}")
    if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
        tell(
            f"meshdsl serve: warning: --host={host}: every machine that reaches this one can use "
            "the model; there are no passwords",
            error=True,
        )
    return listener


def _written(host: str) -> str:
    """Returns a host as addresses of HTTP have it."""
    return f"[{host}]" if ":" in host else host
