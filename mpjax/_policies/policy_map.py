"""PolicyMap: a policy for each path, by rules; the first that matches wins."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from mpjax._base.dtypes import describe
from mpjax._base.errors import message, nearest, warn
from mpjax._base.foreign_attributes import MAP_ATTRIBUTES
from mpjax._base.foreign_errors import attribute_error, no_keras_map
from mpjax._base.foreign_keywords import MAP_KEYWORDS
from mpjax._base.keywords import names_keywords
from mpjax._base.public import public
from mpjax._base.quantized_array import is_quantized
from mpjax._base.tree import is_overwritten, leaf_paths
from mpjax._base.typing import DTypeSpec, PyTree
from mpjax._policies import spelling
from mpjax._policies.policy import Policy, get_policy, read_names_with
from mpjax._policies.qwix_rules import qwix_rules
from mpjax._policies.spelling import Path, matches

T = TypeVar("T")


@public
@jax.tree_util.register_static
class PolicyMap(Mapping[str, Policy]):
    """A default policy, and rules from path to policy; the first rule that matches wins.

    A path joins the keys of `jax.tree_util` by '/'. It includes list indices, and not the trailing
    `value` of NNX variables. A rule is a glob or a regular expression. A glob, as 'encoder/*', is
    matched as by `fnmatch` against the whole path: '*' crosses '/', and case matters. It also
    covers everything below a module that it matches. A regular expression stands after 're:' and
    must match the whole path.

    A rule means the same module in a tree of parameters or variables, in a Flax model and under
    autocast: write the module's path as its parameters have it, 'encoder/norm_0'. Flax's 'params/'
    and 'batch_stats/' before it, and the model's class before the path of an operation, may be left
    out; '*/' before a name and '/*' behind it may match nothing, and so may '.*/' and '/.*' of a
    regular expression: 're:encoder/.*' matches 'encoder' too.

    A map is immutable, hashable, a pytree without leaves, as `Policy` is, and a mapping from
    pattern to policy.

    Args:
      default: policy of the paths that no rule matches; whatever `get_policy` takes.
      rules: pattern → policy, in order.

    Raises:
      ValueError: a pattern is empty or no regular expression, or a policy's name is unknown.

    Dtypes:
      Those of its policies; `Policy.cast_to_compute` lists the leaves that are never cast.

    Transforms:
      As `Policy`.

    Example:
      >>> policies = mpjax.PolicyMap("bf16-mixed", {"encoder/norm*": "float32"})
      >>> str(policies.policy_for("encoder/norm_1/scale"))
      'p=f32,c=f32,o=f32'
      >>> str(policies.policy_for("encoder/dense/kernel"))
      'p=f32,c=bf16,o=f32'

    References:
      Keras, `DTypePolicyMap`
    """

    __slots__ = ("_default", "_rules")
    _default: Policy
    _rules: tuple[tuple[str, Policy], ...]

    @names_keywords(MAP_KEYWORDS, "PolicyMap")
    def __init__(
        self,
        default: Any = None,
        rules: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    ) -> None:
        for given in (default, rules):
            if (text := no_keras_map(given, "PolicyMap")) is not None:
                raise TypeError(text)
        if rules == () and isinstance(default, Mapping) and set(default) != {"default", "rules"}:
            raise TypeError(_no_default(default))
        checked = tuple(
            (_check(pattern), _of_rule(pattern, policy)) for pattern, policy in _pairs(rules)
        )
        object.__setattr__(self, "_default", _single(default))
        object.__setattr__(self, "_rules", checked)

    def __getitem__(self, pattern: str) -> Policy:
        """Returns the policy of a rule, by its pattern."""
        for known, policy in self._rules:
            if known == pattern:
                return policy
        got = f"no rule has the pattern {pattern!r}."
        known = f"Patterns: {', '.join(repr(p) for p, _ in self._rules) or 'none'}."
        fix = f"Type policies.policy_for({pattern!r}) for the policy of a path."
        raise KeyError(_Text(message("PolicyMap", got, known, fix)))

    def __iter__(self) -> Iterator[str]:
        """Returns the patterns, in the order in which they are tried."""
        return iter(dict(self._rules))

    def __len__(self) -> int:
        """Returns the number of rules."""
        return len(dict(self._rules))

    def __setitem__(self, pattern: str, policy: Any) -> None:
        """Raises TypeError: a map is immutable."""
        raise TypeError(_immutable(f"got policies[{pattern!r}] = {policy!r}", pattern))

    def __delitem__(self, pattern: str) -> None:
        """Raises TypeError: a map is immutable."""
        raise TypeError(_immutable(f"cannot delete policies[{pattern!r}]", None))

    if not TYPE_CHECKING:  # or an editor would believe that there is any attribute
        __getattr__ = attribute_error(MAP_ATTRIBUTES)

    def __bool__(self) -> bool:
        """Returns True: without rules it is a policy still."""
        return True

    @property
    def default(self) -> Policy:
        """The policy of the paths that no rule matches."""
        return self._default

    @property
    def rules(self) -> tuple[tuple[str, Policy], ...]:
        """The rules, pattern and policy, in the order in which they are tried."""
        return self._rules

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy in it, the default first."""
        return (self._default, *(policy for _, policy in self._rules))

    def policy_for(self, path: Path) -> Policy:
        """Returns the policy of a path such as 'encoder/norm_1/scale', or of its spellings."""
        if not (isinstance(path, str) or _is_texts(path)):
            got = f"must be a text; got {describe(path)}."
            fix = "Type, for example, policies.policy_for('encoder/norm_1/scale')."
            if isinstance(path, tuple):  # of keys of jax.tree_util
                fix = "Type jax.tree_util.keystr(path, simple=True, separator='/')."
            raise TypeError(message("PolicyMap.policy_for(path)", got, fix))
        index = self.deciding(path)
        return self._default if index is None else self._rules[index][1]

    def deciding(self, path: Path) -> int | None:
        """Returns the index of the rule that decides a path; None for the default."""
        matching = (i for i, (pattern, _) in enumerate(self._rules) if matches(pattern, path))
        return next(matching, None)

    def cast_to_param(self, tree: T, *, warn: bool = True) -> T:
        """Returns `tree` with each leaf in the `param_dtype` of its path's policy.

        Args:
          tree: any pytree.
          warn: False if the rules may be for paths of operations instead.

        Warns:
          PolicyWarning: a rule matches no path of `tree` (the message names the nearest), or
            decides nothing because an earlier one matches too.
        """
        return self._cast(tree, "cast_to_param", warn=warn)

    def cast_to_compute(self, tree: T, *, warn: bool = True) -> T:
        """Returns `tree` with each leaf in the `compute_dtype` of its path's policy.

        Args:
          tree: any pytree.
          warn: False for a part of the tree that the rules are for.

        Warns:
          PolicyWarning: a rule matches no path of `tree` (the message names the nearest), or
            decides nothing because an earlier one matches too.
        """
        return self._cast(tree, "cast_to_compute", warn=warn)

    def cast_to_output(self, tree: T) -> T:
        """Returns `tree` with each leaf in the `output_dtype` of its path's policy.

        Outputs have paths of their own, so a rule without a match is normal here and gives no
        warning.
        """
        return self._cast(tree, "cast_to_output", warn=False)

    def with_output_dtype(self, output_dtype: DTypeSpec) -> "PolicyMap":
        """Returns this map with another `output_dtype` in each of its policies."""
        rules = [(pattern, p.with_output_dtype(output_dtype)) for pattern, p in self._rules]
        return PolicyMap(self._default.with_output_dtype(output_dtype), rules)

    def unmatched(self, tree: PyTree) -> list[str]:
        """Returns the patterns that match no path of `tree`."""
        return self.unmatched_paths(leaf_paths(tree))

    def unmatched_paths(self, paths: Iterable[Path]) -> list[str]:
        """Returns the patterns that match none of `paths`."""
        paths = list(paths)
        return [
            pattern
            for pattern, _ in self._rules
            if not any(matches(pattern, path) for path in paths)
        ]

    def warn_unused(self, paths: Iterable[Path], where: str = "PolicyMap") -> None:
        """Warns of each rule that decides none of `paths`: no match, or an earlier rule has it."""
        paths = list(paths)
        if not paths:
            return
        for index, (pattern, _) in enumerate(self._rules):
            rule = f"rule {index + 1} of {len(self._rules)}, {pattern!r},"
            deciding = [self.deciding(path) for path in paths if matches(pattern, path)]
            text = None if deciding else _unmatched_text(where, rule, pattern, paths)
            if deciding and index not in deciding:
                text = self._hidden_text(where, rule, index, deciding)
            if text is not None:
                warn(text)

    def _hidden_text(
        self, where: str, rule: str, index: int, deciding: list[int | None]
    ) -> str | None:
        """Returns the warning of a rule that earlier ones hide, None if their policy is its own."""
        pattern, chosen = self._rules[index]
        earlier = sorted({i for i in deciding if i is not None})
        if all(self._rules[i][1] == chosen for i in earlier):
            return None
        first = earlier[0]
        got = f"{rule} decides nothing: rule {first + 1}, {self._rules[first][0]!r}, comes first."
        fix = f"Put {pattern!r} before it, or drop it."
        return message(where, got, "The first rule that matches wins.", fix)

    def to_dict(self) -> dict[str, Any]:
        """Returns the map as names that JSON or YAML can hold; `from_dict` reads them."""
        rules = [[pattern, str(policy)] for pattern, policy in self._rules]
        return {"default": str(self._default), "rules": rules}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "PolicyMap":
        """Returns the map that `to_dict` gave `config` for."""
        if set(config) != {"default", "rules"}:
            got = f"got the keys {sorted(config)}."
            raise ValueError(message("PolicyMap.from_dict", got, "Allowed: default, rules."))
        return cls(config["default"], config["rules"])

    def to_qwix_rules(self) -> list[Any]:
        """Returns the map as rules of qwix, one `qwix.QtRule` a rule and one for the default.

        qwix matches paths of modules, so a rule for a parameter becomes a rule for its module. qwix
        has one dtype for the gradients of both products, so a recipe with two gets none. qwix has
        no amax histories.

        Raises:
          ImportError: qwix is not installed.
        """
        return qwix_rules(self._default, self._rules)

    def _cast(self, tree: T, method: str, *, warn: bool) -> T:
        paths = leaf_paths(tree)
        if warn:
            self.warn_unused(paths)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)
        if len(leaves) < len(paths):  # an array in 8 bits is two
            paths = leaf_paths(jax.tree_util.tree_unflatten(treedef, [0] * len(leaves)))
        cast = [
            leaf if is_overwritten(path) else getattr(self.policy_for(name), method)(leaf)
            for name, (path, leaf) in zip(paths, leaves, strict=True)
        ]
        return jax.tree_util.tree_unflatten(treedef, cast)

    def __repr__(self) -> str:
        rules = ", ".join(f"{pattern!r}: {policy.name!r}" for pattern, policy in self._rules)
        return f"PolicyMap({self._default.name!r}, {{{rules}}})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PolicyMap):
            return NotImplemented
        return (self._default, self._rules) == (other._default, other._rules)

    def __hash__(self) -> int:
        return hash((PolicyMap, self._default, self._rules))

    def __setattr__(self, name: str, value: object) -> None:
        fix = "Make another: mpjax.PolicyMap(default, rules)."
        raise AttributeError(message("PolicyMap", f"is immutable; got {name} = {value!r}.", fix))

    def __delattr__(self, name: str) -> None:
        raise AttributeError(message("PolicyMap", f"is immutable; cannot delete {name}."))

    def __reduce__(self) -> tuple[type["PolicyMap"], tuple[Any, ...]]:
        return PolicyMap, (self._default, self._rules)


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    pairs = list(rules.items() if isinstance(rules, Mapping) else _iterated(rules))
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(_no_rules(pair))
    return [(pattern, policy) for pattern, policy in pairs]


