"""The verb `export` of models that predict."""

import os
from collections.abc import Callable
from typing import Any, ClassVar


class Exports:
    """Gives a Keras model the verb `export`; mix it in before `keras.Model`."""

    writer: ClassVar[Callable[..., Any]]
    """Writes the file; `tfp_ibnn.export` sets it."""

    def export(self, filepath: str | os.PathLike, **options: Any) -> None:
        """Write a file that needs no Python code of this library, as `tfp_ibnn.export` does.

        Args:
            filepath: of a folder or a file.
            **options: those of `tfp_ibnn.export`, such as `format`, `draws` or `overwrite`.
        """
        self.writer(self, filepath, **options)
