"""Rolling: equal layers that a function of JAX runs one after the other become one loop.

Python unrolls `for layer in params["layers"]: x = block(layer, x)` into a copy of the block for
each layer. Compile time grows with them, and a pipeline finds no dim to split. Here a jaxpr's
equations are searched for copies that follow each other; they become one `lax.scan`, and the
parameters of the copies its stacks.

Copies are alike if their equations are: primitives, parameters and types, and where each operand
comes from. That is the same equation of the same copy; the same one of the copy before (the loop
carries it); or the outside, which gives all copies one value (a constant of the loop) or each its
own (a stack). Results of copies that are read outside are stacked by the loop.

Invariants:
    The rolled jaxpr computes the same numbers from the same inputs, up to rounding.
    An input that only a loop reads, one for each copy, is part of a stacked input instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.imports.jax.inference import UNREAD, bodies

_PRODUCTS = ("conv_general_dilated", "dot_general")  # what a layer has at least one of
_CALLS = ("closed_call", "core_call", "jit", "pjit")
# Parameters that are made anew at each call, for derivatives, which are not used.
_OPAQUE = (*UNREAD, "bwd", "fwd_jaxpr_thunk", "out_trees")

Alike = Callable[[Sequence[int]], bool]


@dataclass
class Loop:
    """Copies of a block of equations.

    Attributes:
        start: the first equation.
        period: the equations of a copy.
        count: the copies.
        carries: what a copy reads of the one before: the equation in a copy and its result; and
            what the first copy reads instead.
        consts: what all copies read alike.
        stacks: what copies read, each its own.
        operands: of each equation in a copy, where its operands come from: the name of a table
            above and an index; "own", with an equation and a result; or "literal", with a value.
        results: what the loop is to stack: the equation in a copy and its result.
    """

    start: int
    period: int
    count: int
    carries: list[tuple[int, int, Any]] = field(default_factory=list)
    consts: list[Any] = field(default_factory=list)
    stacks: list[tuple[Any, ...]] = field(default_factory=list)
    operands: list[list[tuple[str, Any]]] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first equation after the loop."""
        return self.start + self.period * self.count

    @property
    def carried(self) -> int:
        """How many numbers the loop carries."""
        return sum(int(np.prod(init.aval.shape)) for *_, init in self.carries)


@dataclass(frozen=True)
class Rolled:
    """A jaxpr with loops in place of copies.

    Attributes:
        jaxpr: closed; of the inputs of each group it takes one, their stack, where the first of
            them is among the inputs.
        groups: of each loop, the inputs that are stacked, by their numbers, in the order of copies.
    """

    jaxpr: Any
    groups: tuple[tuple[tuple[int, ...], ...], ...]


def rolled(closed: Any, alike: Alike) -> Rolled | None:
    """Returns a closed jaxpr with loops in place of equal layers; None: there are none.

    Args:
        alike: whether inputs, by their numbers, may be one stack.
    """
    closed = without_calls(closed)
    jaxpr = closed.jaxpr
    inputs = {variable: number for number, variable in enumerate(jaxpr.invars)}

    def fits(loop: Loop) -> bool:
        return all(map(alike, stacks_of_inputs(jaxpr, loop)))

    loops = list(_loops(jaxpr, fits))
    if not loops:
        return None
    reads = Counter(a for e in jaxpr.eqns for a in e.invars if not _is_literal(a))
    reads.update(a for a in jaxpr.outvars if not _is_literal(a))
    groups = []
    for loop in loops:
        places = Counter(v for stack in loop.stacks for v in stack if not _is_literal(v))
        groups.append(
            tuple(
                tuple(inputs[v] for v in stack)
                for stack in loop.stacks
                if all(_variable(v) in inputs for v in stack)
                and all(places[v] == 1 and reads[v] == _uses(loop, stack) for v in stack)
            )
        )
    stacked = {number: group for own in groups for group in own for number in group}
    kept = [n for n in range(len(jaxpr.invars)) if n not in stacked or min(stacked[n]) == n]
    specs = []
    for number in kept:
        aval = jaxpr.invars[number].aval
        sizes = aval.shape if number not in stacked else (len(stacked[number]), *aval.shape)
        specs.append(jax.ShapeDtypeStruct(sizes, aval.dtype))

    def run(*arrays: Any) -> list[Any]:
        values = dict(zip(kept, arrays, strict=True))
        return _evaluated(closed, loops, values, stacked)

    made = jax.make_jaxpr(run)(*specs)
    return Rolled(made, tuple(groups))


