"""Linen modules that enter their policy: subclasses whose methods set dtypes by module path.

Flax makes submodules while a method of their parent runs, so that nothing outside can set their
fields beforehand. An interceptor can: Flax calls it with each module and its path before any code
of the module runs, `setup` included. The instances were made for this one call.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax

from mpjax._base.tree import cast_leaf, is_castable
from mpjax._flax.module_dtypes import (
    FIELDS,
    NO_DTYPE,
    OWN,
    ModuleFinding,
    policy_at,
    reason_at,
    same_dtype,
    scalar_type,
    warn_of,
)
from mpjax._policies.parts import default_of
from mpjax._policies.policy import Policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._policies.spelling import in_model

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The arguments that a policied class was made with."""

    policy: Policy | PolicyMap
    override: bool
    model: str  # the name that may stand before the path of its modules in a rule
    prefix: Path = ()  # the module's place in the model that was given the policy


_region: contextvars.ContextVar["_Region | None"] = contextvars.ContextVar("region", default=None)
_journal: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "journal", default=None
)
# Flax's nn.jit knows a module by its class and fields, not by what is set on those inside: to
# JAX's own cache, at least, another policy is another program.
_traced_setting = jax.make_user_context(None)


@contextlib.contextmanager
def journal() -> Generator[dict[str, str]]:
    """Collects, by path, the reason of each module's dtypes, while models run in the block."""
    reasons: dict[str, str] = {}
    token = _journal.set(reasons)
    try:
        yield reasons
    finally:
        _journal.reset(token)


def policied(cls: type[nn.Module], setting: Setting) -> type[nn.Module]:
    """Returns the subclass of a module class that enters `setting` in its methods.

    The same class for equal arguments, so that modules compare equal and nothing is retraced.
    """
    return _subclass(vars(cls).get("mpjax_given_class", cls), setting)


@functools.lru_cache(maxsize=4096)
def _subclass(given: type[nn.Module], setting: Setting) -> type[nn.Module]:
    names = {
        "__module__": given.__module__,
        "__qualname__": given.__qualname__,
        "__doc__": given.__doc__,
        "mpjax_setting": setting,
        "mpjax_given_class": given,
    }
    new: Any = types.new_class(
        given.__name__, (given,), exec_body=lambda space: space.update(names)
    )

    def post_init(self: Any) -> None:
        given.__post_init__(self)
        if self.scope is not None:
            _adopt(self)

    def reduce(self: Any) -> Any:
        if type(self) is not new:  # of nn.remat and its kind, which pickle as they may
            return object.__reduce_ex__(self, 2)
        fields = {f.name: getattr(self, f.name) for f in _fields(self) if f.init}
        return _rebuilt, (given, setting, {**fields, "parent": None})

    # Not in `names`: Flax would wrap them, and name the scope of each operation twice.
    own = {"__post_init__": post_init, "__reduce__": reduce}
    # The given class's own, perhaps written by its author: Flax has made new ones for `new`.
    own |= {"__eq__": given.__eq__, "__hash__": given.__hash__}
    entering = {name: _entering(method, setting) for name, method in _methods(given)}
    applying = ("apply", "init_with_output")
    calls = {name: _with_method_entering(getattr(given, name), setting) for name in applying}
    for name, method in (own | entering | calls).items():
        setattr(new, name, method)
    return new


def _rebuilt(given: type[nn.Module], setting: Setting, fields: dict[str, Any]) -> nn.Module:
    return policied(given, setting)(**fields)


def _fields(module: Any) -> tuple[Any, ...]:
    """Returns the dataclass fields of a module, or of a class of one."""
    return dataclasses.fields(module)


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the methods that a class or its bases define, Flax's own base left out."""
    seen = {f.name for f in _fields(cls)}  # a default may be a function, and is no method
    for base in cls.__mro__:
        if base in nn.Module.__mro__:
            continue
        for name, value in vars(base).items():
            is_public = not name.startswith("__") or name == "__call__"
            if name not in seen and is_public and inspect.isfunction(value):
                seen.add(name)
                yield name, value
            seen.add(name)


