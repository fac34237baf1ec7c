"""One rank of several training jobs, one after the other in one process; started by ``train_kit.start_words``."""

from __future__ import annotations

import json
import os
import sys

from trainer.cli import main

if __name__ == "__main__":
    first_port = int(os.environ["MASTER_PORT"])
    for number, words in enumerate(json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(first_port + number)
        try:
            main(words)
        except SystemExit as ending:
            if ending.code:
                raise
