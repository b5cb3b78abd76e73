"""Hints in error messages: for misspelled or misplaced configuration keys, patterns without matches, missing names
and mismatches of shapes.
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

from dsq_ckpt.core.wrappers import WRAPPERS, strip_wrappers

SHAPE_MISMATCH_ADVICE = (
    "is it the same model? If the module is to size its buffers by what is loaded, load into an empty dict in the "
    "place of its state dict, and give it that by load_state_dict"
)
"""Advice if a saved tensor has another shape than the one to load into."""
_GROWN_MODEL_ADVICE = (
    " (a model that has grown loads the rest by dcp.load with a DSQStorageReader and "
    "DefaultLoadPlanner(allow_partial_load=True))"
)
_NO_GRADIENT_ADVICE = (
    " (parameters that had no gradient before the save have no state: a Compressor, or dsq_ckpt.load of "
    "{'model': model, 'optimizer': optimizer} with the objects themselves, loads the rest)"
)
_GROWN_MODEL_SHARE = 0.25
"""Minimum share of names below a key that exist, for the assumption that the model has grown."""
_ANY = "*"
_NAME_CUTOFF = 0.75  # similarity of parts of names; below it, `linear` would match `layer`
_KEY_CUTOFF = 0.8  # similarity of keys in other places; keys at the same place may be less similar
_EXACT = ("exact", "lossless", "uncompressed", "bitforbit")
_METHODS = ("bf16", "quantize")


class _Key(NamedTuple):
    """A key of a configuration.

    Attributes:
        path: its path; `*` stands for a name that the user chooses.
        fits: values of `fit` of the codebooks that have it; empty outside of codebooks.
    """

    path: tuple[str, ...]
    fits: tuple[str, ...]

    def count_common_parts(self, other: Sequence[str]) -> int:
        """Return the length of the common prefix with a path."""
        shared = 0
        for key_part, part in zip(self.path, other, strict=False):
            if key_part not in (_ANY, part):
                break
            shared += 1
        return shared

    def to_dotted(self, other: Sequence[str]) -> str:
        """Return the dotted path, with the names in `other` at places that the user chooses."""
        shared = self.count_common_parts(other)
        return ".".join(other[index] if own == _ANY and index < shared else own for index, own in enumerate(self.path))


_EXPECTED_TEXTS = {
    "bool_type": "expected true or false", "tuple_type": "expected a list", "list_type": "expected a list",
    "model_type": "expected keys and their values", "dict_type": "expected keys and their values",
    "model_attributes_type": "expected keys and their values", "string_type": "expected text",
    "int_type": "expected a whole number", "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number", "float_type": "expected a number",
    "float_parsing": "expected a number",
}
"""Texts by pydantic's error type."""
NOT_REGISTERED = "not_registered"
"""An additional error type: a name that is not in a registry. Its context has the expected names."""
_UNION_LABELS = ("bool", "constrained-int", "constrained-float", "literal['auto']", "literal['observed']")
"""Pydantic's labels of the alternatives of a field."""


def explain_errors(
    location: str, error: ValidationError, root: type[BaseModel], codebooks: Mapping[str, type[BaseModel]],
    renamed: Mapping[str, str],
) -> str:
    """Return the description of all errors in a configuration, one line per key.

    Args:
        location: name of the configuration.
        error: pydantic's errors.
        root: pydantic model of the configuration.
        codebooks: models of codebooks by the value of `fit`, which pydantic has in the path of an error.
        renamed: current dotted key by former dotted key.
    """
    problems: dict[str, list[str]] = {}
    messages: dict[str, str] = {}
    for issue in error.errors():
        key = ".".join(str(part) for part in issue["loc"] if part not in (*codebooks, *_UNION_LABELS))
        if issue["type"] == "extra_forbidden":
            fit = next((str(part) for part in issue["loc"] if part in codebooks), None)
            hint = _former_hint(key, renamed) or key_hint(root, key.split("."), codebooks, fit)
            problems[key] = [f"unknown key{hint}"]
        else:
            text, hint = _describe_issue(issue)
            problems.setdefault(key, []).append(text)
            messages[key] = f" (found {_shorten(issue.get('input'))}){hint}"
    lines = [f"  {key or '(root)'}: {', or '.join(texts)}{messages.get(key, '')}" for key, texts in problems.items()]
    return f"{location}: {len(lines)} problem(s)\n" + "\n".join(lines)


