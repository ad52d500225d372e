"""A Jinja environment for templates that are not trusted: no Python objects, no side effects, bounded work.

Each render has a budget. Every operator, call, filter, test, comparison, loop and output is charged to it by the size
of its operands, before it runs if its result or its time may exceed them. One unit is some tens of nanoseconds or two
bytes. No clock is read, so a template that renders a conversation once always does.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

BUDGET = 1 << 24
"""Units of a render: about a second, or 32 MB of text. `_PER_INPUT` times the weight of its variables is added."""
MAX_SOURCE = 1 << 18
"""Characters of a template. The longest in use have some 20,000."""

_PER_INPUT = 32
_STEP = 32  # the charge of a call
_NODE = 4  # the charge of each node of a body when it runs

_UNSUPPORTED = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr", "filesizeformat")
_FORMATS = {"format", ".format", ".format_map"}
_MULTIPLY = _FORMATS | {"indent", "join", ".join", "replace", ".replace", "tojson"}
"""Filters and methods (".name") whose result may be as large as the product of their operands."""
_SCAN = {"trim", ".strip", ".lstrip", ".rstrip", ".rfind", ".rindex", ".rpartition", ".rsplit"}
"""Filters and methods that may compare each character of their operand with each of another."""
_SORT = {"dictsort", "groupby", "max", "min", "sort", "unique"}
_STRUCTURAL = {
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr", "slice",
}  # fmt: skip
"""Filters that read the items of their operand, but not what is inside these."""
_METHODS = {
    str: {
        "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "join", "lower",
        "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper",
    },
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
    int: set[str](),
    float: {"is_integer"},
}  # fmt: skip
"""The methods of built-in types that templates may call."""
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}


class TooMuchWork(Exception):
    """The budget of a render is spent."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates, and renders each in a copy with its own budget. Lacks `_UNSUPPORTED` filters and lipsum."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)  # also not folded in compilation

    def __init__(self, **functions: Callable[..., Any]) -> None:
        """Make the environment with ``functions``, the global names of the templates."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        del self.globals["lipsum"]
        self.globals.update(functions)
        for name in _UNSUPPORTED:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: _charged(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: _charged(f"is {name}", function) for name, function in tests.items()}
        self._begin()

    def _begin(self) -> None:
        self._left = BUDGET
        self._weights: dict[int, tuple[int, object]] = {}  # containers are kept so that ids stay unique
        self.finalize = self._printed

    def template(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """Return a function that renders the template with variables. Raise what Jinja or Python raise for a wrong
        source.
        """
        if len(source) > MAX_SOURCE:
            raise ValueError(f"{len(source)} characters are more than {MAX_SOURCE}")
        code = self.compile(source)

        def render(variables: Mapping[str, Any]) -> str:
            environment = self.overlay()
            environment._begin()
            environment._left += _PER_INPUT * environment.weight(variables)
            return jinja2.Template.from_code(environment, code, environment.globals).render(variables)

        return render

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Hooks().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    # -- the budget ------------------------------------------------------------------------------------------------

    def charge(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise TooMuchWork(f"it needs more than {BUDGET} units of work")

    def weight(self, value: object) -> int:
        """Return the units of work for reading all of a value. A part that occurs several times counts each time."""
        if isinstance(value, str | bytes):
            return 1 + len(value) // 2
        if isinstance(value, int):
            return 1 + value.bit_length() // 32
        if isinstance(value, range):
            return 1 + len(value)
        if not isinstance(value, Collection):
            return 1
        if known := self._weights.get(id(value)):
            return known[0]
        items: Iterable[object] = value
        total = 1 + sum(map(self.weight, items))
        if isinstance(value, Mapping):
            total += sum(map(self.weight, value.values()))
        if isinstance(value, list | tuple | dict):
            self._weights[id(value)] = total, value
        return total

    @staticmethod
    def size(value: object) -> int:
        """Return the units of work for reading the items of a value, without their contents."""
        return 1 + len(value) if isinstance(value, Collection) else 1

    def counted(self, items: Any) -> Any:
        """Return the same items. Their cost is charged at once, or as an iterator yields them."""
        if isinstance(items, Iterator) and not isinstance(items, LoopContext):
            return self._counted(items)
        self.charge(self.size(items))
        return items

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.charge(_STEP)
            yield item

    # -- what templates do -----------------------------------------------------------------------------------------

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self  # the names that Jinja requires
        if getattr(__obj, "__self__", None) is self:  # a hook
            return __obj(*args)
        self.charge(_STEP)
        if isinstance(__obj, LoopContext):
            return super().call(__context, __obj, *map(self.counted, args))
        if isinstance(__obj, Macro):
            return super().call(__context, __obj, *args, **kwargs)
        given = [value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")]
        operands = [*map(self.listed, args), *given]
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str | list | tuple):
            self._charge_for(f".{__obj.__name__}", [owner, *operands])
        else:
            self.charge(sum(map(self.weight, operands)))
        return self._accounted(super().call(__context, __obj, *operands[: len(args)], **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.charge(_STEP + self.size(left) // 2 + self.size(right) // 2)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            if operator == "**":
                bits = (bits[0] * max(right, 0),) * 2
            self.charge(bits[0] * bits[1] >> 10)
        elif operator == "*":
            for operand, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    self.charge(self.size(operand) * max(count, 0))
        elif operator == "%" and isinstance(left, str):
            self._charge_for("format", [left, right])
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str):
            self.charge(self.weight(argument))
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return super().is_safe_attribute(obj, attr, value) and (allowed is None or attr in allowed)

    def concat(self, pieces: Iterable[str]) -> str:
        kept = []
        for piece in pieces:
            self.charge(self.weight(piece))
            kept.append(piece)
        return "".join(kept)

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.charge(self.weight(value))
        return value

    # -- hooks that `_Hooks` writes into templates -----------------------------------------------------------------

    def joined(self, *values: Any) -> str:
        """Return ``a ~ b``."""
        self.charge(_STEP + sum(map(self.weight, values)))
        return "".join(map(str, values))

    def compared(self, name: str, left: Any, right: Any) -> bool:
        """Return ``a == b``, ``a in b``, …."""
        self._charge_for(f"is {name}", [left, right])
        return _COMPARE[name](left, right)

    def charged(self, value: Any) -> Any:
        """Charge the weight of a value, and return the value."""
        self.charge(self.weight(value))
        return value

    # -- filters, tests and methods --------------------------------------------------------------------------------

    def applied(self, name: str, function: Callable[..., Any], operands: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a filter or a test ("is name") for its operands, the value first."""
        prepare = self.counted if name in _STRUCTURAL else self.listed
        operands[0] = prepare(operands[0])
        self._charge_for(name, [*operands, *kwargs.values()])
        return self._accounted(function(*operands, **kwargs))

    def listed(self, value: Any) -> Any:
        """Return the items of an iterator as a list, which has a known weight."""
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            return list(self.counted(value))
        return value

    def _accounted(self, result: Any) -> Any:
        """Charge a result, at once or as it is iterated, and return it."""
        if isinstance(result, str):
            return self.charged(result)
        return self.counted(result) if isinstance(result, list | Iterator) else result

    def _charge_for(self, name: str, operands: list[Any]) -> None:
        """Charge for a filter, a test ("is name") or a method (".name") of its first operand."""
        value, *others = operands
        numbers = sum(abs(other) for other in others if isinstance(other, int))
        if name in _STRUCTURAL:
            units = numbers if name in ("batch", "slice") else 0
        elif name in ("is in", "is notin"):
            units = self.weight(value) + sum(self.weight(c) for c in others if not isinstance(c, Mapping))
        elif name.startswith("is "):
            units = min(map(self.weight, operands)) if others else 1
        else:
            own, more = self.weight(value), sum(map(self.weight, others)) + numbers
            if name in _FORMATS:
                self.charge(own)
                if not isinstance(value, str) or re.search(r"\*|:[^{}:]*\{", value):
                    raise jinja2.TemplateRuntimeError("a format whose width is a value is not supported")
                more += max(map(int, re.findall(r"\d+", value)), default=0)
            if name in _MULTIPLY:
                units = own * (1 + more)
            elif name in _SCAN:
                units = own * (1 + more // 16)
            elif name == "sum":
                units = own * self.size(value)
            else:
                units = (own + more) ** 2 if name == "round" else own + more
                units *= 16 if name in _SORT else 1
        self.charge(_STEP + units)


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that is charged. As it takes the context, it is not run during compilation."""
    kind = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    def run(context: Context, *operands: Any, **kwargs: Any) -> Any:
        environment = context.environment
        assert isinstance(environment, Sandbox)
        if kind is None:
            return environment.applied(name, function, list(operands), kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": environment}[kind.name]
        return environment.applied(name, partial(function, first), list(operands), kwargs)

    return run


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Replace Jinja's filter of this name, which escapes "<" for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks training targets; a prompt contains only its content."""

    tags = {"generation"}  # noqa: RUF012 (the form that Jinja requires)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Hooks(NodeTransformer):
    """Makes templates call the sandbox where Jinja would run Python code directly."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._visit_body(node)
        node.iter = _call("counted", node.iter)
        return node

    def _visit_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        units = _NODE * sum(1 for child in node.body for _ in child.find_all(nodes.Node))
        hook = _call("charge", nodes.Const(_STEP + units, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(hook, lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        lefts = [node.expr, *(operand.expr for operand in node.ops)]
        links: list[nodes.Expr] = [
            _call("compared", nodes.Const(operand.op, lineno=node.lineno), left, operand.expr)
            for left, operand in zip(lefts, node.ops, strict=False)
        ]
        return reduce(lambda a, b: nodes.And(a, b, lineno=node.lineno), links)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("counted", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call("charged", node.key)  # which Python hashes
        return node


def _call(hook: str, *operands: Any) -> nodes.Call:
    line = operands[0].lineno
    return nodes.Call(nodes.EnvironmentAttribute(hook, lineno=line), list(operands), [], None, None, lineno=line)
