"""Hints for misspelled names: keys of a configuration that are wrong where they are, patterns that match nothing.

And for tensors of other shapes than were saved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import isabstract
from itertools import takewhile
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dsq_ckpt.core.wrappers import WRAPPERS, unwrapped

OTHER_SHAPE = (
    "is it the same model? If the module is to size its buffers by what is loaded, load into an empty dict in the "
    "place of its state dict, and give it that by load_state_dict"
)
"""Advice where a tensor was saved with another shape than it has."""
_GROWN = (
    " (a model that has grown loads the rest by dcp.load with a DSQStorageReader and "
    "DefaultLoadPlanner(allow_partial_load=True))"
)
_OLD = 0.25
"""Share of the names below a key that are there, from which on a model may have grown."""
_ANY = "*"
_CLOSE = 0.75  # of parts of names: below it, `linear` would be taken for `layer`
_ELSEWHERE = 0.8  # of keys in other places; one that is right for its place may be less like it
_EXACT = ("exact", "lossless", "uncompressed", "bitforbit")
_METHODS = ("bf16", "quantize")


class _Place(NamedTuple):
    """A key of a configuration: its path, where `*` stands for a name of the user's, and the fits that have it."""

    path: tuple[str, ...]
    fits: tuple[str, ...]

    def near(self, given: Sequence[str]) -> int:
        """Return the number of components in common with a path, from the root on."""
        shared = 0
        for own, other in zip(self.path, given, strict=False):
            if own not in (_ANY, other):
                break
            shared += 1
        return shared

    def named(self, given: Sequence[str]) -> str:
        """Return the dotted path, with the names of `given` where users choose them."""
        shared = self.near(given)
        return ".".join(given[place] if own == _ANY and place < shared else own for place, own in enumerate(self.path))


_EXPECTED = {
    "bool_type": "expected true or false", "tuple_type": "expected a list", "list_type": "expected a list",
    "model_type": "expected keys and their values", "dict_type": "expected keys and their values",
    "model_attributes_type": "expected keys and their values", "string_type": "expected text",
    "int_type": "expected a whole number", "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number", "float_type": "expected a number",
    "float_parsing": "expected a number",
}
"""By pydantic's kinds of errors."""
NOT_REGISTERED = "not_registered"
"""Kind of our own: a name that a registry does not know. Its context has the names that are expected."""
_UNION = ("bool", "constrained-int", "literal['auto']")
"""Names that pydantic gives to the alternatives of a field."""


def explained(
    where: str, error: ValidationError, root: type[BaseModel], codebooks: Mapping[str, type[BaseModel]],
    renamed: Mapping[str, str],
) -> str:
    """Return the description of all errors in a configuration, a line for each key.

    Args:
        where: name of the configuration.
        error: what pydantic found.
        root: the configuration's model.
        codebooks: by the value of `fit`, which pydantic names among the keys.
        renamed: present dotted key by former dotted key.
    """
    problems: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    for issue in error.errors():
        key = ".".join(str(part) for part in issue["loc"] if part not in (*codebooks, *_UNION))
        if issue["type"] == "extra_forbidden":
            fit = next((str(part) for part in issue["loc"] if part in codebooks), None)
            hint = _former_hint(key, renamed) or key_hint(root, key.split("."), codebooks, fit)
            problems[key] = [f"unknown key{hint}"]
        else:
            text, hint = _problem(issue)
            problems.setdefault(key, []).append(text)
            found[key] = f" (found {_short(issue.get('input'))}){hint}"
    lines = [f"  {key or '(root)'}: {', or '.join(texts)}{found.get(key, '')}" for key, texts in problems.items()]
    return f"{where}: {len(lines)} problem(s)\n" + "\n".join(lines)


def _former_hint(key: str, renamed: Mapping[str, str]) -> str:
    """Return the present names of a former key that is given in a wrong place, or besides its present name."""
    if key in renamed:
        return f"; it is the former name of '{renamed[key]}', which is given too: leave out '{key}'"
    leaf = key.rpartition(".")[2]
    present = [f"'{new}'" for former, new in renamed.items() if former.rpartition(".")[2] == leaf]
    return f"; '{leaf}' is the former name of {_either(present)}" if present else ""


