"""Small changes to the docstrings on their way into the reference."""

import re
from typing import Any

import griffe

# Methods for Keras only. Base classes keep `build`, which a new flow or posterior extends.
_FOR_KERAS = re.compile(
    r"get_config|from_config|get_build_config|train_step|compute_(output_|mask|loss|metrics).*"
)
_BASES = {"Flow", "Posterior"}


class Docstrings(griffe.Extension):
    """Show `Example:` as code and lists as lists; leave out what only Keras calls."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one docstring."""
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = re.sub(r"(\n[^-\s].*)(\n- )", r"\1\n\2", text)

    def on_alias_instance(self, *, alias: griffe.Alias, node: Any, **_: Any) -> None:
        """Take `from module import name as name` for public, as type checkers do.

        Bijectors are left out: a flow's page has the formula, and who writes one reads the code.
        """
        names = [(part.name, part.asname) for part in getattr(node, "names", ())]
        if (alias.name, alias.name) in names and not alias.name.endswith("Bijector"):
            alias.public = True

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Leave out methods of one class."""
        for name in list(cls.members):
            if _FOR_KERAS.fullmatch(name) or (name == "build" and cls.name not in _BASES):
                cls.del_member(name)
