"""Secrets that are shown, sent or logged stand as asterisks."""

from __future__ import annotations

import re
from typing import Any

from harness_sdk.json_values import is_array, is_object

MASK = "**********"
"""Stands for a secret in everything that is shown."""

SECRET_KEY = re.compile(r"(^|\.)(auth_|hf_)?(token|secret|password)$")
"""Names of settings that hold one."""

# To the last @: a password that should have been quoted may hold one, or a slash.
_URL_PASSWORD = re.compile(r"(://[^:/@\s]*):[^\s]+@")
_QUERY_PASSWORD = re.compile(r"([?&][a-z_]*password=)[^&\s]+")


def masked_url(url: str) -> str:
    """The address of a server without its password, for logs and errors."""
    return _QUERY_PASSWORD.sub(rf"\1{MASK}", _URL_PASSWORD.sub(rf"\1:{MASK}@", url))


def masked(value: Any) -> Any:
    """Plain values, nested as in JSON, without secrets and passwords of addresses."""
    if is_object(value):
        return {
            key: MASK if item and SECRET_KEY.search(key) else masked(item)
            for key, item in value.items()
        }
    if is_array(value):
        return [masked(item) for item in value]
    return masked_url(value) if isinstance(value, str) else value