def _iterated(rules: Any) -> Iterable[Any]:
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise TypeError(_no_rules(rules))
    return rules


def _no_rules(got: object) -> str:
    allowed = "Allowed: a mapping from pattern to policy, or a sequence of such pairs."
    fix = "Type, for example, PolicyMap('bf16-mixed', {'encoder/norm*': 'float32'})."
    return message("PolicyMap(rules)", f"got {got!r}.", allowed, fix)


class _Text(str):
    """A text whose `repr` is itself: KeyError shows the `repr` of its argument."""

    __repr__ = str.__str__


def _no_default(rules: Mapping[Any, Any]) -> str:
    got = "got rules, and no default policy before them."
    allowed = "Allowed: PolicyMap(default, rules); the default is of what no rule matches."
    shown = {key: getattr(value, "name", value) for key, value in rules.items()}
    return message("PolicyMap", got, allowed, f"Type PolicyMap('bf16-mixed', {shown!r}).")


def _immutable(got: str, pattern: str | None) -> str:
    new = "rules" if pattern is None else f"{{{pattern!r}: policy, **policies}}"
    fix = f"Make another: PolicyMap(policies.default, {new})."
    return message("PolicyMap", f"is immutable; {got}.", fix)


def _single(policy: Any) -> Policy:
    policy = get_policy(policy)
    if isinstance(policy, Policy):
        return policy
    got = f"got a {type(policy).__name__} as a policy."
    fix = "Put its rules into this map; the first match wins."
    raise TypeError(message("PolicyMap", got, "Allowed: a Policy or a name of one.", fix))


