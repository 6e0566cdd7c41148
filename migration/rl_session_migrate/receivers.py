"""Which expressions of a module are which tenant, and which only look like one.

Evidence, strongest first: how the object is made (``rs.attach``, ``Policy(...)``), how it is annotated, what a
``pyproject.toml`` says, what its name says, and last what is called on it. A name proves nothing where anything
stronger speaks: ``policy: nn.Module``, ``pg = optimizer.param_groups[0]`` and ``gen = torch.Generator()`` are no tenants. Knows
nothing of control flow: a name that is bound to different tenants keeps its own identity and says what else it may be.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import IntEnum

import attrs
import libcst as cst

from rl_session_migrate.outline import Binding, By, Function, Outline
from rl_session_migrate.rules import HELPERS, RULES, Api, Tenant, is_distinctive, rule_of, speaks, tenants_of
from rl_session_migrate.tree import arguments, callee, code, dotted, is_string, walk

__all__ = ["Evidence", "Identity", "Names", "Receiver", "Receivers", "convention", "telling_names"]


class Evidence(IntEnum):
    """How it is known which tenant an expression is; more is stronger."""

    METHOD = 1
    """By what is called on it: only a tenant has such a method."""
    NAME = 2
    CONFIG = 3
    ANNOTATION = 4
    CONSTRUCTOR = 5


@attrs.frozen
class Identity:
    """One object, as far as names tell: the same identity means the same object between two rebindings.

    Attributes:
        home: The qualified name of the function that binds the root name, or the class for ``self.x``; "" is the module.
        path: The expression that names it: ``policy``, ``self._trainer``.
    """

    home: str
    path: str

    def __str__(self) -> str:
        return self.path


@attrs.frozen(eq=False)
class Receiver:
    """A tenant, as an expression names it.

    Attributes:
        tenant: Which kind of tenant.
        identity: Which object.
        evidence: How that is known.
        node: The expression.
        api: Whose object it is, where that is known.
        may_be: Other identities that the name may stand for at some point.
        is_single: False for an element of a collection: two uses need not be one object.
        is_scopes: Whether the expression is ``scopes(x)``: the tenant is ``x``, spoken to through this library.
        handle_of: The scope-making call whose ``with`` bound the name: ``with policy.logprob_mode() as handle``.
        origin: The call that makes the object, where it is in sight.
    """

    tenant: Tenant
    identity: Identity
    evidence: Evidence
    node: cst.BaseExpression
    api: Api | None = None
    may_be: frozenset[Identity] = frozenset()
    is_single: bool = True
    is_scopes: bool = False
    handle_of: cst.Call | None = None
    origin: cst.Call | None = None

    def __str__(self) -> str:
        return code(self.node)


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen
class Names:
    """Extra names to know, as ``[tool.rl-session.migrate]`` gives them: exact last names of expressions.

    Attributes:
        policies: Names of policies, such as ``"learner"``.
        values: Names of value models.
        engines: Names of generation engines.
        ignore: Names that are no tenant, whatever they look like.
    """

    policies: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    values: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    engines: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    ignore: frozenset[str] = attrs.field(default=frozenset(), converter=_names)

    @property
    def all(self) -> frozenset[str]:
        """All names of tenants."""
        return self.policies | self.values | self.engines

    def tenant_of(self, name: str) -> Tenant | None:
        """The tenant that the configuration gives a name."""
        for names, tenant in (
            (self.policies, Tenant.POLICY),
            (self.values, Tenant.VALUE),
            (self.engines, Tenant.ENGINE),
        ):
            if name in names:
                return tenant
        return None


_CONVENTIONS: tuple[tuple[re.Pattern[str], Tenant], ...] = (
    (re.compile(r"_?weight_synchronizer|_?synchronizer"), Tenant.SYNCHRONIZER),
    (re.compile(r"(?:\w+_)?_?generation|_?(?:inference|generation|rollout|vllm)\w*_policy"), Tenant.ENGINE),
    (re.compile(r"pg|_?gen"), Tenant.ENGINE),
    (re.compile(r"_?(?:\w+_)?policy|_trainer"), Tenant.POLICY),
    (re.compile(r"_?(?:\w+_)?value_model|_?critic(?:_model)?"), Tenant.VALUE),
)
_PLURALS: tuple[tuple[re.Pattern[str], Tenant], ...] = (
    (re.compile(r"(?:\w+_)?(?:policies|teachers|policy_list)(?:_by_\w+)?"), Tenant.POLICY),
    (re.compile(r"(?:\w+_)?(?:value_models|critics)"), Tenant.VALUE),
    (re.compile(r"(?:\w+_)?generations|(?:\w+_)?policy_generations"), Tenant.ENGINE),
)

_CLASSES: Mapping[str, tuple[Tenant, Api | None]] = {
    **dict.fromkeys(("Policy",), (Tenant.POLICY, None)),
    **dict.fromkeys(("TQPolicy", "LegacyPolicy"), (Tenant.POLICY, Api.LEGACY)),
    **dict.fromkeys(("PolicyInterface", "ColocatablePolicyInterface"), (Tenant.POLICY, Api.LEGACY)),
    **dict.fromkeys(("Value",), (Tenant.VALUE, None)),
    **dict.fromkeys(("ValueInterface", "LegacyValue", "TQValue"), (Tenant.VALUE, Api.LEGACY)),
    "ValueModel": (Tenant.VALUE, Api.SCOPED),
    **dict.fromkeys(
        (
            "GenerationInterface",
            "LegacyGeneration",
            "VllmGeneration",
            "SGLangGeneration",
            "MegatronGeneration",
            "TRTLLMGeneration",
            "TrtllmGeneration",
            "TensorRTLLMGeneration",
            "DynamoGeneration",
        ),
        (Tenant.ENGINE, Api.LEGACY),
    ),
    **dict.fromkeys(("InProcessEngine", "VLLMEngine"), (Tenant.ENGINE, Api.SCOPED)),
    "WeightSynchronizer": (Tenant.SYNCHRONIZER, Api.LEGACY),
}
_SHIMS = {"LegacyPolicy": "policy", "LegacyValue": "value", "LegacyGeneration": "engine"}
"""The shim's handles, and the name of the argument that says over what."""
_OURS = ("rl_session", "rl_session_migrate")
_ROOTS = ("nemo_rl", *_OURS)
_OPAQUE = frozenset({"Any", "object", "Self", "T", "Callable"})
_COLLECTIONS = frozenset(
    {"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Iterator", "set", "Collection", "deque"}
)
_MAPPINGS = frozenset({"dict", "Dict", "Mapping", "defaultdict"})
_UNWRAPPED = frozenset({"Optional", "Annotated", "Final", "ClassVar", "Union"})
_MAYBE_ONE = re.compile(r"Policy|Value(?:Model|Interface)?$|Generation|Synchronizer|Protocol")
"""Names of classes that may be those of tenants, though no known ones."""
# What these hold are settings, never the objects themselves.
_SETTINGS = re.compile(r"(?:\w+_)?(?:cfg|config|conf|args|opts|options|settings|params|hparams)")