def _former_hint(key: str, renamed: Mapping[str, str]) -> str:
    """Return a hint for a former key at a wrong place, or together with its current name."""
    if key in renamed:
        return f"; it is the former name of '{renamed[key]}', which is given too: leave out '{key}'"
    leaf = key.rpartition(".")[2]
    present = [f"'{new}'" for former, new in renamed.items() if former.rpartition(".")[2] == leaf]
    return f"; '{leaf}' is the former name of {_format_alternatives(present)}" if present else ""


def _describe_issue(issue: Any) -> tuple[str, str]:
    """Return the expectation of an error, and a hint of the probable meaning."""
    kind, context, value = issue["type"], issue.get("ctx", {}), issue.get("input")
    if kind == "union_tag_invalid":
        expected, value = str(context["expected_tags"]), context["tag"]
    elif kind in ("literal_error", NOT_REGISTERED):
        expected = str(context["expected"])
    else:
        plain = issue["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ")
        return _EXPECTED_TEXTS.get(kind, plain), ""
    close = _find_close_match(value, re.findall(r"'([^']*)'", expected), 0.6) if isinstance(value, str) else None
    hint = f"; did you mean '{close}'?" if close is not None else ""
    if kind in ("union_tag_invalid", NOT_REGISTERED):
        hint = hint or "; if it is another package's, import the module that registers it, or give it an entry point"
    field = "fit: " if kind == "union_tag_invalid" else ""
    return f"{field}expected {expected}", hint


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def key_hint(
    root: type[BaseModel], path: Sequence[str], codebooks: Mapping[str, type[BaseModel]], fit: str | None = None
) -> str:
    """Return a hint where an unknown key belongs, or which key it may be a misspelling of.

    Args:
        root: pydantic model of the configuration.
        path: path of the unknown key.
        codebooks: models of codebooks by the value of `fit`.
        fit: `fit` of the codebook that contains it, if any.

    Returns:
        The end of a message, which begins with a semicolon; empty without a similar key.
    """
    parent, leaf = tuple(path[:-1]), path[-1]
    keys = list(_iter_keys(root, (), dict.fromkeys(codebooks.values())))
    same_leaf = [key for key in keys if key.path[-1] == leaf]
    if same_leaf:
        best = max(same_leaf, key=lambda key: key.count_common_parts(path))
        if len(best.path) == len(path) and best.count_common_parts(path) == len(path):
            if not best.fits:  # a valid key that was written with dots
                nested = "..."
                for name in reversed(path):
                    nested = f"{{'{name}': {nested}}}"
                return f"; write it as {nested}"
            return f"; codebooks have it with fit: {_format_alternatives(best.fits)}"
        if len(best.path) == 1:
            return f"; '{leaf}' belongs at the top level"
        return f"; it belongs elsewhere: '{best.to_dotted(path)}'"
    candidates = [key.path[-1] for key in keys if len(key.path) == len(path)
            and key.count_common_parts(parent) == len(parent)
            and (fit is None or not key.fits or fit in key.fits)]
    if close := get_close_matches(leaf, sorted(set(candidates)), 1):
        return f"; did you mean '{close[0]}'?"
    if close := get_close_matches(leaf, sorted({key.path[-1] for key in keys}), 1, _KEY_CUTOFF):
        same_leaf = [key for key in keys if key.path[-1] == close[0]]
        best = max(same_leaf, key=lambda key: key.count_common_parts(path))
        return f"; did you mean '{best.to_dotted(path)}'?"
    return ""


def pattern_hint(pattern: str, names: Iterable[str]) -> str:
    """Return a hint of names similar to a shell pattern without matches.

    Returns:
        The end of a message, which begins with a semicolon; it lists some names if none is similar.
    """
    options = sorted(names)
    if not options:
        return "; there are no tensors"
    literal = max(re.split(r"[*?\[\]]+", pattern), key=len).strip(".")
    width = literal.count(".") + 1
    holders: dict[str, str] = {}
    for name in options:
        parts = name.split(".")
        for start in range(len(parts) - width + 1):
            holders.setdefault(".".join(parts[start : start + width]), name)
    matches = [literal] if literal in holders else get_close_matches(literal, holders, 3, _NAME_CUTOFF)
    close = list(dict.fromkeys(holders[match] for match in matches))
    if close:
        return f"; did you mean a pattern for {_format_alternatives([repr(name) for name in close])}?"
    return f"; names here are such as {', '.join(repr(name) for name in options[:3])}"


