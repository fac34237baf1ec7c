"""The ``gnnfleet`` command line: parses arguments and calls the other packages of ``launcher``."""