def telling_names() -> frozenset[str]:
    """Names of which a module must mention one, or there is nothing in it for anybody here.

    What it does not mention it neither imports, annotates nor calls; a name from the configuration tells too.
    """
    moves = {method for (_, method), rule in RULES.items() if rule.is_lifecycle and rule.api is Api.LEGACY}
    telling = {method for _, method in RULES if speaks(method)}
    return frozenset({*_ROOTS, *moves, *telling, *HELPERS, *_CLASSES} - {"Policy", "Value"})


def convention(name: str) -> Tenant | None:
    """The tenant that a name alone suggests."""
    spelled = name.lower() if name.isupper() else name
    return next((tenant for pattern, tenant in _CONVENTIONS if pattern.fullmatch(spelled)), None)


def _plural(name: str) -> Tenant | None:
    """The tenant of which a name alone suggests several."""
    spelled = name.lower() if name.isupper() else name
    return next((tenant for pattern, tenant in _PLURALS if pattern.fullmatch(spelled)), None)


@attrs.frozen(eq=False)
class _Not:
    """The expression is certainly no tenant."""


@attrs.frozen(eq=False)
class _Session:
    """The expression is a session of this library: its methods make tenants."""


@attrs.frozen(eq=False)
class _Many:
    """A collection of tenants."""

    tenant: Tenant
    evidence: Evidence
    api: Api | None = None


_NOT, _SESSION = _Not(), _Session()
_Found = Receiver | _Many | _Not | _Session | None
"""None: nothing is known."""