def name_hint(name: str, names: Iterable[str]) -> str:
    """Return a hint of names similar to an unknown name.

    Returns:
        The end of a message, which begins with a semicolon; it lists some names if none is similar.
    """
    options = sorted(names)
    tail = [option for option in options if f".{option}".endswith(f".{name}") or f".{name}".endswith(f".{option}")]
    if close := tail[:3] or get_close_matches(name, options, 3, _NAME_CUTOFF):
        return f"; did you mean {_format_alternatives([repr(option) for option in close])}?"
    suffix = f" and {len(options) - 5} more" if len(options) > 5 else ""
    return f"; there are {', '.join(repr(option) for option in options[:5])}{suffix}" if options else "; it is empty"


def missing_hint(missing: Sequence[str], requested: Collection[str], names: Collection[str]) -> str:
    """Return the end of a message with a remedy for names that are missing in a checkpoint.

    Args:
        missing: requested names that the checkpoint does not have.
        requested: names in the state dict to load into.
        names: names in the checkpoint.
    """
    hint = place_hint(missing, names) if len(missing) == len(requested) else ""
    if hint := hint or wrapped_hint(missing, requested, names):
        return hint
    top = missing[0].partition(".")[0]
    exists = [name in names for name in requested if name.partition(".")[0] == top]
    has_grown = sum(exists) >= _GROWN_MODEL_SHARE * len(exists)
    advice = _NO_GRADIENT_ADVICE if _lacks_state_only(missing, names) else _GROWN_MODEL_ADVICE
    return (advice if has_grown else "") + name_hint(missing[0], names)


def _lacks_state_only(missing: Sequence[str], names: Collection[str]) -> bool:
    """Return whether the optimizer's state alone is missing, of a parameter that was saved and has no state at all."""
    optimizer, found, entry = missing[0].partition(".state.")
    parameter = entry.rpartition(".")[0]
    if not (found and parameter and all(".state." in name for name in missing)):
        return False
    is_saved = any(name.endswith(f".{parameter}") for name in names)
    return is_saved and not any(name.startswith(f"{optimizer}.state.{parameter}.") for name in names)


def wrapped_hint(missing: Sequence[str], requested: Collection[str], names: Collection[str]) -> str:
    """Return a hint that names exist with other prefixes of wrappers, such as `_orig_mod` of torch.compile.

    Args:
        missing: as for `missing_hint`.
        requested: as for `missing_hint`.
        names: as for `missing_hint`.

    Returns:
        The end of a message, which begins with a semicolon; empty if that holds for less than half of `missing`.
    """
    stored = {strip_wrappers(name): name for name in names}
    pairs = [(name, stored[plain]) for name in missing if (plain := strip_wrappers(name)) in stored]
    if 2 * len(pairs) < len(missing):
        return ""
    (own, match), *rest = pairs
    parts = Counter(match.split("."))
    parts.subtract(own.split("."))
    own_parts, saved_parts = [part for part in parts if parts[part] < 0], [part for part in parts if parts[part] > 0]
    suffix = f" and {len(rest)} more" if rest else ""
    if not (own_parts or saved_parts):
        return f"; it has '{match}'{suffix}, with its wrappers in another order: wrap the model as when it was saved"
    if not saved_parts:
        return (
            f"; it was saved without {_format_wrappers(own_parts)} in its names, as '{match}'{suffix}: pass what "
            "get_model_state_dict of torch.distributed.checkpoint.state_dict returns for the model"
        )
    places = {_find_missing_prefix(*pair) for pair in pairs}
    top, lacking = own.partition(".")[0], set(missing)
    some_match = any(name.partition(".")[0] == top and name not in lacking for name in requested)
    path = None if len(places) > 1 or own_parts or some_match else places.pop()
    advice = "load into a model that is wrapped likewise" if path is None else f"pass {_format_nested(path)}"
    return f"; it was saved with {_format_wrappers(saved_parts)} in its names, as '{match}'{suffix}: {advice}"


def _find_missing_prefix(requested: str, stored: str) -> str | None:
    """Return the prefix of a stored name up to wrappers that a requested name lacks; None if it differs elsewhere."""
    requested_parts, stored_parts = requested.split("."), stored.split(".")
    depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(requested_parts, stored_parts, strict=False)))
    long = depth + len(stored_parts) - len(requested_parts)
    return ".".join(stored_parts[:long]) if stored_parts[long:] == requested_parts[depth:] else None


