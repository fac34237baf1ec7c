"""Command-line interface: parses arguments and calls the packages below."""