class Receivers:
    """Answers for one module which expression is which tenant."""

    def __init__(self, outline: Outline, names: Names | None = None) -> None:
        self.outline = outline
        self.names = names or Names()
        self._of_name: dict[tuple[str, str], _Found] = {}
        self._busy: set[tuple[str, str]] = set()
        self._speaks: bool | None = None
        self._call_index: dict[Function, list[tuple[cst.Call, Function]]] | None = None
        self._by_use: dict[Identity, Tenant] | None = None

    @property
    def speaks(self) -> bool:
        """Whether the module is visibly written against the manual API or this library.

        It imports one of them, makes or annotates a tenant, or calls what only a tenant has. In a module that does none
        of this, names such as ``policy`` and methods such as ``train`` are somebody else's.
        """
        if self._speaks is None:
            self._speaks = self._imports_one() or self._calls_one()
        return self._speaks

    def of(self, node: cst.BaseExpression, function: Function) -> Receiver | None:
        """The tenant that an expression names in a function, by everything but the method called on it."""
        self._used()
        found = self._resolve(node, function)
        return found if isinstance(found, Receiver) else None

    def why_unknown(self, node: cst.BaseExpression, method: str, function: Function) -> str:
        """Why nobody is known whose lifecycle ``method`` would be; "" where it is certainly somebody else's.

        To be asked where :meth:`of_call` found nobody.
        """
        if self._is_self(node, function) or dotted(node) in self.outline.imports:
            return ""
        found = self._resolve(node, function)
        if found is None:
            return f"whose method it is cannot be told; nothing makes, annotates or names {code(node)} as a tenant"
        if isinstance(found, _Not) and speaks(method) and not self._is_ignored(node):
            return f"what makes or annotates it is no policy, value model or engine that is known; it is {code(node)}"
        return ""

    def _is_ignored(self, node: cst.BaseExpression) -> bool:
        return (dotted(node) or "").rpartition(".")[2] in self.names.ignore

    def of_call(self, node: cst.BaseExpression, method: str, function: Function) -> Receiver | None:
        """The tenant whose ``method`` an attribute access reaches, or None if it is somebody else's.

        Args:
            node: The expression before the dot.
            method: The name after it.
            function: Where it stands.
        """
        if not tenants_of(method) or self._is_self(node, function):
            return None
        self._used()
        found = self._resolve(node, function)
        if isinstance(found, (_Not, _Session, _Many)):
            return None
        if found is None:
            tenant = is_distinctive(method)
            if tenant is None or not (speaks(method) or self.speaks):
                return None
            return self.by_method(node, tenant, function)
        if rule_of(found.tenant, method) is None:
            return None
        if found.evidence is Evidence.NAME and not self.speaks:
            return None
        return found

    # -- expressions ---------------------------------------------------------------------------------------------

    def _resolve(self, node: cst.BaseExpression, function: Function) -> _Found:  # noqa: C901 - one arm a kind of expression
        match node:
            case cst.Name():
                return self._name(node, function)
            case cst.Attribute():
                return self._attribute(node, function)
            case cst.Call():
                return self._call(node, function)
            case cst.Subscript():
                return self._subscript(node, function)
            case cst.Await():
                return self._resolve(node.expression, function)
            case cst.NamedExpr():
                return self._resolve(node.value, function)
            case cst.IfExp():
                arms = [self._resolve(node.body, function), self._resolve(node.orelse, function)]
                return self._agree(arms, node, function)
            case cst.List() | cst.Tuple() | cst.Set():
                return self._collection([element.value for element in node.elements], function)
            case cst.BooleanOperation():
                return None
            case (
                cst.BaseNumber()
                | cst.BaseString()
                | cst.Lambda()
                | cst.Dict()
                | cst.Comparison()
                | cst.BaseComp()
                | cst.BinaryOperation()
                | cst.UnaryOperation()
            ):
                return _NOT
        return None

    def _agree(self, arms: list[_Found], node: cst.BaseExpression, function: Function) -> _Found:
        tenants = [arm for arm in arms if isinstance(arm, Receiver)]
        if len(tenants) != len(arms) or len({arm.tenant for arm in tenants}) != 1:
            return None
        if len({arm.identity for arm in tenants}) == 1:
            return tenants[0]
        identity = Identity(function.name, code(node))
        may_be = frozenset(arm.identity for arm in tenants)
        return attrs.evolve(tenants[0], node=node, identity=identity, may_be=may_be, is_single=False)

    def _collection(self, elements: Iterable[cst.BaseExpression], function: Function) -> _Found:
        found = [self._resolve(element, function) for element in elements]
        tenants = [item for item in found if isinstance(item, Receiver)]
        if tenants and len(tenants) == len(found) and len({item.tenant for item in tenants}) == 1:
            return _Many(tenants[0].tenant, min(item.evidence for item in tenants), tenants[0].api)
        return _NOT

    def _name(self, node: cst.Name, function: Function) -> _Found:
        if node.value in self.names.ignore:
            return _NOT
        home = function.home_of(node.value)
        if home is None:
            return self._conventional(node, Identity("", node.value))
        key = (home.name, node.value)
        if key not in self._of_name:
            if key in self._busy:  # policy = wrap(policy)
                return None
            self._busy.add(key)
            identity = Identity(home.name, node.value)
            self._of_name[key] = self._bound(node, home.bindings[node.value], identity)
            self._busy.discard(key)
        found = self._of_name[key]
        return attrs.evolve(found, node=node) if isinstance(found, Receiver) else found

    def _attribute(self, node: cst.Attribute, function: Function) -> _Found:
        name = node.attr.value
        if name in self.names.ignore:
            return _NOT
        method = next((f for f in function.chain() if f.owner is not None), None)
        is_own = isinstance(node.value, cst.Name) and method is not None and node.value.value == method.this
        if is_own and method is not None and method.owner is not None:
            owner = method.owner
            identity = Identity(owner.name, f"self.{name}")
            key = (f"class {owner.name}", name)
            if key not in self._of_name:
                if key in self._busy:
                    return None
                self._busy.add(key)
                bound = self._bound(node, owner.attributes.get(name, []), identity)
                if isinstance(bound, Receiver):  # a parameter of __init__ is no name for it anywhere else
                    bound = attrs.evolve(bound, identity=identity)
                self._of_name[key] = bound
                self._busy.discard(key)
            found = self._of_name[key]
            return attrs.evolve(found, node=node) if isinstance(found, Receiver) else found
        path = dotted(node)
        if path is None:
            return None
        owners = path.split(".")[:-1]
        if any(_SETTINGS.fullmatch(part) for part in owners):
            return _NOT
        root = owners[0]
        if root in self.outline.imports and function.home_of(root) is self.outline.body:
            return _NOT if root not in self.names.policies else None
        home = function.home_of(root)
        return self._conventional(node, Identity(home.name if home else "", path))

    def _subscript(self, node: cst.Subscript, function: Function) -> _Found:
        found = self._resolve(node.value, function)
        if isinstance(found, _Many):
            return self._element(node, found, function)
        path = dotted(node.value)
        if path is not None and found is not None:
            return _NOT
        identity = Identity(function.name, code(node))
        key = _key_of(node)
        tenant = convention(key) if path is not None and not _SETTINGS.fullmatch(path.rpartition(".")[2]) else None
        if tenant is not None:
            return Receiver(tenant, identity, Evidence.NAME, node, is_single=False)
        return self._used_as(node, identity, is_single=False)

    def _element(self, node: cst.BaseExpression, many: _Many, function: Function) -> Receiver:
        identity = Identity(function.name, code(node))
        return Receiver(many.tenant, identity, many.evidence, node, many.api, is_single=False)

    def _call(self, node: cst.Call, function: Function) -> _Found:
        name = callee(node)
        positional, _, _ = arguments(node)
        if positional and self.library_name(node.func, function) == "scopes":
            found = self._resolve(positional[0], function)
            if isinstance(found, Receiver):
                return attrs.evolve(found, node=positional[0], is_scopes=True, api=Api.SCOPED)
            return None
        if name == "cast" and len(positional) == 2:
            return self._annotated(positional[0], positional[1], Identity(function.name, code(node)), function)
        made = self._made(node, name, function)
        if made is not None:
            return made
        if name[:1].isupper() and not name.endswith(("Policy", "Value", "ValueModel", "Generation")):
            return _NOT
        root = (dotted(node.func) or "").partition(".")[0]
        if root in ("torch", "nn", "np", "numpy"):
            return _NOT
        return self._used_as(node, Identity(function.name, code(node)), is_single=False)

    def _made(self, node: cst.Call, name: str, function: Function) -> _Found:
        """What a call makes, if it is a known way to make a tenant or a session."""
        identity = Identity(function.name, code(node.func))

        def tenant(kind: Tenant, api: Api | None) -> Receiver:
            return Receiver(kind, identity, Evidence.CONSTRUCTOR, node, api, origin=node)

        if self._is_ours(node.func, function):
            if name == "Session":
                return _SESSION
            if name == "attach":
                return tenant(Tenant.POLICY, Api.SCOPED)
        if isinstance(node.func, cst.Attribute):
            kind = _SESSION_MAKES.get(name)
            if kind is not None and isinstance(self._resolve(node.func.value, function), _Session):
                return tenant(kind, Api.SCOPED)
            if name == "begin_step":
                found = self._resolve(node.func.value, function)
                if isinstance(found, Receiver) and found.tenant in (Tenant.POLICY, Tenant.VALUE):
                    return attrs.evolve(found, node=node, api=Api.SCOPED)
        known = self._class_named(node.func, name, function)
        return (self._behind(node, name, known, function) or tenant(*known)) if isinstance(known, tuple) else known

    def _behind(
        self, node: cst.Call, name: str, known: tuple[Tenant, Api | None], function: Function
    ) -> Receiver | None:
        """The tenant that a handle of the shim is made over: one object under two names."""
        if name not in _SHIMS:
            return None
        positional, keywords, _ = arguments(node)
        given = (
            positional[0] if positional else next((keywords[key] for key in _SHIMS.values() if key in keywords), None)
        )
        found = self._resolve(given, function) if given is not None else None
        if not isinstance(found, Receiver) or not found.is_single or found.tenant is not known[0]:
            return None
        return attrs.evolve(found, node=node, api=known[1], is_scopes=False, handle_of=None, origin=node)

    # -- classes and annotations ----------------------------------------------------------------------------------

    def library_name(self, func: cst.BaseExpression, function: Function) -> str:
        """The name that something of this library has there, whatever it was imported as; "" for everything else."""
        if not self._is_ours(func, function):
            return ""
        path = dotted(func) or ""
        full = self.outline.imports.get(path, path)
        return full.rpartition(".")[2]

    def _is_ours(self, func: cst.BaseExpression, function: Function) -> bool:
        """Whether what is called comes from this library, as far as the imports say."""
        path = dotted(func)
        if path is None:
            return False
        full = self.outline.imports.get(path.partition(".")[0])
        return full is not None and full.partition(".")[0] in _OURS

    def _class_named(
        self, func: cst.BaseExpression, name: str, function: Function
    ) -> tuple[Tenant, Api | None] | _Not | None:
        """Which tenant a class makes, if the class is a known one and not somebody else's of the same name."""
        known = _CLASSES.get(name)
        if known is None:
            return None
        info = self.outline.classes.get(name)
        if info is not None:
            bases = {base.rpartition(".")[2] for base in info.bases}
            legacy = any(speaks(method) for method in info.methods)
            return known if legacy or bases & set(_CLASSES) else _NOT
        path = dotted(func) or ""
        full = self.outline.imports.get(path.partition(".")[0])
        root = full.partition(".")[0] if full else ""
        if root in _OURS and name == "Policy":
            return (Tenant.POLICY, Api.SCOPED)
        if full is not None and root not in (*_ROOTS, ""):
            return _NOT if name in ("Policy", "Value") or not self.speaks else known
        if name in ("Policy", "Value") and full is None and not self.speaks:
            return None
        return known

    def _annotated(
        self, annotation: cst.BaseExpression, node: cst.BaseExpression, identity: Identity, function: Function
    ) -> _Found:
        """What an annotation says: a tenant, many of them, certainly something else, or nothing."""
        text = is_string(annotation)
        if text is not None:
            try:
                annotation = cst.parse_expression(text)
            except cst.ParserSyntaxError:
                return None
        if isinstance(annotation, cst.BinaryOperation):  # X | None
            sides = [self._annotated(side, node, identity, function) for side in (annotation.left, annotation.right)]
            return self._any_of(sides)
        if isinstance(annotation, cst.Subscript):
            return self._annotated_generic(annotation, node, identity, function)
        name = dotted(annotation) or ""
        last = name.rpartition(".")[2]
        if last in _OPAQUE or last in _COLLECTIONS or last in _MAPPINGS or not last:
            return None  # a collection without its elements says nothing of them
        known = self._class_named(annotation, last, function)
        if isinstance(known, tuple):
            return Receiver(known[0], identity, Evidence.ANNOTATION, node, known[1])
        if known is not None:
            return known
        return None if _MAYBE_ONE.search(last) else _NOT

    def _annotated_generic(
        self, annotation: cst.Subscript, node: cst.BaseExpression, identity: Identity, function: Function
    ) -> _Found:
        outer = (dotted(annotation.value) or "").rpartition(".")[2]
        inner = [item.slice.value for item in annotation.slice if isinstance(item.slice, cst.Index)]
        sides = [self._annotated(item, node, identity, function) for item in inner]
        if outer in _UNWRAPPED:
            return self._any_of(sides)
        if outer in _COLLECTIONS or outer in _MAPPINGS:
            tenants = [side for side in sides if isinstance(side, Receiver)]
            return _Many(tenants[0].tenant, Evidence.ANNOTATION, tenants[0].api) if tenants else _NOT
        return None if outer in _OPAQUE or re.search(r"Policy|Generation", outer) else _NOT

    @staticmethod
    def _any_of(sides: list[_Found]) -> _Found:
        """The first side that says something, ``None`` beside it left out."""
        for side in sides:
            if isinstance(side, (Receiver, _Many)):
                return side
        # `None` in a union parses as a name without a known class: it says no. Anything unknown keeps the answer open.
        return None if any(side is None for side in sides) else _NOT

    # -- names ---------------------------------------------------------------------------------------------------

    def _bound(self, node: cst.BaseExpression, bindings: list[Binding], identity: Identity) -> _Found:
        """What a name is, from all its bindings together."""
        found: list[_Found] = []
        for binding in bindings:
            if binding.by is By.ASSIGN and isinstance(binding.value, cst.Name) and binding.value.value == "None":
                continue
            if binding.by is By.OTHER:
                if not isinstance(binding.node, cst.Del):
                    found.append(None)
                continue
            found.append(self._binding(binding, node, identity))
        annotated = [
            f for f in found if isinstance(f, Receiver) and f.evidence is Evidence.ANNOTATION and f.identity == identity
        ]
        tenants = [f for f in found if isinstance(f, Receiver)]
        if tenants and not any(isinstance(f, _Not) for f in found):
            return self._one_of(annotated, tenants, found, node, identity)
        if len(found) == 1 and isinstance(found[0], (_Session, _Many, _Not)):
            return found[0]
        if any(isinstance(f, _Not) for f in found):
            return _NOT
        if any(isinstance(f, _Session) for f in found):
            return _SESSION
        return self._conventional(node, identity)

    def _one_of(
        self,
        annotated: list[Receiver],
        tenants: list[Receiver],
        found: list[_Found],
        node: cst.BaseExpression,
        identity: Identity,
    ) -> _Found:
        if len(found) == 1:  # one binding: an alias of what it names, or the name of what it makes
            only = tenants[0]
            is_alias = only.origin is None or only.identity.path != code(only.origin.func)
            return attrs.evolve(only, node=node) if is_alias else attrs.evolve(only, node=node, identity=identity)
        named = self._conventional(node, identity)
        kinds = {receiver.tenant for receiver in tenants}
        if annotated:
            chosen = annotated[0]
        elif isinstance(named, Receiver) and (named.tenant in kinds or None in found):
            chosen = next((r for r in tenants if r.tenant is named.tenant), named)
        elif len(kinds) == 1:
            chosen = tenants[0]
        else:
            return None
        may_be = frozenset(r.identity for r in tenants if r.origin is None) - {identity}
        apis = {receiver.api for receiver in tenants}
        return attrs.evolve(
            chosen, node=node, identity=identity, may_be=may_be, api=apis.pop() if len(apis) == 1 else None
        )

    def _binding(self, binding: Binding, node: cst.BaseExpression, identity: Identity) -> _Found:
        if binding.annotation is not None:
            found = self._annotated(binding.annotation, node, identity, binding.function)
            if found is not None:
                return found
            if any(isinstance(n, cst.Name) and _MAYBE_ONE.search(n.value) for n in walk(binding.annotation)):
                return None  # a class that may be a tenant's, wherever the object comes from
        match binding.by:
            case By.PARAMETER:
                named = self._conventional(node, identity)
                return named if isinstance(named, (Receiver, _Many)) else self._handed(binding, node, identity)
            case By.ASSIGN if binding.value is not None:
                return self._resolve(binding.value, binding.function)
            case By.ELEMENT if binding.value is not None:
                return self._iterated(binding.value, node, binding.function)
            case By.ENTER if binding.value is not None:
                return self._entered(binding.value, node, binding.function)
            case By.UNPACK:
                return None
            case By.ASSIGN:
                return None  # annotated only
        return _NOT

    def _handed(self, binding: Binding, node: cst.BaseExpression, identity: Identity) -> _Found:
        """What every call in this module hands to a parameter that says nothing of itself."""
        names = [parameter.name for parameter in binding.function.parameters if not parameter.is_keyword_only]
        name = identity.path
        found: list[_Found] = []
        for call, caller in self._calls().get(binding.function, ()):
            positional, keywords, _ = arguments(call)
            index = names.index(name) if name in names else len(positional)
            value = keywords.get(name, positional[index] if index < len(positional) else None)
            found.append(self._resolve(value, caller) if value is not None else None)
        tenants = [item for item in found if isinstance(item, Receiver)]
        if not tenants or len(tenants) != len(found) or len({item.tenant for item in tenants}) != 1:
            return None
        return Receiver(tenants[0].tenant, identity, min(item.evidence for item in tenants), node, tenants[0].api)

    def _calls(self) -> Mapping[Function, list[tuple[cst.Call, Function]]]:
        """The calls of each function of the module, with the functions they stand in."""
        if self._call_index is None:
            self._call_index = defaultdict(list)
            for caller in self.outline.functions.values():
                for node in walk(caller.node, into_functions=False):
                    path = dotted(node.func) if isinstance(node, cst.Call) else None
                    called = self.outline.callable_named(path, caller=caller) if path is not None else None
                    if called is not None and isinstance(node, cst.Call):
                        self._call_index[called].append((node, caller))
        return self._call_index

    def _iterated(self, iterable: cst.BaseExpression, node: cst.BaseExpression, function: Function) -> _Found:
        """An element of what a loop goes over."""
        found = self._resolve(iterable, function)
        if isinstance(found, _Many):
            return self._element(node, found, function)
        if isinstance(iterable, cst.Call):
            name = callee(iterable)
            base = iterable.func.value if isinstance(iterable.func, cst.Attribute) else None
            if name == "values" and base is not None:
                inner = self._resolve(base, function)
                if isinstance(inner, _Many):
                    return self._element(node, inner, function)
            if name in ("reversed", "list", "tuple", "sorted") and iterable.args:
                return self._iterated(iterable.args[0].value, node, function)
            return None
        if isinstance(found, (_Not, Receiver)):
            return _NOT
        last = (dotted(iterable) or "").rpartition(".")[2]
        return _NOT if last in ("param_groups", "parameters") else None

    def _entered(self, context: cst.BaseExpression, node: cst.BaseExpression, function: Function) -> _Found:
        """What ``with context as name`` binds."""
        if isinstance(context, cst.Call) and isinstance(context.func, cst.Attribute):
            method = context.func.attr.value
            inner = self._resolve(context.func.value, function)
            if isinstance(inner, Receiver) and rule_of(inner.tenant, method) is not None:
                return attrs.evolve(inner, node=node, api=Api.SCOPED, handle_of=context, is_scopes=False)
        return self._resolve(context, function)

    def _conventional(self, node: cst.BaseExpression, identity: Identity) -> _Found:
        """What the configuration or the name alone say."""
        last = identity.path.rpartition(".")[2]
        if last in self.names.ignore:
            return _NOT
        configured = self.names.tenant_of(last)
        if configured is not None:
            return Receiver(configured, identity, Evidence.CONFIG, node)
        many = _plural(last)
        if many is not None:
            return _Many(many, Evidence.NAME)
        tenant = convention(last)
        if tenant is None:
            return self._used_as(node, identity)
        return Receiver(tenant, identity, Evidence.NAME, node)

    # -- what is called on it ------------------------------------------------------------------------------------

    def _used_as(self, node: cst.BaseExpression, identity: Identity, *, is_single: bool = True) -> Receiver | None:
        """The tenant that everything called on an object makes it, wherever in the module it is called."""
        tenant = (self._by_use or {}).get(identity)
        return None if tenant is None else Receiver(tenant, identity, Evidence.METHOD, node, is_single=is_single)

    def _used(self) -> None:
        """Look once at what is called on objects of which nothing else is known."""
        if self._by_use is not None:
            return
        self._by_use = {}  # what follows asks for everything else that is known
        called: dict[Identity, set[str]] = defaultdict(set)
        spoken: set[Identity] = set()
        for function in list(self.outline.functions.values()):
            for node in walk(function.node, into_functions=False):
                if (
                    type(node) is cst.Attribute
                    and tenants_of(node.attr.value)
                    and not self._is_self(node.value, function)
                ):
                    self._note_use(node, function, called, spoken)
        found = {identity: self._tenant_of_use(names, identity in spoken) for identity, names in called.items()}
        self._by_use = {identity: tenant for identity, tenant in found.items() if tenant is not None}
        self._of_name.clear()

    def _note_use(
        self, node: cst.Attribute, function: Function, called: dict[Identity, set[str]], spoken: set[Identity]
    ) -> None:
        who = node.value
        if isinstance(who, cst.Call) and who.args and self.library_name(who.func, function) == "scopes":
            who = who.args[0].value
            spoken.add(self._identity(who, function))
        if self._resolve(who, function) is None:
            called[self._identity(who, function)].add(node.attr.value)

    def _tenant_of_use(self, names: set[str], is_spoken: bool) -> Tenant | None:
        """One telling method is enough; otherwise two lifecycle methods that only one kind of tenant has together."""
        able = [tenant for tenant in Tenant if all(rule_of(tenant, name) is not None for name in names)]
        telling = {tenant for name in names if (speaks(name) or self.speaks) and (tenant := is_distinctive(name))}
        if telling:
            both = [tenant for tenant in able if tenant in telling]
            return both[0] if both else telling.pop() if len(telling) == 1 else None
        if is_spoken:  # only tenants are handed to scopes()
            return able[0] if able else None
        moves = [name for name in names if any(_moves(tenant, name) for tenant in tenants_of(name))]
        return able[0] if len(able) == 1 and len(moves) > 1 and self.speaks else None

    def by_method(self, node: cst.BaseExpression, tenant: Tenant, function: Function) -> Receiver:
        """The tenant of an expression of which only the use is known: what is called on it, where it is handed."""
        identity = self._identity(node, function)
        return Receiver(tenant, identity, Evidence.METHOD, node, is_single=isinstance(node, (cst.Name, cst.Attribute)))

    @staticmethod
    def _identity(node: cst.BaseExpression, function: Function) -> Identity:
        path = dotted(node)
        if path is None:
            return Identity(function.name, code(node))
        root, _, rest = path.partition(".")
        method = next((f for f in function.chain() if f.owner is not None), None)
        if rest and "." not in rest and method is not None and method.owner is not None and root == method.this:
            return Identity(method.owner.name, f"self.{rest}")
        home = function.home_of(root)
        return Identity(home.name if home is not None else "", path)

    @staticmethod
    def _is_self(node: cst.BaseExpression, function: Function) -> bool:
        """Whether it is ``self``, ``cls`` or ``super()``: a facade talking to itself is no use of one."""
        if isinstance(node, cst.Call):
            return callee(node) == "super"
        this = {f.this for f in function.chain() if f.this} | {"self", "cls"}
        return isinstance(node, cst.Name) and node.value in this

    # -- whole modules -------------------------------------------------------------------------------------------

    def _imports_one(self) -> bool:
        return any(full.partition(".")[0] in _ROOTS for full in self.outline.imports.values())

    def _calls_one(self) -> bool:
        for node in walk(self.outline.source.module):
            if isinstance(node, cst.Attribute) and speaks(node.attr.value):
                return True
            if isinstance(node, cst.Call) and callee(node) == "refit_policy_generation":
                return True
        return (
            any(
                (dotted(p.annotation) or "").rpartition(".")[2] in _CLASSES
                and (dotted(p.annotation) or "").rpartition(".")[2] not in ("Policy", "Value")
                for f in self.outline.functions.values()
                for p in f.parameters
                if p.annotation is not None
            )
            or self._prepares_a_named_one()
        )

    def _prepares_a_named_one(self) -> bool:
        """Lifecycle methods whose names exist elsewhere count when the name before the dot is a tenant's too."""
        for node in walk(self.outline.source.module):
            if not isinstance(node, cst.Attribute):
                continue
            last = (dotted(node.value) or "").rpartition(".")[2]
            tenant = self.names.tenant_of(last) or convention(last)
            rule = rule_of(tenant, node.attr.value) if tenant is not None else None
            if rule is not None and rule.is_lifecycle and rule.api is Api.LEGACY:
                return True
        return False


def _moves(tenant: Tenant, method: str) -> bool:
    """Whether a method is one of the manual lifecycle."""
    rule = rule_of(tenant, method)
    return rule is not None and rule.is_lifecycle and rule.api is Api.LEGACY


def _key_of(node: cst.Subscript) -> str:
    """The literal key of ``handles["policy"]``; "" for any other subscript."""
    index = node.slice[0].slice if len(node.slice) == 1 else None
    return (is_string(index.value) or "") if isinstance(index, cst.Index) else ""


_SESSION_MAKES: Mapping[str, Tenant] = {
    "attach": Tenant.POLICY,
    "policy": Tenant.POLICY,
    "attach_value": Tenant.VALUE,
    "value_model": Tenant.VALUE,
    "engine": Tenant.ENGINE,
}
