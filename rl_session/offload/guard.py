"""A typed, actionable error for touching what is away, instead of a crash.

A plain tensor whose bytes are away changes its ``__class__`` to a subclass whose ``__torch_function__`` raises for
everything but metadata; identity, ``isinstance`` and weak references hold. Hooks on the module, its compiled wrapper and
the optimizer catch what happens without touching a tensor in Python, and name the better remedy. Backward through a graph
made before is caught on the outputs of the guarded forwards.

Not caught: a view the user made before the move and we never saw (the engine warns about it); a graph made of a weight
without its module (``F.linear(x, model.head.weight)``); and C entry points that never ask ``__torch_function__`` of an
argument: ``torch.tensor(away)``, ``other.set_(away)``, ``other.data = away``, ``torch.utils.dlpack.to_dlpack``,
``torch.vmap``. Knows nothing of how bytes move.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, cast

import attrs
import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from rl_session.errors import OffloadedAccessError
from rl_session.offload.inventory import reachable_tensors
from rl_session.offload.tensors import AWAY_TYPES, library_access, plain_tensors

__all__ = ["AwayNote", "Explain", "Guard", "describe_away", "hide", "hide_all", "note_with", "reveal", "reveal_all"]


Explain = Callable[[], tuple[str, tuple[str, ...]]]
"""Gives the label of the policy, and facts for messages."""


@attrs.define(eq=False)
class AwayNote:
    """What an error about an away tensor can say.

    Attributes:
        name: The tensor's name, such as ``layers.0.weight``.
        component: Its component.
        where: "on the host", or "freed".
        explain: Gives the label of the policy and facts such as who moved it last.
    """

    name: str
    component: str
    where: str
    explain: Explain


class Books(Protocol):
    """Knows what is away, and why."""

    def note_of(self, key: int) -> AwayNote | None:
        """What to say of a tensor over the storage of that identity; None where nothing is known of it."""
        ...


_NOTES: dict[int, tuple[weakref.ref[Tensor], AwayNote]] = {}
"""Notes of single tensors that are away, by ``id``; an entry goes when the tensor comes back or dies."""
_BOOKS: weakref.WeakSet[Books] = weakref.WeakSet()
"""Who is asked about the others: a note for each would cost more than all the rest of a small tensor's move."""
_AWAY_CLASSES: dict[type[Tensor], type[Tensor]] = {}


def _descriptor(name: str) -> Any:
    return getattr(torch.Tensor, name)


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


