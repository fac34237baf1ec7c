"""``python -m launcher`` is the program ``gnnfleet``."""

from launcher.cli.main import main

if __name__ == "__main__":
    main()