def stacks_of_inputs(jaxpr: Any, loop: Loop) -> list[list[int]]:
    """Returns the stacks of a loop that are made of inputs, by their numbers."""
    inputs = {variable: number for number, variable in enumerate(jaxpr.invars)}
    return [
        [inputs[variable] for variable in stack]
        for stack in loop.stacks
        if all(_variable(v) in inputs for v in stack)
    ]


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jex.Literal)


def _uses(loop: Loop, stack: tuple[Any, ...]) -> int:
    """Returns how many operands in a copy are its own element of a stack."""
    number = loop.stacks.index(stack)
    return sum(each == ("stacks", number) for row in loop.operands for each in row)


def without_calls(closed: Any) -> Any:
    """Returns a jaxpr with a call that has most of its equations replaced by these."""
    while True:
        sizes = [_size(equation) for equation in closed.jaxpr.eqns]
        large = [
            number
            for number, (equation, size) in enumerate(zip(closed.jaxpr.eqns, sizes, strict=True))
            if equation.primitive.name in _CALLS and 2 * size > sum(sizes)
        ]
        if not large:
            return closed
        call, before = large[0], closed

        def run(*arrays: Any, call: int = call, before: Any = before) -> list[Any]:
            jaxpr = before.jaxpr
            values = dict(zip(jaxpr.invars, arrays, strict=True))
            values |= dict(zip(jaxpr.constvars, before.consts, strict=True))
            _run(jaxpr.eqns[:call], values)
            equation = jaxpr.eqns[call]
            (body,) = bodies(equation.params)
            body = body if isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ())
            operands = [_value(values, atom) for atom in equation.invars]
            results = jex.jaxpr_as_fun(body)(*operands)
            values |= dict(zip(equation.outvars, results, strict=True))
            _run(jaxpr.eqns[call + 1 :], values)
            return [_value(values, atom) for atom in jaxpr.outvars]

        specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
        closed = jax.make_jaxpr(run)(*specs)


def _size(equation: Any) -> int:
    """Returns the number of equations that an equation has in it, itself included."""
    inner = (getattr(body, "jaxpr", body) for body in bodies(equation.params))
    return 1 + sum(_size(each) for body in inner for each in body.eqns)


# The search.


def _loops(jaxpr: Any, fits: Callable[[Loop], bool]) -> Iterator[Loop]:
    """Yields loops that do not overlap, in order."""
    signs = signs_of(jaxpr)
    loops: list[Loop] = []
    ranges = [(0, len(signs))]
    while ranges:
        first, end = ranges.pop()
        loop = _best(jaxpr, signs, first, end, fits)
        if loop is not None:
            loops.append(loop)
            ranges += [(first, loop.start), (loop.end, end)]
    yield from sorted(loops, key=lambda loop: loop.start)


