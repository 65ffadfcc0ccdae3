"""Configurations of Keras objects whose attributes are named as their arguments are."""

from typing import Any, ClassVar

__all__ = ["Configured"]


class Configured:
    """Gives a Keras object its `get_config`; mix it in before the Keras class.

    Each class lists in `arguments` those of its constructor that are attributes of the same name;
    the classes it is derived from list their own.
    """

    arguments: ClassVar[tuple[str, ...]] = ()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        classes = [vars(kind) for kind in reversed(type(self).__mro__)]
        names = [name for kind in classes for name in kind.get("arguments", ())]
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