def _entering(method: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    @functools.wraps(method)
    def entering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _enter(self, setting, method, args, kwargs)

    return entering


def _with_method_entering(apply: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    """Returns `apply` that enters the policy also for a function given as `method`."""

    @functools.wraps(apply)
    def wrapped(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        given = method

        def entering(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _enter(module, setting, given, args, kwargs)

        is_function = callable(method) and not inspect.ismethod(method)
        return apply(self, *args, method=entering if is_function else method, **kwargs)

    return wrapped


def _enter(
    module: nn.Module, setting: Setting, method: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Returns the result of `method` under the setting, which is entered unless it has been."""
    # Unbound: it has no path yet, and makes no submodules.
    if module.scope is None:
        return method(module, *args, **kwargs)
    region = _region.get()
    if region is not None and region.covers(module, setting):
        return method(module, *args, **kwargs)
    region = _Region(setting, module)
    name = getattr(method, "__name__", "")
    with region.entered():
        out = method(module, *args, **kwargs)
        if name == "__call__" and module.is_initializing() and not setting.prefix:
            region.warn()  # another method may leave a part of the model for later
    if name == "setup":
        _adopt(module)
        return out
    default = default_of(setting.policy)
    return out if setting.prefix else default.cast_to_output(out)


class _Region:
    """The modules at and below one with a policy, while one of its methods runs."""

    def __init__(self, setting: Setting, module: nn.Module) -> None:
        self._setting = setting
        self._base: Path = module.path
        self._class = type(module)
        self._given: dict[Path, dict[str, Any]] = {}
        self._findings: dict[str, ModuleFinding] = {}

    def covers(self, module: nn.Module, setting: Setting) -> bool:
        """Whether a module of that setting stands inside, at the place that the setting means."""
        is_same = (setting.policy, setting.override) == (
            self._setting.policy,
            self._setting.override,
        )
        return is_same and self._place(module) == setting.prefix

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        token = _region.set(self)
        try:
            with nn.intercept_methods(self._intercept), _traced_setting(self._setting):
                yield
        finally:
            _region.reset(token)
        reasons = _journal.get()
        if reasons is not None:
            skipped = len(self._setting.prefix)
            for name, finding in self._findings.items():
                below = tuple(name.split("/"))[skipped:] if name else ()
                reasons.setdefault("/".join((*self._base, *below)), finding.reason)

    def warn(self) -> None:
        warn_of(self._setting.policy, self._findings, "with_policy", model=self._setting.model)

    def _intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if _region.get() is not self:  # a module inside has a policy of its own
            return next_fun(*args, **kwargs)
        self._give(module)
        for child in _children(module, fields_only=True):
            self._give(child)  # before the parent reads anything of them
        out = next_fun(*args, **kwargs)
        if context.method_name == "__call__" and isinstance(module, nn.RNNCellBase):
            out = _with_carry_dtypes(out, args[0] if args else kwargs["carry"])
        self._note_parameters(module)
        return out

    def _place(self, module: nn.Module) -> Path | None:
        """Returns the module's path in the model of the policy, None where it is outside.

        Outside are the copies on which Flax tries out `setup` before a lifted transformation.
        """
        path, depth = module.path, len(self._base)
        return (*self._setting.prefix, *path[depth:]) if path[:depth] == self._base else None

    def _give(self, module: nn.Module) -> None:
        """Sets the fields of one module, unless the model has set them itself."""
        place = self._place(module)
        own: Setting | None = getattr(type(module), "mpjax_setting", None)
        if place is None or (own is not None and not self.covers(module, own)):
            return
        name = "/".join(place)
        spelled = in_model(self._setting.model, name)
        policy = policy_at(self._setting.policy, spelled)
        values = {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}
        fields = {f.name: f for f in _fields(module) if f.name in FIELDS}
        free = {name for name, field in fields.items() if self._is_free(module, field, place)}
        for field in free:
            value = scalar_type(values[field])
            object.__setattr__(module, field, value)
            self._given.setdefault(place, {})[field] = value
        if place != self._setting.prefix or type(module) is self._class:
            decisive = {"dtype"} & fields.keys() or fields.keys()
            reason = reason_at(self._setting.policy, spelled) if decisive & free else OWN
            reason = reason if fields else NO_DTYPE
            finding = ModuleFinding(path=name, class_name=type(module).__name__, reason=reason)
            self._findings.setdefault(name, finding)

    def _is_free(self, module: nn.Module, field: Any, place: Path) -> bool:
        """Whether a field holds its default, or the policy's dtype from here or from further up."""
        have = getattr(module, field.name)
        above = (self._given.get(place[:end], {}) for end in range(len(place) + 1))
        given = [values[field.name] for values in above if field.name in values]
        is_default = field.default is not dataclasses.MISSING and same_dtype(have, field.default)
        return self._setting.override or is_default or any(same_dtype(have, g) for g in given)

    def _note_parameters(self, module: nn.Module) -> None:
        """Notes a user's own module that holds parameters: without a dtype it is out of reach."""
        place = self._place(module)
        finding = None if place is None else self._findings.get("/".join(place))
        if finding is None or finding.reason != NO_DTYPE or not module.is_initializing():
            return
        if type(module).__module__.split(".")[0] == "flax":
            return
        held = module.variables.get("params", {}).values()
        if any(is_castable(x) for x in held if not isinstance(x, Mapping)):
            name = type(module).__name__  # not that of nn.remat's subclass
            complete = dataclasses.replace(finding, class_name=name, has_parameters=True)
            self._findings[finding.path] = complete


def _with_carry_dtypes(out: Any, carry: Any) -> Any:
    """Returns a cell's output with its carry in the dtypes that it came in with.

    A SimpleCell that computes in bfloat16 returns a bfloat16 carry, and a scan over time, as in
    `nn.RNN`, needs the type that it started from: float32, that of the parameters.
    """
    new, y = out

    def keep(a: Any, b: Any) -> Any:
        return cast_leaf(a, b.dtype, move_float64=True) if is_castable(b) else a

    return jax.tree.map(keep, new, carry), y


# -- modules that are reached from outside of a method -----------------------------------------


def _children(module: nn.Module, *, fields_only: bool) -> list[nn.Module]:
    """Returns the submodules in a module's fields, by default with those that `setup` made."""
    names = [f.name for f in _fields(module) if f.name not in ("parent", "name")]
    if not fields_only:
        names = [name for name in vars(module) if not name.startswith("_")]
    held = [vars(module).get(name) for name in names if name not in ("parent", "scope", "name")]
    leaves = jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, nn.Module))
    return [x for x in leaves if isinstance(x, nn.Module) and x.scope is not None]


def _adopt(module: nn.Module) -> None:
    """Makes the submodules enter the policy by themselves, as in `model.bind(variables).encoder`.

    They are the instances that Flax made for this scope, never those that the user holds. Modules
    that a compact method makes do not need it: they are reached only while that method runs.
    """
    setting: Setting = getattr(type(module), "mpjax_setting")  # noqa: B009 - of its subclass
    depth = len(module.path)
    for child in _children(module, fields_only=False):
        if child.path[:depth] == module.path and not hasattr(type(child), "mpjax_setting"):
            prefix = (*setting.prefix, *child.path[depth:])
            inner = policied(type(child), dataclasses.replace(setting, prefix=prefix))
            object.__setattr__(child, "__class__", inner)
            _adopt(child)
