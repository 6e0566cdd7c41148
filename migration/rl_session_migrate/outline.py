"""The outline of a module: its functions, classes, imports, and everything that binds a name.

A binding says where a name gets its value from, not what the value is; that is for
:mod:`rl_session_migrate.receivers`. Knows nothing of tenants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum, auto

import attrs
import libcst as cst

from rl_session_migrate.tree import Source, children, code, dotted, walk

__all__ = ["Binding", "By", "ClassInfo", "Function", "Outline", "Parameter", "outline"]


class By(Enum):
    """What kind of statement binds a name."""

    PARAMETER = auto()
    ASSIGN = auto()
    UNPACK = auto()
    """One element of what the value unpacks to; ``index`` says which, None where that is not known."""
    ELEMENT = auto()
    """An element of an iterable: a ``for`` loop or a comprehension."""
    ENTER = auto()
    """``with value as name``."""
    IMPORT = auto()
    DEFINITION = auto()
    """A function or class of that name."""
    OTHER = auto()
    """Deleted, caught, matched, augmented: the value cannot be told."""


@attrs.frozen(eq=False)
class Binding:
    """One way a name gets a value.

    Attributes:
        by: The kind of statement.
        value: The expression it comes from, where there is one.
        function: The function the statement is in (for ``self.x``, the method).
        node: The binding statement or parameter.
        annotation: The annotation beside it.
        index: Which element of ``value``, for UNPACK.
    """

    by: By
    value: cst.BaseExpression | None
    function: Function
    node: cst.CSTNode
    annotation: cst.BaseExpression | None = None
    index: int | None = None


@attrs.frozen(eq=False)
class Parameter:
    """One parameter of a function."""

    name: str
    node: cst.Param
    annotation: cst.BaseExpression | None
    is_keyword_only: bool


@attrs.define(eq=False)
class ClassInfo:
    """A class: what it derives from, what it defines, and what its methods put on ``self``."""

    name: str
    node: cst.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, Function] = attrs.field(factory=dict)
    attributes: dict[str, list[Binding]] = attrs.field(factory=lambda: defaultdict(list))


@attrs.define(eq=False)
class Function:
    """A function, a lambda, or (with an empty name) the module's own body.

    Attributes:
        name: Its qualified name.
        node: Its definition.
        parent: The function it is defined in; the module's body for top-level functions and methods.
        owner: The class whose method it is.
        parameters: Its parameters, in order, without ``self``.
        this: The name of its first parameter if it is a method: ``self``.
        bindings: Every binding of each name in it.
        foreign: Names declared ``global`` or ``nonlocal``.
        outermost: Those declared ``global``.
        is_async: ``async def``.
        is_generator: Whether it yields.
    """

    name: str
    node: cst.FunctionDef | cst.Lambda | cst.Module
    parent: Function | None
    owner: ClassInfo | None
    parameters: tuple[Parameter, ...] = ()
    this: str = ""
    bindings: dict[str, list[Binding]] = attrs.field(factory=lambda: defaultdict(list))
    foreign: set[str] = attrs.field(factory=set)
    outermost: set[str] = attrs.field(factory=set)
    is_async: bool = False
    is_generator: bool = False

    @property
    def is_module(self) -> bool:
        """Whether this is the module's own body."""
        return isinstance(self.node, cst.Module)

    @property
    def simple_name(self) -> str:
        """Its name without its owners."""
        return self.name.rpartition(".")[2]

    def chain(self) -> Iterator[Function]:
        """This function and those it is nested in, innermost first; the module's body comes last."""
        here: Function | None = self
        while here is not None:
            yield here
            here = here.parent

    def home_of(self, name: str) -> Function | None:
        """The function in whose scope a name of this function lives, or None if nothing here binds it."""
        for function in self.chain():
            if name in function.bindings and name not in function.foreign:
                return function
        return None


@attrs.frozen(eq=False)
class Outline:
    """What a module defines.

    Attributes:
        source: The module.
        functions: Every function and lambda by node; the module's own body by the module node.
        classes: Every class by its (last) simple name.
        imports: Local name to the dotted name it stands for.
    """

    source: Source
    functions: dict[cst.CSTNode, Function]
    classes: dict[str, ClassInfo]
    imports: dict[str, str]

    @property
    def body(self) -> Function:
        """The module's own body."""
        return self.functions[self.source.module]

    def callable_named(self, name: str, *, caller: Function) -> Function | None:
        """The one function of this module that a call of ``name`` from ``caller`` reaches, if that can be told."""
        first, _, rest = name.partition(".")
        if rest and "." not in rest and caller.owner is not None and first == caller.this:
            return caller.owner.methods.get(rest)
        if rest:
            return None
        home = caller.home_of(first)
        bindings = home.bindings[first] if home is not None else []
        nodes = {binding.node for binding in bindings if binding.by is By.DEFINITION}
        if len(nodes) == 1 and all(binding.by is By.DEFINITION for binding in bindings):
            return self.functions.get(nodes.pop())
        return None


