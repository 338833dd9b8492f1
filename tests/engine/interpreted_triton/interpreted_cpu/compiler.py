"""What Triton's registry of backends asks for beside the driver; never called."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend as _Base


class InterpretedBackend(_Base):  # type: ignore[misc]
    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")


# Triton takes concrete classes alone, and none of the other methods is reached.
InterpretedBackend.__abstractmethods__ = frozenset()
