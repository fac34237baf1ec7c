"""Node program: tests whether this machine can read ``data.store``. Imports fsspec, if it is installed.

``main({"url", "options", "env": environment variables of the node})`` replies {"error": message, '' for success,
"denied": whether access was denied}. Reading an empty folder is a success.
"""

from __future__ import annotations

import os
import site
import sys
from typing import Any

from launcher.node.remote_folder import AccessDenied, RemoteFolder, StoreError


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return why the store cannot be read (format: docstring of the module)."""
    os.environ.update(request["env"])
    if sys.flags.no_site:
        site.main()  # installed packages
    try:
        RemoteFolder(request["url"], request["options"]).size("manifest.json")
    except StoreError as error:
        return {"error": str(error), "denied": isinstance(error, AccessDenied)}
    return {"error": "", "denied": False}