_METADATA: frozenset[Any] = frozenset(
    _getters(
        *("shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "itemsize"),
        *("nbytes", "_version", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
        *("name", "names", "output_nr", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_base"),
        *("is_xpu", "is_mps", "is_sparse_csr", "is_vulkan", "is_ipu", "is_hpu", "is_xla", "is_mtia", "is_maia"),
        *("grad_dtype", "_grad", "_grad_fn", "_python_dispatch", "_has_symbolic_sizes_strides"),
    )
    | {_descriptor("grad").__set__, _descriptor("grad").__delete__, _descriptor("requires_grad").__set__}
    | {
        getattr(torch.Tensor, name)
        for name in (
            *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "__len__"),
            *(
                "is_contiguous",
                "is_floating_point",
                "is_complex",
                "is_signed",
                "get_device",
                "is_inference",
                "__hash__",
            ),
            *("untyped_storage", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "is_pinned"),
            *("is_shared", "retain_grad", "_is_view", "dim_order", "has_names", "is_same_size"),
        )
        if hasattr(torch.Tensor, name)
    }
    | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_same_size}
)


def _away_torch_function(
    cls: type[Tensor], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    del cls, types
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    return _refuse_touch(func, (args, kwargs))


class _TouchedWhileCompilingError(OffloadedAccessError, AssertionError):
    """Dynamo lets assertions of what it traces through, and replaces other errors by one of its own."""

    def __reduce__(self) -> Any:
        return OffloadedAccessError, self.args


_TouchedWhileCompilingError.__name__ = _TouchedWhileCompilingError.__qualname__ = "OffloadedAccessError"
_TouchedWhileCompilingError.__module__ = "rl_session"


def _refuse_touch(func: Any, operands: Any) -> NoReturn:
    note = None
    for _, tensor in reachable_tensors(operands, ""):
        note = describe_away(tensor)
        if note is not None:
            break
    name = _name_of(func)
    kind = OffloadedAccessError if CompileContext.try_get() is None else _TouchedWhileCompilingError
    if note is None:
        raise kind(f"{name} touched a tensor whose bytes are away", (), _DEFAULT_REMEDY)
    label, facts = note.explain()
    raise kind(
        f"{label}: {name} touched {note.name} ({note.component}), whose bytes are {note.where}", facts, _DEFAULT_REMEDY
    )


_DEFAULT_REMEDY = "with policy.logprob_mode(): ...   (or policy.state_dict(), to read weights wherever they are)"


def _name_of(func: Any) -> str:
    owner: Any = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__") and hasattr(owner, "__name__"):
        return f"Tensor.{owner.__name__}"
    name = getattr(func, "__name__", repr(func))
    return f"{name}()" if not name.startswith("__") else name


_NOT_INTERCEPTED = ("as_subclass", "set_")
"""Methods of a tensor that never ask ``__torch_function__``."""


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse_touch(getattr(Tensor, name), (args, kwargs))

    return refuse


def _away_class(cls: type[Tensor]) -> type[Tensor]:
    away = _AWAY_CLASSES.get(cls)
    if away is None:
        body = {
            "__torch_function__": classmethod(_away_torch_function),
            "__module__": "rl_session",
            "__doc__": f"A {cls.__name__} whose bytes are away; everything but metadata raises OffloadedAccessError.",
        }
        body.update((name, _refusing(name)) for name in _NOT_INTERCEPTED)
        away = type(f"Away{cls.__name__}", (cls,), body)
        _AWAY_CLASSES[cls] = away
        AWAY_TYPES.add(away)
    return away


def hide(tensor: Tensor, note: AwayNote | None = None) -> None:
    """Make every touch of ``tensor`` but metadata raise. Idempotent.

    Args:
        tensor: The tensor.
        note: What the error says; without it, what the books say of its storage (:func:`note_with`).
    """
    hide_all((tensor,))
    if note is not None:
        key = id(tensor)
        _NOTES[key] = (weakref.ref(tensor, lambda _: _NOTES.pop(key, None)), note)


def hide_all(tensors: Iterable[Tensor]) -> None:
    """:func:`hide` many, without a note."""
    away_of = _AWAY_CLASSES
    for tensor in tensors:
        kind = type(tensor)
        if kind not in AWAY_TYPES:
            tensor.__class__ = away_of.get(kind) or _away_class(kind)


def reveal(tensor: Tensor) -> None:
    """Undo :func:`hide`."""
    reveal_all((tensor,))


def reveal_all(tensors: Iterable[Tensor]) -> None:
    """:func:`reveal` many."""
    for tensor in tensors:
        kind = type(tensor)
        if kind in AWAY_TYPES:
            tensor.__class__ = kind.__base__  # type: ignore[assignment]
            if _NOTES:
                _NOTES.pop(id(tensor), None)


def note_with(books: Books) -> None:
    """Ask ``books``, as long as they exist, what to say of tensors that were hidden without a note."""
    _BOOKS.add(books)


def describe_away(tensor: Tensor) -> AwayNote | None:
    """The note of a tensor whose bytes are away, or None when they are where they should be."""
    if type(tensor) not in AWAY_TYPES:
        return None
    entry = _NOTES.get(id(tensor))
    if entry is not None:
        return entry[1]
    with library_access():
        keys = [inner.untyped_storage()._cdata for inner in plain_tensors(tensor)]
    notes = (books.note_of(key) for books in list(_BOOKS) for key in keys)
    return next((note for note in notes if note is not None), None)


def _outputs(output: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of a forward's result, in sequences, mappings (Hugging Face outputs are) and attributes of objects."""
    if isinstance(output, Tensor):
        yield output
    elif depth:
        if isinstance(output, Mapping):
            inner: Iterable[Any] = output.values()
        else:
            inner = output if isinstance(output, tuple | list) else getattr(output, "__dict__", {}).values()
        for value in inner:
            yield from _outputs(value, depth - 1)


@attrs.define(eq=False)
class Guard:
    """Hooks on a policy's module, compiled wrapper and optimizer.

    Attributes:
        away: Gives the components that are away now, of those the argument names.
        explain: Gives the label of the policy and facts for messages.
        on_load: Called after a ``load_state_dict`` of module or optimizer.
        on_step: Called after every optimizer step.
        on_before_step: Called before every optimizer step; a subclass that calls ``super().step()`` makes two, one in the other.
        on_forward: Called before every forward.
        on_train_forward: Called before every forward in train mode, which may write buffers (a batch norm's statistics
            change without a version counter telling).
    """

    away: Callable[[Iterable[str]], list[str]]
    explain: Explain
    on_load: Callable[[], None]
    on_step: Callable[[], None]
    on_train_forward: Callable[[], None] = lambda: None
    on_before_step: Callable[[], None] = lambda: None
    on_forward: Callable[[], None] = lambda: None
    paused: int = 0
    _is_in_forward: bool = False
    """Whether a guarded forward is running, whose output stands for those of its submodules."""
    _handles: list[RemovableHandle] = attrs.field(factory=list)
    _first: list[tuple[nn.Module, int]] = attrs.field(factory=list)
    """FSDP2 modules, and the id of the hook that has to run before FSDP's own."""

    def __deepcopy__(self, memo: Any) -> Guard:
        """Hooks are copied with the module that has them; the copy is nobody's, and nothing of it is ever away."""
        return _inert_guard()

    def __reduce__(self) -> Any:
        return _inert_guard, ()

    def install(self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Register every hook; ``modules`` are the module and the wrappers through which it is called."""
        modules = list(modules)
        for module in modules:
            # Ours run first: FSDP gathers in hooks of its own, and from freed storages it would crash.
            before = module.register_forward_pre_hook(self._before_forward, prepend=True)
            self._first.append((module, before.id))
            self._handles += [
                before,
                module.register_forward_hook(self._after_forward, always_call=True, prepend=True),
                module.register_state_dict_pre_hook(self._before_state_dict),
            ]
        # On every submodule: torch wraps what a tensor raises while one is loaded alone in an error of its own, and a
        # backward through a graph that one made alone would crash.
        for module in {id(m): m for root in modules for m in root.modules()}.values():
            if module not in modules and next(module.parameters(), None) is not None:
                self._handles.append(module.register_forward_hook(self._after_forward_alone, prepend=True))
            if module not in modules and isinstance(module, FSDPModule):
                self._guard_block(module)
            self._handles += [
                module.register_load_state_dict_pre_hook(self._before_load),
                module.register_load_state_dict_post_hook(self._after_load),
            ]
        if optimizer is not None:
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(self._before_optimizer_state_dict),
                optimizer.register_load_state_dict_pre_hook(self._before_optimizer_load),
                optimizer.register_load_state_dict_post_hook(self._after_optimizer_load),
            ]

    def _guard_block(self, module: nn.Module) -> None:
        """An FSDP2 module inside the policy's: called alone, it gathers its own parameters."""
        before = module.register_forward_pre_hook(self._before_block, prepend=True)
        self._first.append((module, before.id))
        self._handles += [before, module.register_state_dict_pre_hook(self._before_state_dict)]

    def come_first(self) -> None:
        """Make sure that no forward hook registered since :meth:`install` (``fully_shard`` again) runs before ours."""
        for module, hook in self._first:
            hooks = cast("OrderedDict[int, Callable[..., Any]]", module._forward_pre_hooks)
            if hook in hooks and next(iter(hooks)) != hook:
                hooks.move_to_end(hook, last=False)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the library itself through the hooks."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._first.clear()

    def refuse(self, call: str, needs: Iterable[str], remedy: str) -> None:
        """Raise if any of ``needs`` is away.

        Raises:
            OffloadedAccessError: Some are.
        """
        if self.paused or torch.compiler.is_compiling():  # a compiled wrapper has hooks of its own
            return
        away = self.away(needs)
        if away:
            label, facts = self.explain()
            raise OffloadedAccessError(f"{label}: {call} needs {', '.join(away)}, which are away", facts, remedy)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        del args
        self.refuse("forward()", ("params", "buffers"), "with policy.logprob_mode(): model(...)")
        if torch.compiler.is_compiling():
            return
        self._is_in_forward = True
        self.on_forward()
        if module.training:
            self.on_train_forward()

    def _before_block(self, module: nn.Module, args: Any) -> None:
        del args
        if self._is_in_forward or torch.compiler.is_compiling():
            return
        self.refuse("forward()", ("params", "buffers"), "with policy.logprob_mode(): model(...)")
        self.on_forward()
        if module.training:
            self.on_train_forward()

    def _after_forward_alone(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not self._is_in_forward:
            self._after_forward(module, args, output)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if torch.compiler.is_compiling():
            return
        self._is_in_forward = False
        if not torch.is_grad_enabled():
            return
        for value in _outputs(output):
            if value.requires_grad and value.grad_fn is not None:
                value.register_hook(self._before_backward)

    def _before_backward(self, gradient: Tensor) -> None:
        del gradient
        remedy = "with policy.training_mode(): loss.backward()"
        self.refuse("backward()", ("params", "buffers", "grads"), remedy)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        del module, prefix, keep_vars
        self.refuse("module.state_dict()", ("params", "buffers"), "policy.state_dict()")

    def _before_load(self, *_: Any) -> None:
        self.refuse(
            "module.load_state_dict()", ("params", "buffers"), "with policy.training_mode(): model.load_state_dict(...)"
        )

    def _after_load(self, *_: Any) -> None:
        self.on_load()

    def _before_step(self, *_: Any) -> None:
        remedy = "with policy.training_mode(): optimizer.step()"
        self.refuse("optimizer.step()", ("params", "grads", "optimizer"), remedy)
        self.on_before_step()

    def _after_step(self, *_: Any) -> None:
        self.on_step()

    def _before_optimizer_state_dict(self, *_: Any) -> None:
        self.refuse("optimizer.state_dict()", ("optimizer",), "policy.save_checkpoint(path)")

    def _before_optimizer_load(self, *_: Any) -> None:
        self.refuse("optimizer.load_state_dict()", ("params", "optimizer"), "policy.load_checkpoint(path)")

    def _after_optimizer_load(self, *_: Any) -> None:
        self.on_load()


def _inert_guard() -> Guard:
    return Guard(lambda _: [], lambda: ("policy", ()), lambda: None, lambda: None)
