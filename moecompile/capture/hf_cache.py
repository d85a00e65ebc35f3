"""Key-value caches in the return value of a Hugging Face model, which pytree does not know by itself."""

from __future__ import annotations

from typing import Any


def is_cache(leaf: Any) -> bool:
    """Whether ``leaf`` is transformers' `DynamicCache`, which models return unless called with ``use_cache=False``."""
    kind = type(leaf)
    return kind.__name__ == "DynamicCache" and kind.__module__ == "transformers.cache_utils"


def register_cache() -> None:
    """Make pytree take a cache apart, with transformers' own rule for torch.export; a second call changes nothing."""
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()  # type: ignore[no-untyped-call]