def _problem(issue: Any) -> tuple[str, str]:
    """Return the text of an error: what was expected, and what may have been meant."""
    kind, context, given = issue["type"], issue.get("ctx", {}), issue.get("input")
    if kind == "union_tag_invalid":
        expected, given = str(context["expected_tags"]), context["tag"]
    elif kind in ("literal_error", NOT_REGISTERED):
        expected = str(context["expected"])
    else:
        plain = issue["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ")
        return _EXPECTED.get(kind, plain), ""
    close = _like(given, re.findall(r"'([^']*)'", expected), 0.6) if isinstance(given, str) else None
    hint = f"; did you mean '{close}'?" if close is not None else ""
    if kind in ("union_tag_invalid", NOT_REGISTERED):
        hint = hint or "; if it is another package's, import the module that registers it, or give it an entry point"
    field = "fit: " if kind == "union_tag_invalid" else ""
    return f"{field}expected {expected}", hint


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def key_hint(
    root: type[BaseModel], given: Sequence[str], codebooks: Mapping[str, type[BaseModel]], fit: str | None = None
) -> str:
    """Return a hint where an unknown key belongs, or of which key it may be a misspelling.

    Args:
        root: the configuration's model.
        given: path of the unknown key.
        codebooks: by the value of `fit`.
        fit: kind of the codebook that it was found in, if it was in one.

    Returns:
        The end of a message, which begins with a semicolon; empty where nothing comes close.
    """
    parent, leaf = tuple(given[:-1]), given[-1]
    known = list(_places(root, (), dict.fromkeys(codebooks.values())))
    same = [place for place in known if place.path[-1] == leaf]
    if same:
        best = max(same, key=lambda place: place.near(given))
        if len(best.path) == len(given) and best.near(given) == len(given):
            if not best.fits:  # the key is right, and was given with dots
                nested = "..."
                for name in reversed(given):
                    nested = f"{{'{name}': {nested}}}"
                return f"; write it as {nested}"
            return f"; codebooks have it with fit: {_either(best.fits)}"
        if len(best.path) == 1:
            return f"; '{leaf}' belongs at the top level"
        return f"; it belongs elsewhere: '{best.named(given)}'"
    here = [place.path[-1] for place in known if len(place.path) == len(given)
            and place.near(parent) == len(parent) and (fit is None or not place.fits or fit in place.fits)]
    if close := get_close_matches(leaf, sorted(set(here)), 1):
        return f"; did you mean '{close[0]}'?"
    if close := get_close_matches(leaf, sorted({place.path[-1] for place in known}), 1, _ELSEWHERE):
        best = max((place for place in known if place.path[-1] == close[0]), key=lambda place: place.near(given))
        return f"; did you mean '{best.named(given)}'?"
    return ""


def pattern_hint(pattern: str, names: Iterable[str]) -> str:
    """Return a hint of names that are close to a shell pattern which matches none of them.

    Returns:
        The end of a message, which begins with a semicolon; it shows some names where none comes close.
    """
    known = sorted(names)
    if not known:
        return "; there are no tensors"
    literal = max(re.split(r"[*?\[\]]+", pattern), key=len).strip(".")
    width = literal.count(".") + 1
    holders: dict[str, str] = {}
    for name in known:
        parts = name.split(".")
        for start in range(len(parts) - width + 1):
            holders.setdefault(".".join(parts[start : start + width]), name)
    found = [literal] if literal in holders else get_close_matches(literal, holders, 3, _CLOSE)
    close = list(dict.fromkeys(holders[part] for part in found))
    if close:
        return f"; did you mean a pattern for {_either([repr(name) for name in close])}?"
    return f"; names here are such as {', '.join(repr(name) for name in known[:3])}"


def name_hint(name: str, names: Iterable[str]) -> str:
    """Return a hint of names that are close to an unknown one.

    Returns:
        The end of a message, which begins with a semicolon; it shows some names where none comes close.
    """
    known = sorted(names)
    tail = [other for other in known if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")]
    if close := tail[:3] or get_close_matches(name, known, 3, _CLOSE):
        return f"; did you mean {_either([repr(other) for other in close])}?"
    more = f" and {len(known) - 5} more" if len(known) > 5 else ""
    return f"; there are {', '.join(repr(other) for other in known[:5])}{more}" if known else "; it is empty"


def missing_hint(missing: Sequence[str], asked: Collection[str], names: Collection[str]) -> str:
    """Return a hint of what to do where names are missing in a checkpoint: the end of a message.

    Args:
        missing: names that it lacks.
        asked: names that were asked for.
        names: names that it has.
    """
    hint = place_hint(missing, names) if len(missing) == len(asked) else ""
    if hint := hint or wrapped_hint(missing, asked, names):
        return hint
    above = missing[0].partition(".")[0]
    found = [name in names for name in asked if name.partition(".")[0] == above]
    return (_GROWN if sum(found) >= _OLD * len(found) else "") + name_hint(missing[0], names)


def wrapped_hint(missing: Sequence[str], asked: Collection[str], names: Collection[str]) -> str:
    """Return a hint that names are there with other prefixes of wrappers, such as `_orig_mod` of torch.compile.

    Args:
        missing, asked, names: as of `missing_hint`.

    Returns:
        The end of a message, which begins with a semicolon; empty where less than half of them are so.
    """
    stored = {unwrapped(name): name for name in names}
    pairs = [(name, stored[plain]) for name in missing if (plain := unwrapped(name)) in stored]
    if 2 * len(pairs) < len(missing):
        return ""
    (own, found), *rest = pairs
    parts = Counter(found.split("."))
    parts.subtract(own.split("."))
    ours, theirs = [part for part in parts if parts[part] < 0], [part for part in parts if parts[part] > 0]
    more = f" and {len(rest)} more" if rest else ""
    if not (ours or theirs):
        return f"; it has '{found}'{more}, with its wrappers in another order: wrap the model as when it was saved"
    if not theirs:
        return (
            f"; it was saved without {_wrappers(ours)} in its names, as '{found}'{more}: pass what "
            "get_model_state_dict of torch.distributed.checkpoint.state_dict returns for the model"
        )
    places = {_above(*pair) for pair in pairs}
    top, lacking = own.partition(".")[0], set(missing)
    some = any(name.partition(".")[0] == top and name not in lacking for name in asked)  # which are as they were saved
    place = None if len(places) > 1 or ours or some else places.pop()
    do = "load into a model that is wrapped likewise" if place is None else f"pass {_nested(place)}"
    return f"; it was saved with {_wrappers(theirs)} in its names, as '{found}'{more}: {do}"


def _above(asked: str, found: str) -> str | None:
    """Return the keys that lead to what is stored, up to the wrappers that what was asked for lacks in one place."""
    own, other = asked.split("."), found.split(".")
    deep = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=False)))
    long = deep + len(other) - len(own)
    return ".".join(other[:long]) if other[long:] == own[deep:] else None


