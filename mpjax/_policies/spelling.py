"""Matches a rule's pattern against paths: one pattern serves trees, modules and operations.

A tree of variables calls a module 'params/head', a tree of parameters 'head', and an operation
under autocast 'Net/head', after the class of the model. A path is given here as one text, or as
several that mean the same, the one to show first.
"""

import functools
import re
from collections.abc import Iterable
from fnmatch import translate

Path = str | tuple[str, ...]

REGEX = "re:"
_PARAMS = "params"
_COLLECTIONS = (_PARAMS, "batch_stats")  # Flax's, of variables that a policy casts
_MODEL = re.compile("[A-Z][A-Za-z0-9]*")  # a class; submodules named after theirs have a number
_HAIKU = "~"  # a constructor in the paths of parameters; paths of operations do not have it
_ADDED_BY_JAX = frozenset({"checkpoint", "rematted_computation"})


def shown(path: Path) -> str:
    """Returns the spelling of a path for messages."""
    return path if isinstance(path, str) else path[0]


def in_model(model: str, path: str) -> Path:
    """Returns the spellings of a module's path: with the model's name before it, and without."""
    return path, f"{model}/{path}" if path else model


@functools.lru_cache(maxsize=8192)
def of_operation(scopes: tuple[str, ...]) -> Path:
    """Returns the spellings of an operation's path: its scopes, and its module's path.

    Flax puts the model's class first, and names a method 'embed.attend', or 'Net/Net.encode' if a
    method of the same module calls it; JAX adds scopes such as 'checkpoint'.
    """
    modules: list[str] = []
    for scope in "/".join(scopes).split("/"):
        name, _, method = scope.partition(".") if scope.count(".") == 1 else (scope, "", "")
        is_again = modules[-1:] == [name] and (bool(method) or _MODEL.fullmatch(name))
        if not is_again and scope not in _ADDED_BY_JAX:
            modules.append(name)
    spellings = ["/".join(scopes), "/".join(modules)]
    root = next((i for i, name in enumerate(modules) if _MODEL.fullmatch(name)), None)
    if root is not None and root + 1 < len(modules):
        below = modules[root + 1 :]
        spellings += ["/".join(below), "/".join([*modules[:root], *below])]
    return tuple(dict.fromkeys(spellings))


def matches(pattern: str, path: Path) -> bool:
    """Whether a rule's pattern matches a path, or, for a glob, a module above it."""
    texts = (path,) if isinstance(path, str) else path
    return any(_matches(pattern, text) for text in texts)


@functools.lru_cache(maxsize=65536)
def _matches(pattern: str, text: str) -> bool:
    collection, _, below = text.partition("/")
    in_collection = collection in _COLLECTIONS and bool(below)
    texts = {text, below if in_collection else text}
    texts |= {each.replace(f"/{_HAIKU}/", "/") for each in texts}
    covers = _covers_all if pattern.startswith(REGEX) else _covers
    return any(
        covers(alternative, each)
        for alternative in _alternatives(pattern, bare=not in_collection)
        for each in texts
    )


def _covers(compiled: re.Pattern[str], text: str) -> bool:
    parts = text.split("/")
    return any(compiled.match("/".join(parts[: end + 1])) for end in range(len(parts)))


def _covers_all(compiled: re.Pattern[str], text: str) -> bool:
    return compiled.fullmatch(text) is not None


@functools.lru_cache(maxsize=4096)
def _alternatives(pattern: str, *, bare: bool) -> tuple[re.Pattern[str], ...]:
    """Returns the compiled expressions of a pattern, any of which may match.

    '*/head' and 'head/*' mean the module 'head' too, because only some spellings of its path have
    parts before and after it. A leading 'params/' is dropped for a path that names no collection
    (`bare`).

    Raises:
      re.error: it is no regular expression.
    """
    is_regex = pattern.startswith(REGEX)
    anything = ".*" if is_regex else "*"
    texts = [pattern.removeprefix(REGEX)]
    if bare and texts[0].startswith(f"{_PARAMS}/"):
        texts.append(texts[0].removeprefix(f"{_PARAMS}/"))
    texts += [text.removeprefix(f"{anything}/") for text in texts]
    texts += [text.removesuffix(f"/{anything}") for text in texts]
    if is_regex:  # r"\/.*" and ".*/?" have an edge that is no part of a path
        texts = [t for t in texts if t == texts[0] or not (t[0:1] in "*+?{" or t[-1:] == "\\")]
    unique = dict.fromkeys(text for text in texts if text)
    return tuple(re.compile(text if is_regex else translate(text)) for text in unique)


def module_regex(pattern: str) -> str:
    """Returns a regular expression that matches, in full, the modules of a pattern.

    A pattern that names a parameter, as '*/kernel', gives the parameter's module.
    """
    leaf = re.search(r"/(kernel|embedding|scale|bias|weight|w|b)$", pattern)
    alternatives = [each.pattern for each in _alternatives(pattern, bare=True)]
    if leaf:
        alternatives += [each.pattern for each in _alternatives(pattern[: leaf.start()], bare=True)]
    below = "" if pattern.startswith(REGEX) else "(/.*)?"
    return "|".join(f"({text}){below}" for text in dict.fromkeys(alternatives))


def check(pattern: str) -> None:
    """Raises re.error where a pattern is no regular expression."""
    if pattern.startswith(REGEX):
        re.compile(pattern.removeprefix(REGEX))


_SIGNS = re.compile(r"\.[*+?]|^\^|\$$|\\[a-zA-Z./]|\(.*\)|\||\[[^]]+\][*+?{]|\w\+")


def looks_like_regex(pattern: str) -> bool:
    """Whether a glob has signs of a regular expression, as '.*', and is a valid one."""
    if pattern.startswith(REGEX) or not _SIGNS.search(pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def shorter(pattern: str, paths: Iterable[Path]) -> tuple[str, str] | None:
    """Returns a pattern without the part that keeps it from matching, and that part.

    For example paths of a tree do not start with the model's name, and paths of operations do not
    end with a parameter's.
    """
    first, _, below = pattern.partition("/")
    above, _, last = pattern.rpartition("/")
    is_model = _MODEL.fullmatch(first) is not None
    candidates = [(below, first)] if is_model else []
    for text, part in (*candidates, (above, last)):
        if text and not pattern.startswith(REGEX) and any(matches(text, path) for path in paths):
            return text, part
    return None
