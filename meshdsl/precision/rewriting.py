"""Rewriting: a function whose products are computed as rules of precision say.

The function is traced as a graph, and its operations are emitted again, products in another form.
So what differentiates the result sees the products as they are computed. The parameters' paths are
followed from the arguments into loops, branches and checkpoints, through operations that only move
or cast a parameter, and through arithmetic with numbers that have no path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import jax

from meshdsl.ops.control.body import is_array, traced_call
from meshdsl.ops.elementwise.arithmetic import cast
from meshdsl.ops.operation import at_once, reported_as
from meshdsl.ops.products.quantized import EightBits, Groups, quantized_einsum
from meshdsl.precision.rules import Precision, Rule
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation
from meshdsl.tracing.source import user_definition
from meshdsl.tracing.trace import Trace, bind, current, located, tracing

P = ParamSpec("P")
R = TypeVar("R")

# How users call products. `md.einsum` of looked-up matrices is a grouped product.
_PRODUCTS = {
    "einsum": "einsum",
    "grouped_einsum": "einsum",
    "convolve": "conv",
    "attention": "attention",
}
_IN_8_BITS = ("einsum", "grouped_einsum")
_LISTED = 3
_Paths = dict[Tensor, str]


def with_precision(
    function: Callable[P, R],
    precision: Precision | str | None,
    names: Sequence[str] | None = None,
) -> Callable[P, R]:
    """Returns `function` with products in other dtypes, by rules as `md.Precision` reads them.

        loss = md.with_precision(loss, "mlp:fp8,attention:bf16")

    Only `md.einsum` and `md.grouped_einsum` are computed in 8 bits. `fp8` and `int8` do not change
    convolutions and `md.attention`; reports name those that a rule does not change. No rule changes
    einsums that sum over no dim, or functions with a gradient of their own (`md.custom_gradient`).

    Args:
        names: what the paths of the arguments begin with. None: the names of the parameters.

    Raises:
        ValueError: the rules are malformed; or, when called: a rule applies to no product (nearest
            names shown), or changes none of those; equally long rules disagree about one; or
            `names` are not as many as the positional arguments.

    Examples:
        >>> def layer(mlp, x):
        ...     return md.einsum(x, mlp, over="embed")
        >>> mlp, x = md.named([1024.0, 0.0], ["embed"]), md.named([1.00390625, 1.0], ["embed"])
        >>> print(layer(mlp, x), md.with_precision(layer, "mlp:bf16")(mlp, x))
        f32[] 1028. f32[] 1024.
    """
    rules = Precision.of(precision)
    if not rules.rules:
        return function

    @at_once
    @functools.wraps(function)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        paths = _argument_paths(function, names, args, kwargs)
        graph, operands, tree = traced_call(function, args, kwargs)
        rewriting = _Rewriting(rules)
        known = dict(zip(graph.inputs[len(operands) - len(paths) :], paths, strict=True))
        outputs = rewriting.emit(graph, operands, known)
        with located(user_definition(function)), reported_as("with_precision"):
            rewriting.check()
        rewriting.note()
        return jax.tree.unflatten(tree, outputs)

    return rewritten


def _argument_paths(
    function: Callable, names: Sequence[str] | None, args: tuple, kwargs: dict[str, Any]
) -> list[str]:
    """Returns the paths of the tensors among the arguments, in the order of `(args, kwargs)`."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_array)
    # The numbers of the leaves stand for them: one tensor may be two arguments.
    numbered_args, numbered_kwargs = jax.tree.unflatten(tree, range(len(leaves)))
    if names is None:
        named = _by_parameter(function, numbered_args, numbered_kwargs)
    elif len(names) != len(args):
        with reported_as("with_precision"):
            raise ValueError(
                f"names={[*names]} are {len(names)}, but the call has {len(args)} positional "
                "arguments"
            )
    else:
        named = {**dict(zip(names, numbered_args, strict=True)), **numbered_kwargs}
    path_by_number = {
        number: path_of(keys) for keys, number in jax.tree_util.tree_flatten_with_path(named)[0]
    }
    return [path_by_number[i] for i, leaf in enumerate(leaves) if is_array(leaf)]


