"""``python -m launcher``, or ``python …/launcher/__main__.py``, is the program ``gnnfleet``.

It imports no file of the current folder. Our own processes start it by its path, as ``-m`` would run a launcher.py
there.
"""

import os
import sys

if not __package__ or sys.path[0] in ("", os.getcwd()):
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir))

from launcher.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