def _of_rule(pattern: Any, policy: Any) -> Policy:
    if policy is not None:
        return _single(policy)
    got = f"rule {pattern!r} has no policy; got None."
    fix = "Type '32-true' to keep what it matches in float32, or drop the rule."
    raise ValueError(message("PolicyMap(rules)", got, "Allowed: whatever get_policy takes.", fix))


def _is_texts(path: object) -> bool:
    return isinstance(path, tuple) and all(isinstance(text, str) for text in path)


def _check(pattern: object) -> str:
    if not isinstance(pattern, str) or pattern in ("", "re:"):
        fix = "E.g. 'encoder/norm*', or 're:.*/head/.*'."
        raise ValueError(message("PolicyMap", f"got {pattern!r} as a path pattern.", fix))
    try:
        spelling.check(pattern)
    except re.error as error:
        got = f"{pattern!r} is no regular expression: {error}."
        fix = "Escape it with re.escape, or write a glob without 're:'."
        raise ValueError(message("PolicyMap", got, fix)) from None
    return pattern


def _unmatched_text(where: str, rule: str, pattern: str, paths: list[Path]) -> str:
    got = f"{rule} matches none of the {len(paths)} paths."
    if spelling.looks_like_regex(pattern):
        fix = f"Type {f're:{pattern}'!r}: without re: it is a glob, in which only * ? [ mean more."
        return message(where, got, "It has the signs of a regular expression.", fix)
    shorter = spelling.shorter(pattern, paths)
    if shorter is not None:
        fix = f"Type {shorter[0]!r}: the module's path alone means the same everywhere."
        return message(where, got, f"No path here has the part {shorter[1]!r} in that place.", fix)
    texts = [spelling.shown(path) for path in paths]
    texts = [text for text in texts if text]  # the model itself has none
    close = nearest(pattern.removeprefix("re:").replace("*", ""), texts) or texts[:3]
    near = f"Nearest: {', '.join(map(repr, close))} (case matters)."
    return message(where, got, near, "Write a pattern that matches one, or drop the rule.")


def _read(spec: Any) -> Any:
    """Returns the map that a config is of; None where it is of none."""
    is_config = isinstance(spec, Mapping) and set(spec) == {"default", "rules"}
    return PolicyMap.from_dict(spec) if is_config else None


read_names_with(_read)
