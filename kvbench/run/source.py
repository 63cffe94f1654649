"""The code that a run's numbers are of: what its identity holds of the files of methods and tasks.

A file of kvbench that is unmodified in the commit, or in the wheel that was installed, is shipped: the
`version` of its class stands for it. Every other file that a class needs is there by its digest: the
module of the class and of its bases, what these import from the same package (without a package: from
the same folder), and that package's compiled files. An unmodified file of another installed package is
there by that package's name and version.

A digest is of the source as it was imported, over its tokens without comments and blank lines.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import site
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import kvbench

PACKAGE = Path(kvbench.__file__).resolve().parent
UNSAVED = "unsaved"
"""The digest of a module without a file is this word and the command's own name."""
COMPILED = (*EXTENSION_SUFFIXES, ".so", ".dll", ".dylib")
_digests: dict[str, tuple[ModuleSpec | None, str]] = {}
"""By module the spec by which it was imported, and its digest: a reloaded module has another spec."""


def source_of(*things: object, command_id: str = "") -> dict[str, str]:
    """The code of these classes, functions and objects (and of the objects in their fields), by module a
    digest and by package a version; empty where all of it is shipped.

    Args:
        command_id: a name that no other command has. It stands for what has no file.
    """
    found: dict[str, str] = {}
    for module in dict.fromkeys(module for thing in things for module in _modules(thing)):
        for name, file in _needed(module):
            if file is None:
                found[name] = f"{UNSAVED} {command_id}"
            elif (package := _installed(file)) is not None:
                if package[0] != "kvbench":
                    found[package[0]] = package[1]
            elif not _is_shipped(file):
                found[name] = _digest(name, file)
    return dict(sorted(found.items()))


def has_no_commit() -> bool:
    """Whether neither git nor an installed wheel says which files of kvbench are as they were shipped:
    every file that a class needs is then in its `source_of`."""
    return not _unmodified() and _installed(PACKAGE / "__init__.py") is None


def unsaved(source: Mapping[str, str]) -> list[str]:
    """The modules of a `source_of` that have no file, so that no run of theirs can be continued."""
    return [name for name, digest in source.items() if digest.startswith(UNSAVED)]


def changed_since(revision: str, *things: object) -> list[str]:
    """The files of kvbench, of those that these things need, that are not as in a commit; none outside a
    checkout, and for a commit that is not known."""
    modules = {module for thing in things for module in _modules(thing)}
    ours = {file for module in modules for _, file in _closure(module) if file is not None}
    changed = _names("diff", "--name-only", "--relative", revision)
    names = [name for name in changed or () if PACKAGE / name in ours]
    return [f"{PACKAGE.name}/{name}" for name in names]