def _best(
    jaxpr: Any, signs: np.ndarray, first: int, end: int, fits: Callable[[Loop], bool]
) -> Loop | None:
    """Returns the loop between two equations that covers most of them."""
    part = signs[first:end]
    runs = []
    for period in range(1, len(part) // 2 + 1):
        alike = part[:-period] == part[period:]
        if np.count_nonzero(alike) < period:
            continue
        same = np.concatenate([[False], alike, [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop - start >= period:
                count = (stop - start) // period + 1
                runs.append((-count * period, period, first + int(start), int(count), stop - start))
    for _, period, start, count, length in sorted(runs):
        for fewer in range(min(3, count - 1)):
            # A loop may begin anywhere in the run: best where the least has to be carried.
            spare = int(length) - (count - 1) * period + fewer * period
            places = range(start, start + min(spare, 4 * period) + 1)
            tried = (_analysed(jaxpr, at, period, count - fewer) for at in places)
            fit = [loop for loop in tried if loop is not None and fits(loop)]
            if fit:
                return min(fit, key=lambda loop: (loop.carried, len(loop.results), loop.start))
    return None


def signs_of(jaxpr: Any) -> np.ndarray:
    """Returns a number for each equation; those that are alike have the same one."""
    numbers: dict[Any, int] = {}
    known: dict[int, Any] = {}
    signs = [numbers.setdefault(_sign(e, known), len(numbers)) for e in jaxpr.eqns]
    return np.array(signs, np.int64)


def _sign(equation: Any, known: dict[int, Any]) -> tuple[Any, ...]:
    def shown(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(map(shown, value))
        if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
            if id(value) not in known:
                known[id(value)] = str(value), tuple(_constants(value))
            return known[id(value)]
        return repr(value)

    params = [(k, shown(v)) for k, v in sorted(equation.params.items()) if k not in _OPAQUE]
    types = [(a.aval.shape, a.aval.dtype) for a in equation.invars]
    results = [(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    return equation.primitive.name, tuple(params), tuple(types), tuple(results)


def _constants(body: Any) -> Iterator[Any]:
    """Yields what the text of a body does not show: its constants, at any depth."""
    if isinstance(body, jex.ClosedJaxpr):
        yield from map(id, body.consts)
        body = body.jaxpr
    for equation in body.eqns:
        yield from (_bytes(atom) for atom in equation.invars if _is_literal(atom))
        for inner in bodies(equation.params):
            yield from _constants(inner)


def _bytes(literal: Any) -> bytes:
    return np.asarray(literal.val, literal.aval.dtype).tobytes()


def _analysed(jaxpr: Any, start: int, period: int, count: int) -> Loop | None:
    """Returns the loop of copies that begin at an equation, if they are alike."""
    loop = Loop(start, period, count)
    if count < 2 or loop.end > len(jaxpr.eqns):
        return None
    if read_elsewhere(jaxpr, loop) is not None:
        return None
    makers = _makers(jaxpr, loop)
    own = [jaxpr.eqns[start + number] for number in range(period)]
    # What layers have: the stream that goes through all of them, parameters, and products.
    if not (loop.carries and loop.stacks and any(map(has_product, own))):
        return None
    for at, slot, init in loop.carries:
        made = own[at].outvars[slot].aval
        if (made.shape, made.dtype) != (init.aval.shape, init.aval.dtype):
            return None
    carried = {(at, slot) for at, slot, _ in loop.carries}
    after = [a for equation in jaxpr.eqns[loop.end :] for a in equation.invars]
    for atom in map(_variable, [*after, *jaxpr.outvars]):
        if atom not in makers:
            continue
        copy, at, slot = makers[atom]
        if (copy < count - 1 or (at, slot) not in carried) and (at, slot) not in loop.results:
            loop.results.append((at, slot))
    return loop


def read_elsewhere(jaxpr: Any, loop: Loop) -> int | None:
    """Fills in where the operands of copies come from.

    Returns:
        The first equation in a copy whose operands come from places that are not alike; None: all
        are alike.
    """
    makers = _makers(jaxpr, loop)
    for number in range(loop.period):
        copies = [
            jaxpr.eqns[loop.start + copy * loop.period + number] for copy in range(loop.count)
        ]
        row = []
        for atoms in zip(*(each.invars for each in copies), strict=True):
            operand = _operand(loop, atoms, [makers.get(a) for a in map(_variable, atoms)])
            if operand is None:
                return number
            row.append(operand)
        loop.operands.append(row)
    return None


def _makers(jaxpr: Any, loop: Loop) -> dict[Any, tuple[int, int, int]]:
    """Returns the copy, the equation in it and the result that each variable of copies is."""
    return {
        variable: (*divmod(number, loop.period), slot)
        for number, equation in enumerate(jaxpr.eqns[loop.start : loop.end])
        for slot, variable in enumerate(equation.outvars)
    }


def _variable(atom: Any) -> Any:
    return None if _is_literal(atom) else atom


def _operand(loop: Loop, atoms: tuple[Any, ...], makers: list[Any]) -> tuple[str, Any] | None:
    """Returns where an operand comes from; None: not from places that are alike."""

    def numbered(table: list[Any], entry: Any) -> int:
        if entry not in table:
            table.append(entry)
        return table.index(entry)

    if all(map(_is_literal, atoms)):
        if len(set(map(_bytes, atoms))) == 1:
            return "literal", atoms[0]
        loop.stacks.append(atoms)
        return "stacks", len(loop.stacks) - 1
    if any(map(_is_literal, atoms[1:])):
        return None
    if all(maker is None for maker in makers):
        if _is_literal(atoms[0]):
            return None
        if all(atom is atoms[0] for atom in atoms):
            return "consts", numbered(loop.consts, atoms[0])
        return "stacks", numbered(loop.stacks, atoms)
    first, *others = makers
    if others and any(maker is None or maker[1:] != others[0][1:] for maker in others):
        return None
    at, slot = others[0][1:]
    lags = [copy - maker[0] for copy, maker in enumerate(others, 1)]
    if first is not None and first == (0, at, slot) and not any(lags):
        return "own", (at, slot)
    if first is None and all(lag == 1 for lag in lags):
        return "carries", numbered(loop.carries, (at, slot, atoms[0]))
    return None


def has_product(equation: Any) -> bool:
    """Whether an equation is a product, or has one in a body."""
    if equation.primitive.name in _PRODUCTS:
        return True
    inner = (getattr(body, "jaxpr", body) for body in bodies(equation.params))
    return any(has_product(each) for body in inner for each in body.eqns)


# The run.


def _value(values: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if _is_literal(atom) else values[atom]


def _run(equations: Sequence[Any], values: dict[Any, Any]) -> None:
    """Evaluates equations, each with the line that it has."""
    for equation in equations:
        operands = [_value(values, atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _applied(equation)(*operands), strict=True))


def _applied(equation: Any) -> Callable[..., Sequence[Any]]:
    """Returns a function from operands to the results of an equation."""
    variables = [
        jex.Var(atom.aval) if _is_literal(atom) or atom in equation.invars[:place] else atom
        for place, atom in enumerate(equation.invars)
    ]
    names = tuple(str(place) for place in range(len(variables)))
    results = tuple(str(place) for place in range(len(equation.outvars)))
    about = jex.DebugInfo("from_jax", equation.primitive.name, names, results)
    only = [equation.replace(invars=variables)]
    body = jex.Jaxpr([], variables, equation.outvars, only, equation.effects, about)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(body, []))


def _evaluated(
    closed: Any,
    loops: Sequence[Loop],
    inputs: Mapping[int, Any],
    stacked: Mapping[int, tuple[int, ...]],
) -> list[Any]:
    """Returns the results of a jaxpr that runs loops in place of copies."""
    jaxpr = closed.jaxpr
    groups = {
        tuple(jaxpr.invars[n] for n in group): inputs[min(group)] for group in stacked.values()
    }
    values = {jaxpr.invars[n]: value for n, value in inputs.items() if n not in stacked}
    values |= dict(zip(jaxpr.constvars, closed.consts, strict=True))
    done = 0
    for loop in loops:
        _run(jaxpr.eqns[done : loop.start], values)
        _run_loop(jaxpr, loop, values, groups)
        done = loop.end
    _run(jaxpr.eqns[done:], values)
    return [_value(values, atom) for atom in jaxpr.outvars]


def _run_loop(
    jaxpr: Any, loop: Loop, values: dict[Any, Any], groups: Mapping[tuple[Any, ...], Any]
) -> None:
    """Runs a loop, and adds what is read of it."""
    block = jaxpr.eqns[loop.start : loop.start + loop.period]

    def stack(atoms: tuple[Any, ...]) -> Any:
        if all(map(_is_literal, atoms)):
            return np.stack([np.asarray(atom.val, atom.aval.dtype) for atom in atoms])
        if atoms in groups:
            return groups[atoms]
        return jnp.stack([values[variable] for variable in atoms])

    consts = [values[variable] for variable in loop.consts]

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        tables = {"carries": carry, "consts": consts, "stacks": slices}
        made: list[Sequence[Any]] = []
        for equation, row in zip(block, loop.operands, strict=True):
            operands = []
            for kind, index in row:
                if kind == "literal":
                    operands.append(index.val)
                elif kind == "own":
                    operands.append(made[index[0]][index[1]])
                else:
                    operands.append(tables[kind][index])
            made.append(_applied(equation)(*operands))
        after = [made[at][slot] for at, slot, _ in loop.carries]
        return after, [made[at][slot] for at, slot in loop.results]

    start = [
        jnp.asarray(init.val, init.aval.dtype) if _is_literal(init) else values[init]
        for *_, init in loop.carries
    ]
    end, ys = lax.scan(body, start, [stack(atoms) for atoms in loop.stacks])
    last = jaxpr.eqns[loop.end - loop.period : loop.end]
    for (at, slot), each in zip(loop.results, ys, strict=True):
        for copy in range(loop.count):
            variable = jaxpr.eqns[loop.start + copy * loop.period + at].outvars[slot]
            values[variable] = each[copy]
    for (at, slot, _), value in zip(loop.carries, end, strict=True):
        values[last[at].outvars[slot]] = value
