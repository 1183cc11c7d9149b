"""Live: what `meshdsl explore --live` answers: its page, and plans that were not computed ahead.

Guarantees:
    One plan is computed at a time (`newest`).
    Nothing is computed but what a page may choose: a mesh of the page's devices, a layout, and the
    microbatches and remats that are offered.
    Pages from elsewhere cannot use it. The Host of a request is this machine, so that a foreign
    name that leads here is of no use; and what asks for a plan comes from the page itself, as its
    Origin says. No other page may show this one in a frame.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from meshdsl.cli.exploring.computing import Impossible
from meshdsl.cli.exploring.newest import Newest, Replaced
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.reports.explore.choices import Choice
from meshdsl.reports.explore.packing import Packing

MOST_BYTES = 2**16  # of a request
_FIELDS = {"mesh": str, "layout": str, "microbatches": int, "remat": str}
_LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Offer:
    """What a page may choose, beside layouts.

    Attributes:
        devices: the number of devices of every mesh.
        microbatches, remats: the values of these flags.
    """

    devices: int
    microbatches: Sequence[int]
    remats: Sequence[str]

    def read(self, mesh: str, layout: str, microbatches: int, remat: str) -> Choice:
        """Returns a choice.

        Raises:
            ValueError: the mesh or the layout cannot be read, or it is not offered.
        """
        parsed = Mesh.parse(mesh)
        if parsed.size != self.devices:
            raise ValueError(
                f"the mesh `{mesh}` has {parsed.size:,} devices, and all plans of this page have "
                f"{self.devices:,}; start `meshdsl explore` with the other mesh"
            )
        layout = str(Layout.parse(layout))
        if microbatches not in self.microbatches:
            known = ", ".join(map(str, self.microbatches))
            raise ValueError(f"microbatches are {known} on this page, not {microbatches}")
        if remat not in self.remats:
            known = ", ".join(one or "the model's" for one in self.remats)
            raise ValueError(f"remat is {known} on this page, not {remat}")
        return Choice(str(parsed), layout, microbatches, remat)


def application(
    page: str, offer: Offer, compute: Callable[[Choice], Mapping[str, Any] | Impossible]
) -> Starlette:
    """Returns the application: the page at `/`, and plans at `/plan`.

    A plan is asked for by the JSON of `mesh`, `layout`, `microbatches` and `remat`. The answer is
    the document that `reports.explore.packing` writes for the page, with this plan alone.

    Args:
        compute: returns the values of a choice, or why there are none. It is called on one thread.
    """

    def answer(choice: Choice) -> Response:
        result = compute(choice)
        return _document(choice, result)

    newest = Newest(answer)

    async def show(http: Request) -> Response:
        return _foreign(http) or HTMLResponse(page, headers=_HEADERS)

    async def plan(http: Request) -> Response:
        if (refusal := _foreign(http, asks=True)) is not None:
            return refusal
        if (fields := _fields(await _body(http))) is None:
            return _refusal(400, f"not the JSON of {', '.join(_FIELDS)}, or too much of it")
        try:
            choice = offer.read(**fields)
        except ValueError as error:
            return _document(Choice(**fields), Impossible(str(error)))
        try:
            return await asyncio.wrap_future(newest.ask(choice))
        except Replaced:
            return _refusal(409, "another plan was asked for meanwhile")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        newest.close()

    routes = [Route("/", show), Route("/plan", plan, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


def _document(choice: Choice, result: Mapping[str, Any] | Impossible) -> Response:
    packing = Packing({})
    if isinstance(result, Impossible):
        packing.refuse(choice, result.reason)
    else:
        packing.add(choice, result)
    return JSONResponse(packing.document(), headers=_HEADERS)


def _refusal(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status, headers=_HEADERS)


def _foreign(http: Request, asks: bool = False) -> Response | None:
    """Returns the refusal of a request that is not of this process's own page; else None.

    Args:
        asks: whether it asks for a plan. Browsers say with that from which page it comes.
    """
    hosts, origins = http.headers.getlist("host"), http.headers.getlist("origin")
    if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0]):
        return _refusal(403, "the page is at localhost only; forward its port to see it elsewhere")
    own = [f"http://{hosts[0]}".lower()]
    if asks and [one.lower() for one in origins] != own:
        return _refusal(403, "plans are computed for the page of this process only")
    return None


async def _body(http: Request) -> bytes:
    """Returns the body of a request, or more than `MOST_BYTES` of a longer one."""
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > MOST_BYTES:
            break
    return bytes(body)


def _fields(body: bytes) -> dict[str, Any] | None:
    """Returns the fields of a request; None if they are not those of a choice."""
    if len(body) > MOST_BYTES:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS.keys():
        return None
    right = all(type(fields[name]) is kind for name, kind in _FIELDS.items())
    return fields if right else None