def _modules(thing: object) -> Iterator[str]:
    """The names of the modules in which the classes and functions of a thing are defined."""
    if isinstance(thing, type):
        for kind in thing.__mro__:
            if kind.__module__.partition(".")[0] not in sys.stdlib_module_names:
                yield kind.__module__
    elif isinstance(thing, FunctionType):
        yield thing.__module__
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _modules(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from _modules(value)
    elif is_dataclass(thing):
        yield from _modules(type(thing))
        for field in fields(thing):
            yield from _modules(getattr(thing, field.name))


def _needed(module: str) -> Sequence[tuple[str, Path | None]]:
    """The module and what it imports, by name and file. An installed package's version stands for what
    it imports. To follow imports takes a tenth of a second: not where all of kvbench is shipped."""
    if module.partition(".")[0] == PACKAGE.name:
        return _closure(module) if _has_changes() else ()
    file = None if module == "__main__" else _file_of(module)
    if file is not None and _installed(file) is not None:
        return ((module, file),)
    return _closure(module)


@cache
def _closure(module: str) -> tuple[tuple[str, Path | None], ...]:
    """A module, the modules that it imports from its own package or folder, and what these import; each
    with its file. After them `_files_beside` it."""
    found: dict[str, Path | None] = {}
    waiting = [module]
    home = _file_of(module)
    while waiting:
        name = waiting.pop()
        file = None if name == "__main__" else _file_of(name)
        if name in found or (file is None and name != module):
            continue
        found[name] = file
        if file is not None and file.suffix == ".py":
            imports = _imports(file, name)
            waiting += [other for other in imports if _belongs(other, module, home)]
    if home is not None:
        found |= {f"{file.parent.name}/{file.name}": file for file in _files_beside(module, home)}
    return tuple(found.items())


def _files_beside(module: str, home: Path) -> list[Path]:
    """The compiled files of a module's package or folder; of kvbench the data beside the module."""
    if module.partition(".")[0] == PACKAGE.name:
        return sorted(home.parent.glob("*.yaml"))
    is_package = home.name == "__init__.py"
    folder = home.parents[max(0, module.count(".") - (not is_package))]
    files = folder.rglob("*") if is_package or "." in module else folder.iterdir()
    return sorted(file for file in files if file.name.endswith(COMPILED))


def _file_of(module: str) -> Path | None:
    """The file of a module, imported or not; None where it has none, or is not found."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None and module not in sys.modules:
        with suppress(Exception):  # whatever the parent package does when it is imported
            spec = find_spec(module)
    origin = None if spec is None or not spec.has_location else spec.origin
    return None if origin is None else Path(origin).resolve()


def _imports(file: Path, module: str) -> Iterator[str]:
    """The names that a file may import as modules, those of functions among them."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: package.count(".") + 2 - node.level]
                    base = ".".join([*parents, *([base] if base else [])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _belongs(name: str, module: str, home: Path | None) -> bool:
    """Whether a name is of the package of `module`, or, where that is no package, in its folder."""
    top = name.partition(".")[0]
    if "." in module:
        return top == module.partition(".")[0]
    if top == PACKAGE.name or home is None:
        return False
    if home.name == "__init__.py":
        return top == module
    return any((home.parent / f"{top}{end}").exists() for end in ("", ".py"))


def _digest(name: str, file: Path) -> str:
    """The digest of a module's file, as it was when it was first asked for after an import."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    known = _digests.get(name)
    if known is None or known[0] is not spec:
        known = _digests[name] = spec, digest_of(file.read_bytes(), file.suffix)
    return known[1]


def digest_of(content: bytes, suffix: str = ".py") -> str:
    """The digest of a file: of Python's source over its tokens, without comments and blank lines."""
    if suffix == ".py":
        left_out = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}
        white = {tokenize.INDENT, tokenize.NEWLINE}
        with suppress(SyntaxError, tokenize.TokenError):
            tokens = [
                (tokenize.tok_name[token.type], "" if token.type in white else token.string)
                for token in tokenize.tokenize(io.BytesIO(content).readline)
                if token.type not in left_out
            ]
            content = repr(tokens).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def git(*words: str) -> bytes | None:
    """The output of git in kvbench's folder; None where it fails."""
    command = ["git", "-C", str(PACKAGE), *words]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _names(*words: str) -> list[str] | None:
    """The names of files, each ended by NUL, that git prints."""
    output = git(*words, "-z", "--", ".")
    return None if output is None else output.decode(errors="replace").split("\0")[:-1]


@cache
def _unmodified() -> frozenset[Path]:
    """The files of kvbench's folder that git tracks and whose code is as in the commit."""
    tracked = _names("ls-files")
    changed = _names("diff", "--name-only", "--relative", "HEAD")
    if tracked is None or changed is None:
        return frozenset()
    edited = {name for name in changed if _has_other_code(name)}
    return frozenset(PACKAGE / name for name in {*tracked} - edited)


def _has_other_code(name: str) -> bool:
    """Whether a changed file differs from the commit's in more than comments and blank lines."""
    committed, file = git("show", f"HEAD:./{name}"), PACKAGE / name
    if committed is None or not file.is_file():
        return True
    return digest_of(committed, file.suffix) != digest_of(file.read_bytes(), file.suffix)


@cache
def _has_changes() -> bool:
    """Whether any file of kvbench that a run's code may consist of is not shipped."""
    files = (file for end in ("*.py", "*.yaml") for file in PACKAGE.rglob(end))
    return not all(map(_is_shipped, files))


@cache
def _is_shipped(file: Path) -> bool:
    inside = file.is_relative_to(PACKAGE)
    return inside and (file in _unmodified() or _installed(file) is not None)


@cache
def _installed(file: Path) -> tuple[str, str] | None:
    """The name and version of the installed package whose list of files has this one as it is."""
    for place in _places():
        if file.is_relative_to(place):
            name = file.relative_to(place).as_posix()
            (top, *_) = name.partition("/")
            for package in _distributions().get(top.removesuffix(".py"), ()):
                with suppress(PackageNotFoundError):
                    files = _recorded(package)
                    if name in files and files[name] == _hash(file):
                        return package, distribution(package).version
    return None


@cache
def _places() -> list[Path]:
    """The folders of installed packages, those of ``pip install --user`` and of an environment with the
    system's packages among them."""
    return [
        Path(place).resolve() for place in (*site.getsitepackages(), site.getusersitepackages())
    ]


_distributions = cache(packages_distributions)


@cache
def _recorded(package: str) -> dict[str, str]:
    """The sha256 of an installed package's files by name, as its RECORD has them."""
    listed: Any = distribution(package).files or ()
    return {file.as_posix(): file.hash.value for file in listed if file.hash is not None}


def _hash(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
