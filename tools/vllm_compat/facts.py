"""Fields, signatures and bodies of classes and functions, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from hashlib import blake2b
from typing import TypedDict

from vllm_compat.watched import WATCHED, Watched


class Method(TypedDict):
    """body: a hash of the statements, without docstring and comments."""

    signature: str
    body: str


class Fact(TypedDict):
    """fields: name → annotation, default or dtype, as it is written. methods: that of a function has its own name."""

    fields: dict[str, str]
    methods: dict[str, Method]


Facts = dict[str, Fact | None]
"""Key of what is watched → its fact; None where a release lacks it."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def facts_of(sources: dict[str, str]) -> Facts:
    """Return the facts of a release. sources: dotted name of a module below vllm → its text."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    return {one.key: _fact(one, trees[one.module]) if one.module in trees else None for one in WATCHED}


def _fact(watched: Watched, tree: ast.Module) -> Fact | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == watched.name:
            return _class(watched, node)
        if isinstance(node, Function) and node.name == watched.name:
            return {"fields": {}, "methods": {node.name: _method(node)}}
    return None


def _class(watched: Watched, node: ast.ClassDef) -> Fact:
    methods = {one.name: one for one in node.body if isinstance(one, Function)}
    kept = watched.methods or methods
    fields = dict(_declared(node)) if watched.methods else {**dict(_declared(node)), **dict(_assigned(methods))}
    return {"fields": fields, "methods": {name: _method(methods[name]) for name in kept if name in methods}}


def _declared(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Return the fields in the body of a class."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            annotation = _text(one.annotation)
            yield one.target.id, annotation if one.value is None else f"{annotation} = {ast.unparse(one.value)}"


def _assigned(methods: dict[str, Function]) -> Iterator[tuple[str, str]]:
    """The attributes that __init__ gives an object, with annotation or dtype if they are written."""
    if "__init__" not in methods:
        return
    for one in ast.walk(methods["__init__"]):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                annotation = _text(one.annotation) if isinstance(one, ast.AnnAssign) else ""
                yield target.attr, annotation or _dtype(one)


def _dtype(node: ast.AST) -> str:
    for one in ast.walk(node):
        if isinstance(one, ast.keyword) and one.arg == "dtype":
            return ast.unparse(one.value)
    return ""


def _text(annotation: ast.expr) -> str:
    """Return an annotation; one in quotes without them."""
    is_quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return str(annotation.value) if is_quoted else ast.unparse(annotation)


def _method(node: Function) -> Method:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    digest = blake2b("\n".join(map(ast.dump, body)).encode(), digest_size=6).hexdigest()
    returns = "" if node.returns is None else f" -> {_text(node.returns)}"
    return {"signature": f"({ast.unparse(node.args)}){returns}", "body": digest}
