"""A descriptor pool of our own for `inference.proto`.

Triton's client and others register the same message names in protobuf's default pool, which refuses a second
definition. With a pool of its own taktd can be imported beside any of them.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pool

POOL: Final = descriptor_pool.DescriptorPool()


class BothPools:
    """For server reflection: our messages, and those of health and reflection in the default pool."""

    def _either(self, method: str, name: str) -> Any:
        try:
            return getattr(POOL, method)(name)
        except KeyError:
            return getattr(descriptor_pool.Default(), method)(name)

    def FindFileByName(self, name: str) -> Any:
        return self._either("FindFileByName", name)

    def FindFileContainingSymbol(self, name: str) -> Any:
        return self._either("FindFileContainingSymbol", name)

    def FindMessageTypeByName(self, name: str) -> Any:
        return self._either("FindMessageTypeByName", name)

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return descriptor_pool.Default().FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return descriptor_pool.Default().FindAllExtensions(message)