def _wrappers(parts: Sequence[str]) -> str:
    return " and ".join(f"'{part}' of {WRAPPERS[part]}" for part in parts)


_SHOWN = 3
"""Places that are named, of those where all of some names are."""


def place_hint(missing: Sequence[str], names: Collection[str]) -> str:
    """Return a hint of where all of these names are: below others, or without the keys that lead to them.

    Returns:
        The end of a message, which begins with a semicolon; empty where they are not together elsewhere.
    """
    below = [name.removesuffix(f".{missing[0]}") for name in names if name.endswith(f".{missing[0]}")]
    below = [above for above in below if all(f"{above}.{other}" in names for other in missing)]
    if below:
        below.sort(key=lambda above: (above.split(".")[-1] not in ("model", "module"), len(above), above))
        quoted = " and below ".join(f"'{above}'" for above in below[:_SHOWN])
        return f"; below {quoted} it has all of them: pass {' or '.join(map(_nested, below[:_SHOWN]))}"
    for name in names:
        if missing[0].endswith(f".{name}"):
            above = missing[0].removesuffix(name)
            if all(other.startswith(above) and other.removeprefix(above) in names for other in missing):
                return f"; without '{above[:-1]}' it has all of them: pass what is below '{above[:-1]}'"
    return ""


def _nested(above: str) -> str:
    """Return the dict to pass for what is below some keys."""
    nested = "state_dict" if "." in above else "module"  # modules are taken at the top level alone
    for key in reversed(above.split(".")):
        nested = f"{{'{key}': {nested}}}"
    return nested


def group_hint(name: str, layers: Sequence[str]) -> str | None:
    """Return why the name that a rule gives to a group without settings is likely a mistake.

    A tensor that was to be exact would be stored lossily without a word, in a group called "Exact".

    Args:
        name: of the group.
        layers: groups by layer type, which a rule may name, also with a number behind (`linear2`).

    Returns:
        A sentence; None for a name that is like no other.
    """
    lowered = name.lower()
    if name in layers or name.rstrip("0123456789") in layers:
        return None
    if any(part in lowered.replace("-", "").replace("_", "") for part in _EXACT) or _like(lowered, _EXACT, _ELSEWHERE):
        return f"'{name}' is the name of a group, whose tensors are lossy; to store them bit for bit say exact: true"
    if close := _like(lowered, (*_METHODS, *layers), _ELSEWHERE):
        meant = f"groups: {{NAME: {{method: {close}}}}}" if close in _METHODS else f"'{close}'"
        return (
            f"'{name}' is no group with settings; did you mean {meant}? If it is to be a group of its own, name it in "
            f"groups: {{{name}: {{}}}}"
        )
    return None


def _like(name: str, known: Sequence[str], cutoff: float) -> str | None:
    return next(iter(get_close_matches(name, known, 1, cutoff)), None)


def _places(
    model: type[BaseModel], prefix: tuple[str, ...], codebooks: Iterable[type[BaseModel]], fits: tuple[str, ...] = ()
) -> Iterator[_Place]:
    """Return all keys below a model; a key that codebooks of several kinds share is listed once."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield _Place(path, fits)
        members = list(_models(field.annotation, codebooks))
        own = _ANY if get_origin(field.annotation) in (dict, tuple) else None
        inner = path if own is None else (*path, own)
        if len(members) == 1:
            yield from _places(members[0], inner, codebooks)
            continue
        by_key: dict[tuple[str, ...], list[str]] = {}
        for member in members:
            kinds = get_args(member.model_fields["fit"].annotation)
            for place in _places(member, inner, codebooks, kinds):
                by_key.setdefault(place.path, []).extend(place.fits)
        yield from (_Place(key, tuple(kinds)) for key, kinds in by_key.items())


def _models(annotation: Any, codebooks: Iterable[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Yield the models that a field may hold: directly, in a dict or tuple, or as a choice; abstract: all codebooks."""
    if isabstract(annotation):
        yield from codebooks
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _models(part, codebooks)


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