def _format_wrappers(parts: Sequence[str]) -> str:
    return " and ".join(f"'{wrapper}' of {WRAPPERS[wrapper]}" for wrapper in parts)


_MAX_PLACES = 3
"""Maximum number of places in a hint."""


def place_hint(missing: Sequence[str], names: Collection[str]) -> str:
    """Return a hint of a key below which all of these names exist, or of one that they have in excess.

    Returns:
        The end of a message, which begins with a semicolon; empty if there is none.
    """
    prefixes = [name.removesuffix(f".{missing[0]}") for name in names if name.endswith(f".{missing[0]}")]
    prefixes = [prefix for prefix in prefixes if all(f"{prefix}.{other}" in names for other in missing)]
    if prefixes:
        prefixes.sort(key=lambda prefix: (prefix.split(".")[-1] not in ("model", "module"), len(prefix), prefix))
        quoted = " and below ".join(f"'{prefix}'" for prefix in prefixes[:_MAX_PLACES])
        return f"; below {quoted} it has all of them: pass {' or '.join(map(_format_nested, prefixes[:_MAX_PLACES]))}"
    for name in names:
        if missing[0].endswith(f".{name}"):
            prefix = missing[0].removesuffix(name)
            if all(other.startswith(prefix) and other.removeprefix(prefix) in names for other in missing):
                return f"; without '{prefix[:-1]}' it has all of them: pass what is below '{prefix[:-1]}'"
    return ""


def _format_nested(prefix: str) -> str:
    """Return the text of the dict to pass for entries below a dotted key."""
    nested = "state_dict" if "." in prefix else "module"  # modules are accepted at the top level only
    for key in reversed(prefix.split(".")):
        nested = f"{{'{key}': {nested}}}"
    return nested


def group_hint(name: str, layers: Sequence[str]) -> str | None:
    """Return why the name of a group without settings in a rule is probably a mistake.

    A tensor that should be exact would silently be stored lossily, in a group called "Exact".

    Args:
        name: name of the group.
        layers: groups by layer type, which a rule may name, also with a number appended (`linear2`).

    Returns:
        A sentence; None for a name without similar ones.
    """
    lowered = name.lower()
    if name in layers or name.rstrip("0123456789") in layers:
        return None
    letters = lowered.replace("-", "").replace("_", "")
    if any(word in letters for word in _EXACT) or _find_close_match(lowered, _EXACT, _KEY_CUTOFF):
        return f"'{name}' is the name of a group, whose tensors are lossy; to store them bit for bit say exact: true"
    if close := _find_close_match(lowered, (*_METHODS, *layers), _KEY_CUTOFF):
        option = f"groups: {{NAME: {{method: {close}}}}}" if close in _METHODS else f"'{close}'"
        return (
            f"'{name}' is no group with settings; did you mean {option}? If it is to be a group of its own, name it in "
            f"groups: {{{name}: {{}}}}"
        )
    return None


def _find_close_match(name: str, names: Sequence[str], cutoff: float) -> str | None:
    return next(iter(get_close_matches(name, names, 1, cutoff)), None)


def _iter_keys(
    model: type[BaseModel], prefix: tuple[str, ...], codebooks: Iterable[type[BaseModel]], fits: tuple[str, ...] = ()
) -> Iterator[_Key]:
    """Yield all keys of a model; a key that codebooks with several fits share occurs once."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield _Key(path, fits)
        members = list(_iter_models(field.annotation, codebooks))
        key_part = _ANY if get_origin(field.annotation) in (dict, tuple) else None
        inner = path if key_part is None else (*path, key_part)
        if len(members) == 1:
            yield from _iter_keys(members[0], inner, codebooks)
            continue
        by_key: dict[tuple[str, ...], list[str]] = {}
        for member in members:
            kinds = get_args(member.model_fields["fit"].annotation)
            for entry in _iter_keys(member, inner, codebooks, kinds):
                by_key.setdefault(entry.path, []).extend(entry.fits)
        yield from (_Key(key, tuple(kinds)) for key, kinds in by_key.items())


def _iter_models(annotation: Any, codebooks: Iterable[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a field: itself, or in a dict, tuple or union; all codebooks if abstract."""
    if isabstract(annotation):
        yield from codebooks
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _iter_models(argument, codebooks)


def _format_alternatives(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