def outline(source: Source) -> Outline:
    """Make the outline of a module."""
    builder = _Builder(source)
    body = Function("", source.module, None, None)
    builder.functions[source.module] = body
    for statement in source.module.body:
        builder.visit(statement, body, None)
    return Outline(source, builder.functions, builder.classes, builder.imports)


class _Builder:
    """One pass over the tree, carrying the function and class it is in."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.functions: dict[cst.CSTNode, Function] = {}
        self.classes: dict[str, ClassInfo] = {}
        self.imports: dict[str, str] = {}

    def visit(  # noqa: C901, PLR0912 - one arm a kind of statement
        self, node: cst.CSTNode, function: Function, owner: ClassInfo | None
    ) -> None:
        """Look at a node; ``owner`` is set directly in a class body."""
        match node:
            case cst.FunctionDef():
                self._function(node, function, owner)
                return
            case cst.ClassDef():
                self._class(node, function)
                return
            case cst.Lambda():
                self._lambda(node, function)
                return
            case cst.Import() | cst.ImportFrom():
                self._import(node, function)
                return
            case cst.Assign():
                for target in node.targets:
                    self._target(target.target, node.value, function, node)
            case cst.AnnAssign():
                self._bind(node.target, By.ASSIGN, node.value, function, node, annotation=node.annotation.annotation)
            case cst.NamedExpr():
                self._bind(node.target, By.ASSIGN, node.value, function, node)
            case cst.AugAssign():
                self._bind(node.target, By.OTHER, None, function, node)
            case cst.For():
                self._target(node.target, node.iter, function, node, by=By.ELEMENT)
            case cst.CompFor():
                self._target(node.target, node.iter, function, node, by=By.ELEMENT)
            case cst.WithItem():
                if node.asname is not None:
                    self._bind(node.asname.name, By.ENTER, node.item, function, node)
            case cst.ExceptHandler() | cst.ExceptStarHandler():
                if node.name is not None:
                    self._bind(node.name.name, By.OTHER, None, function, node)
            case cst.Del():
                for deleted in walk(node.target):
                    if isinstance(deleted, cst.Name):
                        self._bind(deleted, By.OTHER, None, function, node)
            case cst.MatchAs() | cst.MatchStar():
                if node.name is not None:
                    self._bind(node.name, By.OTHER, None, function, node)
            case cst.Global() | cst.Nonlocal():
                names = {item.name.value for item in node.names}
                function.foreign |= names
                if isinstance(node, cst.Global):
                    function.outermost |= names
            case cst.Yield():
                function.is_generator = True
        for child in children(node):
            self.visit(
                child,
                function,
                owner if isinstance(node, (cst.SimpleStatementLine, cst.If, cst.IndentedBlock)) else None,
            )

    # -- definitions ---------------------------------------------------------------------------------------------

    def _function(self, node: cst.FunctionDef, function: Function, owner: ClassInfo | None) -> None:
        prefix = owner.name if owner is not None else function.name
        name = f"{prefix}.{node.name.value}" if prefix else node.name.value
        # The names of a class body are no scope for its methods.
        parent = function.parent if owner is not None else function
        inner = Function(name, node, parent, owner, is_async=node.asynchronous is not None)
        self.functions[node] = inner
        if owner is not None:
            owner.methods[node.name.value] = inner
        else:
            self._bind(node.name, By.DEFINITION, None, function, node)
        is_static = any(dotted(decorator.decorator) == "staticmethod" for decorator in node.decorators)
        self._parameters(node.params, inner, is_method=owner is not None and not is_static)
        for decorator in node.decorators:
            self.visit(decorator, function, None)
        self.visit(node.body, inner, None)

    def _lambda(self, node: cst.Lambda, function: Function) -> None:
        name = f"{function.name}.<lambda>" if function.name else "<lambda>"
        inner = Function(name, node, function, None)
        self.functions[node] = inner
        self._parameters(node.params, inner, is_method=False)
        self.visit(node.body, inner, None)

    def _parameters(self, params: cst.Parameters, inner: Function, *, is_method: bool) -> None:
        found: list[Parameter] = []
        positional = [*params.posonly_params, *params.params]
        for param in (*positional, *params.kwonly_params, params.star_arg, params.star_kwarg):
            if not isinstance(param, cst.Param):
                continue
            annotation = param.annotation.annotation if param.annotation is not None else None
            if is_method and positional and param is positional[0]:
                inner.this = param.name.value
                continue
            found.append(Parameter(param.name.value, param, annotation, param in params.kwonly_params))
            by = By.PARAMETER if param is not params.star_arg and param is not params.star_kwarg else By.OTHER
            inner.bindings[param.name.value].append(Binding(by, None, inner, param, annotation))
            if param.default is not None and inner.parent is not None:
                self.visit(param.default, inner.parent, None)
        inner.parameters = tuple(found)

    def _class(self, node: cst.ClassDef, function: Function) -> None:
        bases = tuple(code(argument.value) for argument in node.bases)
        info = ClassInfo(node.name.value, node, bases)
        self.classes[node.name.value] = info
        self._bind(node.name, By.DEFINITION, None, function, node)
        # The class body is a scope of its own: what it binds is reached as `self.x`.
        body = Function(f"{function.name}.{info.name}" if function.name else info.name, node.body, function, None)  # type: ignore[arg-type]
        for statement in node.body.body:
            self.visit(statement, body, info)
        for name, bindings in body.bindings.items():
            if name not in info.methods:
                info.attributes[name].extend(bindings)

    def _import(self, node: cst.Import | cst.ImportFrom, function: Function) -> None:
        if isinstance(node.names, cst.ImportStar):
            return
        prefix = ""
        if isinstance(node, cst.ImportFrom):
            prefix = "." * len(node.relative) + (dotted(node.module) or "" if node.module is not None else "") + "."
        for alias in node.names:
            full = dotted(alias.name) or ""
            local = alias.asname.name if alias.asname is not None else None
            name = local.value if isinstance(local, cst.Name) else full.partition(".")[0]
            is_whole = isinstance(node, cst.Import) and local is None
            self.imports[name] = name if is_whole else f"{prefix}{full}"
            function.bindings[name].append(Binding(By.IMPORT, None, function, node))

    # -- names ---------------------------------------------------------------------------------------------------

    def _target(
        self,
        target: cst.BaseExpression,
        value: cst.BaseExpression,
        function: Function,
        node: cst.CSTNode,
        *,
        by: By = By.ASSIGN,
    ) -> None:
        if not isinstance(target, (cst.Tuple, cst.List)):
            self._bind(target, by, value, function, node)
            return
        values: list[cst.BaseExpression | None] = [None] * len(target.elements)
        if by is By.ASSIGN and isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(values):
            values = [element.value for element in value.elements]
        for index, element in enumerate(target.elements):
            inner = element.value
            known = values[index]
            if known is not None and not isinstance(element, cst.StarredElement):
                self._target(inner, known, function, node)
            elif isinstance(inner, (cst.Tuple, cst.List)):
                for name in walk(inner):
                    if isinstance(name, cst.Name):
                        self._bind(name, By.OTHER, None, function, node)
            else:
                self._bind(inner, By.UNPACK, value, function, node, index=index if by is By.ASSIGN else None)

    def _bind(
        self,
        target: cst.BaseExpression,
        by: By,
        value: cst.BaseExpression | None,
        function: Function,
        node: cst.CSTNode,
        *,
        annotation: cst.BaseExpression | None = None,
        index: int | None = None,
    ) -> None:
        binding = Binding(by, value, function, node, annotation, index)
        if isinstance(target, cst.Name):
            function.bindings[target.value].append(binding)
            home = _declared_home(function, target.value)
            if home is not None:
                home.bindings[target.value].append(binding)
        elif isinstance(target, cst.Attribute) and isinstance(target.value, cst.Name):
            method = next((f for f in function.chain() if f.owner is not None), None)
            if method is not None and method.owner is not None and target.value.value == method.this:
                method.owner.attributes[target.attr.value].append(binding)


def _declared_home(function: Function, name: str) -> Function | None:
    """The outer function, or the module, whose name a function binds by ``global`` or ``nonlocal``."""
    if name not in function.foreign:
        return None
    outer = list(function.chain())[1:]
    if name in function.outermost:
        return outer[-1] if outer else None
    return next((home for home in outer if name in home.bindings and name not in home.foreign), None)
