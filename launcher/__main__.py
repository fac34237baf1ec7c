"""``python -m launcher`` is the program ``gnnfleet``. It imports no file of the current folder."""

import os
import sys

if sys.path[0] in ("", os.getcwd()):
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir))

from launcher.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
