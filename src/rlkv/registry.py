"""Names from file names: a method or a task is one module, imported on first use.

``METHODS`` and ``TASKS`` list the modules of ``rlkv.methods`` and ``rlkv.tasks`` without importing
them; third parties add theirs through the entry point groups ``rlkv.methods`` and ``rlkv.tasks``.
"""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from rlkv.errors import UnknownNameError


def unknown_name(kind: str, name: str, known: list[str]) -> UnknownNameError:
    """An error that lists the known names and the closest ones to ``name``."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return UnknownNameError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


@dataclass(frozen=True)
class Registry:
    """The modules of one package, each defining one subclass of a base class.

    Attributes:
        kind: What an entry is called in messages, such as ``"method"``.
        package: Dotted package that holds the modules; also the entry point group.
        base_class: Name of the abstract class in ``<package>.base`` that entries subclass.
    """

    kind: str
    package: str
    base_class: str

    def names(self) -> list[str]:
        """All names, sorted; nothing is imported to find them."""
        return sorted({*self._paths(), *self._third_party()})

    def load(self, name: str) -> type:
        """The class registered as ``name``; ``family:variant`` asks the family's class.

        Raises:
            UnknownNameError: No module or entry point has that name.
        """
        family, colon, variant = name.partition(":")
        if colon:
            return self._variant(family, variant)
        if name in self._paths():
            return self._class_in(import_module(f"{self.package}.{name}"))
        third_party = self._third_party()
        if name in third_party:
            return third_party[name].load()
        raise unknown_name(self.kind, name, self.names())

    def require(self, name: str) -> None:
        """Checks that ``name``, or the family of ``family:variant``, is known; imports nothing.

        Raises:
            UnknownNameError: It is not.
        """
        family = name.partition(":")[0]
        if family not in self.names():
            raise unknown_name(self.kind, family, self.names())

    def summary(self, name: str) -> str:
        """First line of the docstring of ``name``'s module, read without importing it."""
        path = self._paths().get(name)
        if path is None:
            return (self.load(name).__doc__ or "").strip().split("\n")[0]
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        return docstring.split("\n")[0]

    def _variant(self, family: str, variant: str) -> type:
        make = getattr(self.load(family), "variant", None)
        if make is None:
            raise UnknownNameError(f"{self.kind} {family!r} has no variants; use it by that name")
        return make(variant)

    def _paths(self) -> dict[str, Path]:
        spec = find_spec(self.package)
        folders = spec.submodule_search_locations if spec else None
        files = [path for folder in folders or [] for path in Path(folder).glob("*.py")]
        hidden = {"base", "__init__"}
        return {f.stem: f for f in files if f.stem not in hidden and not f.stem.startswith("_")}

    def _third_party(self):  # noqa: ANN202 - EntryPoint mapping, private
        return {point.name: point for point in entry_points(group=self.package)}

    def _class_in(self, module: object) -> type:
        base = getattr(import_module(f"{self.package}.base"), self.base_class)
        own = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__  # type: ignore[attr-defined]
            and not value.__name__.startswith("_")
        ]
        if len(own) != 1:
            raise TypeError(f"{module} must define exactly one {self.base_class}, found {own}")
        return own[0]


METHODS = Registry("method", "rlkv.methods", "CacheMethod")
TASKS = Registry("task", "rlkv.tasks", "Task")