def _by_parameter(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, by the names of its parameters."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it has no signature, or the call itself will fail
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return dict(bound.arguments)


@dataclass
class _Rewriting:
    """One call.

    Attributes:
        products: the paths of each product of the function.
        changed: the paths of the products that each rule changes.
        unchanged: of those that it applies to, but cannot change: they have no form in 8 bits.
    """

    precision: Precision
    products: list[Sequence[str]] = field(default_factory=list)
    changed: dict[Rule, dict[str, None]] = field(default_factory=dict)
    unchanged: dict[Rule, dict[str, None]] = field(default_factory=dict)

    def emit(self, graph: Graph, inputs: Sequence[Tensor], paths: _Paths) -> list[Tensor]:
        """Emits a graph into the current trace, and returns its outputs.

        Args:
            paths: the paths of inputs of the graph; those of other tensors are added.
        """
        trace = current()
        values = dict(zip(graph.inputs, map(trace.own, inputs), strict=True))
        for op in graph.operations:
            arguments = [values[t] for t in op.inputs]
            with located(op.source):
                outputs = self._operation(op, arguments, paths)
            values.update(zip(op.outputs, outputs, strict=True))
            if (path := _path_through(op, paths)) is not None:
                paths[op.outputs[0]] = path
        return [values[t] for t in graph.outputs]

    def _operation(
        self, op: Operation, arguments: Sequence[Tensor], paths: _Paths
    ) -> Sequence[Tensor]:
        if op.bodies and op.name in _BODIES:
            bodies = {
                name: self._body(body, _BODIES[op.name](op, body, paths))
                for name, body in op.params.items()
                if isinstance(body, Graph)
            }
            return bind(op.primitive, arguments, {**op.params, **bodies}).outputs
        rule = self._rule(op, paths)
        if rule is not None and rule.eight_bits is not None and op.name in _IN_8_BITS:
            return [_in_8_bits(op, arguments, rule.eight_bits)]
        if rule is not None and rule.dtype is not None:
            before = op.inputs[0].dtype
            inputs = [cast(t, rule.dtype) if t.dtype == before else t for t in arguments]
            results = bind(op.primitive, inputs, op.params).outputs
            return [cast(z, t.dtype) for z, t in zip(results, op.outputs, strict=True)]
        return bind(op.primitive, arguments, op.params).outputs

    def _body(self, body: Graph, paths: _Paths) -> Graph:
        trace = Trace(current())
        with tracing(trace):
            inputs = [trace.input(t.shape, t.dtype, t.source) for t in body.inputs]
            graph, captured = trace.finish(self.emit(body, inputs, paths))
        assert not captured, "a body has all that it reads as inputs"
        return graph

    def _rule(self, op: Operation, paths: _Paths) -> Rule | None:
        """Returns the rule for an operation, or None."""
        if op.name not in _PRODUCTS or not is_float(op.inputs[0].dtype) or _sums_nothing(op):
            return None
        word = _PRODUCTS[op.name]
        own = [f"{paths[t]}/{word}" for t in op.inputs if t in paths and is_float(t.dtype)]
        own.sort(key=lambda path: -path.count("/"))  # a parameter's path comes before that of `x`
        own = own or [word]
        self.products.append(own)
        with reported_as("with_precision"):
            rule = self.precision.rule_for(own)
        if rule is not None:
            changes = rule.eight_bits is None or op.name in _IN_8_BITS
            of_kind = self.changed if changes else self.unchanged
            of_kind.setdefault(rule, {})[own[0]] = None
        return rule

    def check(self) -> None:
        """Raises ValueError if a rule applies to no product, or can change none of its products."""
        paths = [path for own in self.products for path in own]
        known = dict.fromkeys([*(part for path in paths for part in path.split("/")), *paths])
        problems = []
        for rule in self.precision.rules:
            if not any(Precision((rule,)).rule_for(own) for own in self.products):
                problems.append(f"`{rule}` applies to no product{did_you_mean(rule.scope, known)}")
            elif rule in self.unchanged and rule not in self.changed:
                dtype = Rule(rule.scope, "bf16")
                problems.append(
                    f"`{rule}` changes nothing: only einsums are computed in 8 bits, and it "
                    f"applies to {_some(self.unchanged[rule])}. Did you mean `{dtype}`?"
                )
        if problems:
            text = "; ".join(problems)
            listed = ", ".join(dict.fromkeys(paths)) or "none"
            raise ValueError(f"{text}{'' if text.endswith('?') else '.'} The products are {listed}")

    def note(self) -> None:
        """Adds a note for each rule that decides about products."""
        for rule in dict.fromkeys([*self.changed, *self.unchanged]):
            changed, unchanged = self.changed.get(rule, {}), self.unchanged.get(rule, {})
            apart = f"; not in 8 bits: {_some(unchanged)}" if unchanged else ""
            current().note(f"precision `{rule}`: {_some(changed)}{apart}")


def _some(paths: Iterable[str]) -> str:
    """Returns the first of some paths, and how many more there are."""
    first, more = [*paths][:_LISTED], len([*paths]) - _LISTED
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _in_8_bits(op: Operation, arguments: Sequence[Tensor], how: EightBits) -> Tensor:
    x, y, *group = arguments
    groups = Groups(op.params["dim"], *group) if group else None
    return quantized_einsum(x, y, op.params["out"], how, groups)


def _sums_nothing(op: Operation) -> bool:
    """Whether it is an einsum that sums over no dim."""
    names = {name for t in op.inputs for name in t.shape.names} - {op.params.get("dim")}
    return op.name in _IN_8_BITS and names <= {*op.outputs[0].shape.names}


def _path_through(op: Operation, paths: _Paths) -> str | None:
    """Returns the path of an operation's result: that of a parameter that it moves or changes."""
    known = [t for t in dict.fromkeys(op.inputs) if t in paths]
    if len(known) != 1 or len(op.outputs) != 1:
        return None
    (tensor,), (result,) = known, op.outputs
    form = op.primitive.form
    if form.moves and form is not Form.ARRANGED and op.inputs[-1] is tensor:
        return paths[tensor]
    changes = form in (Form.ELEMENTWISE, Form.ARRANGED)
    return paths[tensor] if changes and set(result.shape) == set(tensor.shape) else None


def _inside(start: int, end: int | None = None) -> Callable[[Operation, Graph, _Paths], _Paths]:
    """Returns how paths enter a body: from some operands, to its inputs in the same order."""

    def enter(op: Operation, body: Graph, paths: _Paths) -> _Paths:
        rows = zip(op.inputs[start:], body.inputs, strict=False)
        return {inner: paths[outer] for outer, inner in list(rows)[:end] if outer in paths}

    return enter


def _into_scan(op: Operation, body: Graph, paths: _Paths) -> _Paths:
    """Returns the paths in a scan's body: its carries are no parameters."""
    consts, carries = op.params["consts"], op.params["carries"]
    entering = _inside(0)(op, body, paths)
    for carried in body.inputs[consts : consts + carries]:
        entering.pop(carried, None)
    return entering


def _into_while(op: Operation, body: Graph, paths: _Paths) -> _Paths:
    """Returns the paths in a loop's bodies: its carries are no parameters."""
    return _inside(0, op.params["consts"])(op, body, paths)


_BODIES = {
    "scan": _into_scan,
    "while_loop": _into_while,
    "checkpoint": _inside(0),
    "cond": _inside(1),
}
